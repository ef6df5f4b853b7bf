"""The times of a run's steps, and its numbers by step: over all ranks."""

from collections import Counter, defaultdict
from collections.abc import Callable
from typing import TypeVar

from harness.domain.record import SHORTEST_S, Sample
from harness.measure.derive.spans import samples_of
from harness.measure.rank_records import KIND_CODES, Records
from harness.measure.store import Run

Key = TypeVar("Key")


def values_by_step(run: Run, metric: str) -> dict[int, dict[int, float]]:
    """Sum of samples by step and rank (several interfaces or passes add up)."""
    steps: dict[int, dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for rank, records in run.ranks.items():
        for sample in samples_of(records, metric):
            if sample.step is not None:
                steps[sample.step][rank] += sample.value
    return dict(sorted(steps.items()))


def by_iteration(
    run: Run, metric: str, key_of: Callable[[Sample], Key]
) -> dict[Key, dict[int, dict[int, float]]]:
    """Values by key, iteration and rank. The iteration is `step`, else the sample's place among
    those of its rank with the same key."""
    found: dict[Key, dict[int, dict[int, float]]] = defaultdict(lambda: defaultdict(dict))
    for rank, records in run.ranks.items():
        n_seen = Counter[Key]()
        for sample in samples_of(records, metric):
            key = key_of(sample)
            at = n_seen[key] if sample.step is None else sample.step
            n_seen[key] += 1
            found[key][at][rank] = sample.value
    return found


def largest_by_step(run: Run, metric: str) -> dict[int, float]:
    """The largest of the ranks' values in each step."""
    found = values_by_step(run, metric)
    return {step: max(by_rank.values()) for step, by_rank in found.items()}


def step_times(run: Run) -> dict[int, float]:
    """Seconds of each step: the maximum over ranks of span `step`."""
    times: dict[int, float] = {}
    for records in run.ranks.values():
        spans = Records.of(records).columns
        ends = spans.kind == KIND_CODES["step"]
        steps, durations_s = spans.steps[spans.group[ends]], spans.duration_s[ends]
        for step, duration_s in zip(steps.tolist(), durations_s.tolist(), strict=True):
            times[step] = max(times.get(step, 0.0), duration_s)
    return dict(sorted(times.items()))


def samples_by_unit(run: Run) -> dict[int, float]:
    """Samples of the job in each recorded step or epoch."""
    by_step = values_by_step(run, "n_samples").items()
    # Summed by step, because a change of strategy gives the samples to other ranks.
    return {n: sum(own.values()) for n, own in by_step if len(own) == len(run.header.ranks)}


def full_times(run: Run) -> dict[int, float]:
    """Seconds of each step, else epoch, without those of fewer samples than others: a smaller batch
    compares neither with a prediction nor with a step without communication."""
    times, samples = step_times(run) or epoch_times(run), samples_by_unit(run)
    known = {unit: samples[unit] for unit in times if unit in samples}
    if len(set(known.values())) < 2:
        return times
    return {unit: times[unit] for unit, n in known.items() if n == max(known.values())}


def change_times(run: Run) -> dict[int, float]:
    """Seconds standing still in changes of strategy, by the first step after them."""
    times: dict[int, float] = defaultdict(float)
    for one in samples_of(run.ranks.get(0, []), "change_s"):
        if one.step is not None:
            times[one.step] += one.value
    return dict(times)


def epoch_times(run: Run) -> dict[int, float]:
    """Seconds of each epoch: the maximum over ranks of sample `epoch_s`."""
    times = largest_by_step(run, "epoch_s")
    return {epoch: time for epoch, time in times.items() if time >= SHORTEST_S}


def by_first_rank(run: Run, metric: str) -> dict[int, float]:
    """Samples of the first rank that has them, by step."""
    found = values_by_step(run, metric)
    return {step: by_rank[min(by_rank)] for step, by_rank in found.items()}
