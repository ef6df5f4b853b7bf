"""Record the values at a frozen boundary while a step computes them, and time the prefix."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from harness.measure.recorder import Clock
from harness.runtime.executor.cache.activations import Activations
from harness.runtime.executor.program.program import Recorded

# Frozen segments that are timed: enough for a mean, few enough for events of a GPU.
_MOST_TIMED = 512


@dataclass
class Tap:
    """Takes the values of one engine's microbatches.

    Attributes:
        samples: the samples of the step's global batch, in order; empty: nothing is recorded.
    """

    activations: Activations
    clock: Clock
    samples: Sequence[int] = ()
    n_steps: int = 0  # that were timed
    _marks: list[tuple[Any, Any]] = field(default_factory=list)

    def begin(self, samples: Sequence[int]) -> None:
        """Begin a step."""
        self.samples = samples
        self.n_steps += self.is_timing

    @property
    def is_timing(self) -> bool:
        """Whether frozen segments are still timed."""
        return len(self._marks) < _MOST_TIMED

    def take(self, rows: Recorded, tensor: Tensor, first: int) -> None:
        """Record rows of a value.

        Args:
            first: the microbatch's first sample within the batch.
        """
        if self.samples:
            start, stop = rows.samples
            self.activations.write(rows.value, self.samples[first + start : first + stop], tensor)

    def timed(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Compute a frozen segment, and time it."""
        start = self.clock.mark()
        found = compute()
        self._marks.append((start, self.clock.mark()))
        return found

    def step_s(self) -> float:
        """Seconds of this rank's frozen segments in a step; waits for the device."""
        self.clock.settle()
        at = self.clock.seconds_at
        return sum(at(end) - at(start) for start, end in self._marks) / max(1, self.n_steps)
