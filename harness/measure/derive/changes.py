"""The changes of strategy of a training run, predicted and measured."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from harness.domain.record import Label, Record, Sample
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
    """The changes of a run, in order; empty if its strategy stayed."""
    records, times = Records.of(run.ranks.get(0, [])), step_times(run)
    changes = sorted(records.samples.get("change_s", []), key=_change_of)
    steps = [still.step or 0 for still in changes]
    before, after = [0, *steps], [*steps[1:], max(times, default=0) + 1]
    rows = []
    for at, (still, step) in enumerate(zip(changes, steps, strict=True)):
        of_change = partial(_labelled, records, change=_change_of(still))
        rows.append(
            ChangeRow(
                step=step,
                before=str(still.labels["before"]),
                after=str(still.labels["after"]),
                why=str(still.labels["why"]),
                still_s=still.value,
                predicted_still_s=_value(of_change("change_predicted_s")),
                build_s=_value(of_change("change_build_s")),
                moved_bytes=_by_pair(of_change("change_bytes")),
                predicted_bytes=_by_pair(of_change("change_predicted_bytes")),
                cached_bytes=sum(
                    round(sample.value)
                    for rank in run.ranks.values()
                    for sample in _labelled(rank, "cache_received_bytes", change=_change_of(still))
                ),
                step_before_s=_median(times, before[at], step),
                step_after_s=_median(times, step, after[at]),
                predicted_before_s=_value(of_change("change_step_predicted_s", side="before")),
                predicted_after_s=_value(of_change("change_step_predicted_s", side="after")),
            )
        )
    return tuple(rows)


def _change_of(sample: Sample) -> int:
    return int(sample.labels["change"])


def _labelled(records: Iterable[Record], metric: str, **labels: Label) -> list[Sample]:
    return [s for s in samples_of(records, metric) if labels.items() <= s.labels.items()]


def _value(samples: Iterable[Sample]) -> float | None:
    return next((sample.value for sample in samples), None)


def _by_pair(samples: Iterable[Sample]) -> dict[tuple[int, int], int]:
    return {(int(s.labels["source"]), int(s.labels["target"])): round(s.value) for s in samples}


def _median(times: dict[int, float], start: int, stop: int) -> float | None:
    return known_median(duration_s for step, duration_s in times.items() if start <= step < stop)
