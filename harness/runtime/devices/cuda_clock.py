"""A clock of CUDA events: marks follow the stream and are read when the GPU has passed them."""

from __future__ import annotations

import torch

from harness.measure.clock import Clock, HostClock

# An event's distance is a float32 in milliseconds: 0.1 s are exact to 8 ns, 10 s to a microsecond.
_REBASE_S = 0.1


class CudaClock:
    """Marks are events of a device's current stream; the origin is its creation.

    Any thread may mark: what is current of a thread is the first device, until it sets another.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.settle()  # so that the origin is now, not after the device's start-up
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
    """CUDA events on a GPU, the host's monotonic clock elsewhere."""
    return CudaClock(device) if device.type == "cuda" else HostClock()
