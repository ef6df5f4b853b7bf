"""From spans to the phases of a step: unions of intervals, exposed and overlapped communication.

    backward       |------------------|
    communication        |------|  |---------|
                         overlapped   exposed

All in docs/metrics.md, part Derived. Spans of one rank only: clocks of ranks are not aligned.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.domain.record import Record, Sample, Span

COMPUTE_KINDS = ("forward", "backward", "compute", "optimizer")
PHASES = (
    "data",
    "host_to_device",
    "forward",
    "backward",
    "compute",
    "exposed_communication",
    "optimizer",
    "other",
)


def covered_s(spans: Iterable[Span], within: Span | None = None) -> float:
    """Length of the union of the spans' intervals, clipped to `within`; seconds."""
    intervals = np.array([(s.start_s, s.start_s + s.duration_s) for s in spans], dtype=float)
    if intervals.size == 0:
        return 0.0
    if within is not None:
        intervals = intervals.clip(within.start_s, within.start_s + within.duration_s)
    intervals = intervals[np.argsort(intervals[:, 0])]
    reached = np.maximum.accumulate(intervals[:, 1])
    starts = intervals[:, 0].copy()
    starts[1:] = np.maximum(starts[1:], reached[:-1])
    return float(np.clip(intervals[:, 1] - starts, 0, None).sum())


@dataclass(frozen=True, kw_only=True)
class StepPhases:
    """One step of one rank, in seconds.

    Attributes:
        step_s: its wall time; the sum of `phases`, unless phases overlap.
        phases: by the names of PHASES; `other` is what no span explains.
        communication_s: union of the communication spans, overlapped or not.
    """

    step: int
    step_s: float
    phases: dict[str, float]
    communication_s: float

    @property
    def overlapped_s(self) -> float:
        """Communication covered by compute."""
        return max(0.0, self.communication_s - self.phases["exposed_communication"])

    @property
    def compute_s(self) -> float:
        """Forward, backward and optimizer."""
        return sum(self.phases[kind] for kind in COMPUTE_KINDS)

    @property
    def busy_s(self) -> float:
        """The rank's own work: what does not wait for other ranks."""
        waits = ("exposed_communication", "other")
        return sum(value for name, value in self.phases.items() if name not in waits)


def spans_by_step(records: Iterable[Record]) -> dict[int, list[Span]]:
    """Group the spans that name a step, in the order of steps."""
    steps: dict[int, list[Span]] = defaultdict(list)
    for record in records:
        if isinstance(record, Span) and record.step is not None:
            steps[record.step].append(record)
    return dict(sorted(steps.items()))


def step_phases(step: int, spans: Sequence[Span]) -> StepPhases | None:
    """Break one step of one rank down; None when it has no `step` span (it never ended)."""
    whole = next((span for span in spans if span.kind == "step"), None)
    if whole is None:
        return None
    by_kind: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        by_kind[span.kind].append(span)
    phases = {
        kind: covered_s(by_kind[kind], whole)
        for kind in PHASES
        if kind not in ("exposed_communication", "other")
    }
    communication = by_kind["communication"]
    compute = [span for kind in COMPUTE_KINDS for span in by_kind[kind]]
    compute_s = covered_s(compute, whole)
    exposed_s = covered_s([*communication, *compute], whole) - compute_s
    phases["exposed_communication"] = exposed_s
    phases["other"] = max(0.0, whole.duration_s - sum(phases.values()))
    return StepPhases(
        step=step,
        step_s=whole.duration_s,
        phases={name: phases[name] for name in PHASES},
        communication_s=covered_s(communication, whole),
    )


def rank_phases(records: Iterable[Record]) -> list[StepPhases]:
    """Break every finished step of one rank down, in order."""
    broken_down = (step_phases(step, spans) for step, spans in spans_by_step(records).items())
    return [phases for phases in broken_down if phases is not None]


def spans_of(records: Iterable[Record]) -> list[Span]:
    """One rank's spans, in the order of writing."""
    return [record for record in records if isinstance(record, Span)]


def samples_of(records: Iterable[Record], metric: str) -> list[Sample]:
    """One rank's samples of a metric, in the order of writing."""
    return [r for r in records if isinstance(r, Sample) and r.metric == metric]
