"""Phases of a step from spans: unions of intervals, exposed and overlapped communication.

    backward       |------------------|
    communication        |------|  |---------|
                         overlapped   exposed

Formulas: docs/metrics.md, part Derived. All functions take the spans of one rank, because clocks of
ranks are not aligned.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from harness.domain.record import Record, Sample, Span
from harness.measure.rank_records import KIND_CODES, Records, Spans

COMPUTE_KINDS = ("forward", "backward", "compute", "optimizer")
COMPUTING = tuple(kind for kind in COMPUTE_KINDS if kind != "optimizer")
PHASES = (
    *("data", "host_to_device", "forward", "backward", "compute"),
    *("exposed_communication", "optimizer", "other"),
)


def covered_s(spans: Iterable[Span], within: Span | None = None) -> float:
    """Length of the union of the spans' intervals, clipped to `within`; seconds."""
    intervals = np.array([(s.start_s, s.start_s + s.duration_s) for s in spans], dtype=float)
    if intervals.size == 0:
        return 0.0
    if within is not None:
        intervals = intervals.clip(within.start_s, within.start_s + within.duration_s)
    _, _, length_s = _disjoint(np.zeros(len(intervals), np.int8), *intervals.T)
    return float(length_s.sum())


def _disjoint(
    group: np.ndarray, start_s: np.ndarray, end_s: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(group, start, length) that each interval adds to the union of its group, in order."""
    order = np.lexsort((start_s, group))
    group, start_s, end_s = group[order], start_s[order], end_s[order]
    # A running maximum over positions among all ends, sorted by group, gives the latest end so far
    # in each group, because all positions of a later group are higher.
    by_end = np.lexsort((end_s, group))
    place = np.empty_like(by_end)
    place[by_end] = np.arange(len(by_end))
    reached = end_s[by_end][np.maximum.accumulate(place)]
    begin = start_s.copy()
    is_next = group[1:] == group[:-1]
    begin[1:] = np.where(is_next, np.maximum(start_s[1:], reached[:-1]), start_s[1:])
    return group, begin, np.clip(end_s - begin, 0, None)


def covered_by_group(
    group: np.ndarray, start_s: np.ndarray, end_s: np.ndarray, n_groups: int
) -> np.ndarray:
    """Seconds of the union of each group's intervals; `group` numbers each one's from 0."""
    group, _, length_s = _disjoint(group, start_s, end_s)
    covered: np.ndarray = np.bincount(group, length_s, minlength=n_groups)
    return covered


def waited_s(spans: Spans) -> np.ndarray:
    """Seconds that the rank waits inside each span, from wait spans of the same step."""
    if not spans.is_wait.any():
        return np.zeros(len(spans.spans))
    # With steps shifted so that none overlap, accumulated waiting is a function of time.
    n_steps, end_s = len(spans.steps), spans.start_s + spans.duration_s
    first_s, last_s = np.full(n_steps, np.inf), np.full(n_steps, -np.inf)
    np.minimum.at(first_s, spans.group, spans.start_s)
    np.maximum.at(last_s, spans.group, end_s)
    shift_s = np.concatenate([[0.0], np.cumsum(last_s - first_s)[:-1]]) - first_s
    start_s, end_s = spans.start_s + shift_s[spans.group], end_s + shift_s[spans.group]
    waits = spans.is_wait
    _, begin_s, length_s = _disjoint(spans.group[waits], start_s[waits], end_s[waits])
    before_s = np.concatenate([[0.0], np.cumsum(length_s)[:-1]])

    def until(time_s: np.ndarray) -> np.ndarray:
        at = np.searchsorted(begin_s, time_s, side="right") - 1
        reached = before_s[at] + np.minimum(time_s - begin_s[at], length_s[at])
        return np.where(at < 0, 0.0, reached)

    waited: np.ndarray = until(end_s) - until(start_s)
    return waited


class StepWindows:
    """The finished steps of one rank with details, and the time of each that chosen spans cover."""

    def __init__(self, spans: Spans) -> None:
        self._spans = spans
        whole = spans.whole
        finished = np.flatnonzero((whole >= 0) & spans.is_detailed)
        self.steps = spans.steps[finished]
        self.step_s = spans.duration_s[whole[finished]]
        # Number of each span's finished step, or -1; spans are clipped to that step.
        number = np.full(len(spans.steps), -1)
        number[finished] = np.arange(len(finished))
        self._number = number[spans.group]
        begin_s = spans.start_s[whole[spans.group]]
        end_s = begin_s + spans.duration_s[whole[spans.group]]
        self._start_s = np.clip(spans.start_s, begin_s, end_s)
        self._end_s = np.clip(spans.start_s + spans.duration_s, begin_s, end_s)

    def mask_of(self, kinds: Collection[str]) -> np.ndarray:
        return np.isin(self._spans.kind, [KIND_CODES[kind] for kind in kinds])

    def steps_with(self, chosen: np.ndarray) -> np.ndarray:
        """Mask of the finished steps with any of the chosen spans."""
        found = self._number[chosen & (self._number >= 0)]
        has_any: np.ndarray = np.bincount(found, minlength=len(self.steps)) > 0
        return has_any

    def working_s(self, chosen: np.ndarray) -> np.ndarray:
        """As `covered_s`, without waiting inside the chosen spans."""
        waits = self._spans.is_wait
        working_s: np.ndarray = self.covered_s(chosen | waits) - self.covered_s(waits)
        return working_s

    def covered_s(self, chosen: np.ndarray) -> np.ndarray:
        """Length of the union of the chosen spans in each finished step."""
        chosen = chosen & (self._number >= 0)
        if not chosen.any():
            return np.zeros(len(self.steps))
        return covered_by_group(
            self._number[chosen], self._start_s[chosen], self._end_s[chosen], len(self.steps)
        )


@dataclass(frozen=True, kw_only=True)
class PhaseTable:
    """The finished steps of one rank, in columns of seconds.

    Attributes:
        step_s: wall time; the sum of `phases`, unless phases overlap.
        phases: by the names of PHASES; `other` is time that no span explains.
        communication_s: union of the communication spans, overlapped or not.
    """

    steps: np.ndarray
    step_s: np.ndarray
    phases: dict[str, np.ndarray]
    communication_s: np.ndarray

    def of(self, steps: Collection[int]) -> "PhaseTable":
        """Some of the steps alone."""
        keep = np.isin(self.steps, [*steps])
        return PhaseTable(
            steps=self.steps[keep],
            step_s=self.step_s[keep],
            phases={name: seconds[keep] for name, seconds in self.phases.items()},
            communication_s=self.communication_s[keep],
        )

    @property
    def overlapped_s(self) -> np.ndarray:
        """Communication covered by compute."""
        exposed_s = self.phases["exposed_communication"]
        overlapped_s: np.ndarray = np.clip(self.communication_s - exposed_s, 0, None)
        return overlapped_s

    @property
    def compute_s(self) -> np.ndarray:
        """Forward, backward and optimizer."""
        return _sum(self.phases[kind] for kind in COMPUTE_KINDS)

    @property
    def busy_s(self) -> np.ndarray:
        """Time in which the rank does not wait for other ranks."""
        waits = ("exposed_communication", "other")
        return _sum(seconds for name, seconds in self.phases.items() if name not in waits)


def _sum(columns: Iterable[np.ndarray]) -> np.ndarray:
    return sum(columns, np.zeros(1))


def phase_table(records: Iterable[Record]) -> PhaseTable:
    """Break down the finished steps of one rank that have details, in order; unfinished ones lack a
    `step` span."""
    windows = StepWindows(Records.of(records).columns)
    named = [kind for kind in PHASES if kind not in ("exposed_communication", "other")]
    phases = {kind: windows.covered_s(windows.mask_of((kind,))) for kind in named}
    communication, compute = windows.mask_of(("communication",)), windows.mask_of(COMPUTE_KINDS)
    exposed_s = windows.covered_s(communication | compute) - windows.covered_s(compute)
    phases["exposed_communication"] = exposed_s
    phases["other"] = np.clip(windows.step_s - _sum(phases.values()), 0, None)
    return PhaseTable(
        steps=windows.steps,
        step_s=windows.step_s,
        phases={name: phases[name] for name in PHASES},
        communication_s=windows.covered_s(communication),
    )


def spans_of(records: Iterable[Record]) -> list[Span]:
    """One rank's spans, in file order."""
    return Records.of(records).spans


def samples_of(records: Iterable[Record], metric: str) -> list[Sample]:
    """One rank's samples of a metric, in file order."""
    return Records.of(records).samples.get(metric, [])
