"""Computing seconds of a rank's steps, as an exponentially weighted mean of the recorded spans."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from harness.domain.record import Record, Span
from harness.measure.derive.spans import COMPUTE_KINDS

# Weight of a new step: after ten steps of another speed, the mean is within 3 % of it.
WEIGHT = 0.3
# Steps after a change that fill caches and allocate.
N_SKIPPED = 3


class MeanComputeTime:
    """The mean of one rank; it takes records as they become ready.

    Attributes:
        mean_s: seconds of forward, backward and optimizer in a step, without waiting; None before
            the first counted step.
        n_steps: counted steps since the last reset.
        is_paused: steps are not counted, because other work disturbs them.
    """

    def __init__(self) -> None:
        self.is_paused = False
        self.reset()

    def reset(self) -> None:
        """Begin again, because the strategy has changed."""
        self.mean_s: float | None = None
        self.n_steps = -N_SKIPPED
        self._open: defaultdict[int, float] = defaultdict(float)

    def take(self, records: Iterable[Record]) -> None:
        """Count the steps that have ended; a step's own span may come before its parts."""
        ended = []
        for record in records:
            if not isinstance(record, Span) or record.step is None:
                continue
            if record.kind in COMPUTE_KINDS:
                self._open[record.step] += record.duration_s
            elif record.kind == "step":
                ended.append(record.step)
        for step in ended:
            self._end(self._open.pop(step, 0.0))

    def _end(self, compute_s: float) -> None:
        if self.is_paused:
            return
        self.n_steps += 1
        if self.n_steps > 0:
            before_s = compute_s if self.mean_s is None else self.mean_s
            self.mean_s = before_s + WEIGHT * (compute_s - before_s)
