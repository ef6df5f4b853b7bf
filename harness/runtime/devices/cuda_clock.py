"""A clock of CUDA events: marks are queued on the stream and read after the GPU has passed them."""

from __future__ import annotations

import torch

from harness.measure.clock import Clock, HostClock

# CUDA returns float32 milliseconds between events: exact to 8 ns at 0.1 s, to 1 us at 10 s.
_REBASE_S = 0.1


class CudaClock:
    """Marks are events on a device's current stream; the origin is the clock's creation.

    Any thread may mark, whichever its current device is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.settle()  # so that the origin is not delayed by the device's start-up
        self._anchor = self.mark()
        self._anchor_s = 0.0

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def is_ready(self, mark: torch.cuda.Event) -> bool:
        return bool(mark.query())

    def settle(self) -> None:
        torch.cuda.synchronize(self._device)

    def seconds_at(self, mark: torch.cuda.Event) -> float:
        elapsed_s = float(self._anchor.elapsed_time(mark)) * 1e-3
        at_s = self._anchor_s + elapsed_s
        if elapsed_s > _REBASE_S:
            self._anchor, self._anchor_s = mark, at_s
        return at_s


def clock_for(device: torch.device) -> Clock:
    """CUDA events for a GPU, the host's monotonic clock for a CPU."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
