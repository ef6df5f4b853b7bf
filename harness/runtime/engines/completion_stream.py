"""Mark when a sum over ranks is there, without waiting for what computes meanwhile."""

from __future__ import annotations

from typing import Any

import torch

from harness.measure.clock import Clock
from harness.runtime.ranks.world import World

# NCCL takes streams from the pool of normal priority, gloo from that of high priority.
_PRIORITY = {"nccl": -1, "gloo": 0}


class CompletionStream:
    """A stream of a GPU for the ends of one group's sums; nothing on a CPU.

    It comes from the pool that the backend leaves alone: a group whose stream waited for the sum of
    another could hold up both.
    """

    def __init__(self, world: World) -> None:
        self._stream: torch.cuda.Stream | None = None
        if world.device.type == "cuda":
            self._stream = torch.cuda.Stream(world.device, priority=_PRIORITY[world.backend])

    def mark(self, work: Any, clock: Clock) -> Any:
        """Mark the end of work that has begun under NCCL, or is over under gloo; never blocks."""
        if self._stream is None:
            return clock.mark()
        with torch.cuda.stream(self._stream):
            work.synchronize()  # holds up the stream, not the host
            return clock.mark()
