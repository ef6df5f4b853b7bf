"""The changes of strategy of a training run, predicted and measured."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from harness.domain.record import Record, Sample
from harness.measure.derive.spans import samples_of
from harness.measure.derive.training import change_times, step_times
from harness.measure.rank_records import Records
from harness.measure.statistics import known_median
from harness.measure.store import Run


@dataclass(frozen=True, kw_only=True)
class ChangeRow:
    """One change.

    Attributes:
        step: the first step by the new strategy.
        still_s: seconds without training, on the slowest rank.
        build_s: seconds in which the next engine was built beside training.
        moved_bytes: bytes of the state that travelled, by (sender, reader).
        cached_bytes: bytes of cached activations that all ranks received.
        step_before_s, step_after_s: median of the steps by the old and by the new strategy.
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
    records = run.ranks.get(0, [])
    changes = sorted(samples_of(records, "change_s"), key=lambda one: one.step or 0)
    times = step_times(run)
    bounds = [0, *(one.step or 0 for one in changes), max(times, default=0) + 1]
    found = []
    for number, one in enumerate(changes):
        step = one.step or 0
        found.append(
            ChangeRow(
                step=step,
                before=str(one.labels["before"]),
                after=str(one.labels["after"]),
                why=str(one.labels["why"]),
                still_s=one.value,
                predicted_still_s=_number(records, "change_predicted_s", step),
                build_s=_number(records, "change_build_s", step),
                moved_bytes=_pairs(samples_of(records, "change_bytes"), step),
                predicted_bytes=_pairs(samples_of(records, "change_predicted_bytes"), step),
                cached_bytes=_cached_bytes(run, step),
                step_before_s=_median(times, bounds[number], step),
                step_after_s=_median(times, step, bounds[number + 2]),
                predicted_before_s=_number(records, "change_step_predicted_s", step, side="before"),
                predicted_after_s=_number(records, "change_step_predicted_s", step, side="after"),
            )
        )
    return tuple(found)


def _number(records: Iterable[Record], metric: str, step: int, **labels: str) -> float | None:
    values = (
        sample.value
        for sample in samples_of(records, metric)
        if sample.step == step and labels.items() <= sample.labels.items()
    )
    return next(values, None)


def _pairs(samples: Sequence[Sample], step: int) -> dict[tuple[int, int], int]:
    return {
        (int(s.labels["source"]), int(s.labels["target"])): round(s.value)
        for s in samples
        if s.step == step
    }


def _cached_bytes(run: Run, step: int) -> int:
    received = (
        s.value
        for records in run.ranks.values()
        for s in samples_of(records, "cache_received_bytes")
        if s.step == step
    )
    return round(sum(received))


def _median(times: dict[int, float], start: int, stop: int) -> float | None:
    return known_median(duration_s for step, duration_s in times.items() if start <= step < stop)
