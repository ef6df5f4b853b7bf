"""The changes of strategy of a training run, predicted and measured."""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace

from harness.domain.record import Record, Sample
from harness.measure.derive.spans import samples_of
from harness.measure.derive.steps import change_times, step_times
from harness.measure.rank_records import Records
from harness.measure.statistics import known_median
from harness.measure.store import Run


@dataclass(frozen=True, kw_only=True)
class ChangeRow:
    """One change.

    Attributes:
        step: the first step after it; several changes may be of one step.
        still_s: seconds without training, on the slowest rank.
        build_s: seconds in which the next engine was built beside training.
        moved_bytes: bytes of the state that travelled, by (sender, reader).
        cached_bytes: bytes of cached activations that all ranks received.
        step_before_s, step_after_s: median of the steps by the old and by the new strategy; None
            if no step was trained by it.
        break_even_steps: steps after which the time standing still is recovered; None if the new
            strategy's steps are not shorter.
    """

    step: int
    before: str
    after: str
    why: str
    still_s: float
    predicted_still_s: float | None
    build_s: float | None
    moved_bytes: dict[tuple[int, int], int]
    predicted_bytes: dict[tuple[int, int], int]
    cached_bytes: int
    step_before_s: float | None
    step_after_s: float | None
    predicted_before_s: float | None
    predicted_after_s: float | None

    @property
    def break_even_steps(self) -> float | None:
        if self.step_before_s is None or self.step_after_s is None:
            return None
        gain_s = self.step_before_s - self.step_after_s
        return self.still_s / gain_s if gain_s > 0 else None


def as_planned(run: Run) -> Run:
    """A run until its first change of strategy, which is all that its plan predicts."""
    first = min(change_times(run), default=None)
    if first is None:
        return run
    ranks = {
        rank: Records(r for r in records if r.step is None or r.step < first)
        for rank, records in run.ranks.items()
    }
    return replace(run, ranks=ranks)


def change_rows(run: Run) -> tuple[ChangeRow, ...]:
    """The changes of a run, by step; empty if its strategy stayed."""
    changes, times = _changes(run.ranks.get(0, [])), step_times(run)
    steps = [change[0].step or 0 for change in changes]
    cached_bytes = _cached_bytes(run)
    bounds = [0, *steps, max(times, default=0) + 1]
    found = []
    for number, (still, *samples) in enumerate(changes):
        step, nth = steps[number], steps[:number].count(steps[number])
        found.append(
            ChangeRow(
                step=step,
                before=str(still.labels["before"]),
                after=str(still.labels["after"]),
                why=str(still.labels["why"]),
                still_s=still.value,
                predicted_still_s=_number(samples, "change_predicted_s"),
                build_s=_number(samples, "change_build_s"),
                moved_bytes=_pairs(samples, "change_bytes"),
                predicted_bytes=_pairs(samples, "change_predicted_bytes"),
                cached_bytes=cached_bytes.get((step, nth), 0),
                step_before_s=_median(times, bounds[number], step),
                step_after_s=_median(times, step, bounds[number + 2]),
                predicted_before_s=_number(samples, "change_step_predicted_s", side="before"),
                predicted_after_s=_number(samples, "change_step_predicted_s", side="after"),
            )
        )
    return tuple(found)


def _changes(records: Iterable[Record]) -> list[list[Sample]]:
    """The samples of each change, by step. The first is `change_s`; the others follow it in the
    file, because several changes may be of one step."""
    by_step: dict[int | None, list[list[Sample]]] = defaultdict(list)
    for sample in records:
        if not isinstance(sample, Sample) or not sample.metric.startswith("change_"):
            continue
        if sample.metric == "change_s":
            by_step[sample.step].append([sample])
        elif sample.step in by_step:
            by_step[sample.step][-1].append(sample)
    steps = sorted(by_step, key=lambda step: step or 0)
    return [change for step in steps for change in by_step[step]]


def _number(samples: Iterable[Sample], metric: str, **labels: str) -> float | None:
    values = (
        sample.value
        for sample in samples
        if sample.metric == metric and labels.items() <= sample.labels.items()
    )
    return next(values, None)


def _pairs(samples: Iterable[Sample], metric: str) -> dict[tuple[int, int], int]:
    return {
        (int(s.labels["source"]), int(s.labels["target"])): round(s.value)
        for s in samples
        if s.metric == metric
    }


def _cached_bytes(run: Run) -> dict[tuple[int, int], int]:
    """Bytes of activations that all ranks received, by step and number of the change at it.

    Every rank has a sample of the changes that fill the cache. On rank 0 it is before `change_s`,
    which tells the number.
    """
    numbers: dict[int | None, list[int]] = defaultdict(list)
    n_changes = Counter[int | None]()
    for sample in run.ranks.get(0, []):
        if isinstance(sample, Sample) and sample.metric == "change_s":
            n_changes[sample.step] += 1
        elif isinstance(sample, Sample) and sample.metric == "cache_received_bytes":
            numbers[sample.step].append(n_changes[sample.step])
    found = Counter[tuple[int, int]]()
    for records in run.ranks.values():
        at = {step: iter(of_step) for step, of_step in numbers.items()}
        for sample in samples_of(records, "cache_received_bytes"):
            number = next(at.get(sample.step, iter(())), None)
            if number is not None and sample.step is not None:
                found[sample.step, number] += round(sample.value)
    return found


def _median(times: dict[int, float], start: int, stop: int) -> float | None:
    return known_median(duration_s for step, duration_s in times.items() if start <= step < stop)
