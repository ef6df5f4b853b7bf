"""Mark the completion of an all-reduce without waiting for computation on the same device."""

from __future__ import annotations

from typing import Any

import torch

from harness.measure.recorder import Clock
from harness.runtime.ranks.world import World

# NCCL uses PyTorch's pool of normal-priority streams, gloo that of high-priority streams.
_PRIORITY = {"nccl": -1, "gloo": 0}


class CompletionStream:
    """A GPU stream for marks at the end of one process group's all-reduces; unused on a CPU.

    The stream comes from the pool that the backend does not use, because a group on the same
    stream would wait for the other group's all-reduce.
    """

    def __init__(self, world: World) -> None:
        self._stream: torch.cuda.Stream | None = None
        if world.device.type == "cuda":
            self._stream = torch.cuda.Stream(world.device, priority=_PRIORITY[world.backend])

    def mark(self, work: Any, clock: Clock) -> Any:
        """Mark the end of work that is queued (NCCL) or complete (gloo); never blocks."""
        if self._stream is None:
            return clock.mark()
        with torch.cuda.stream(self._stream):
            work.synchronize()  # the stream waits, not the host
            return clock.mark()
