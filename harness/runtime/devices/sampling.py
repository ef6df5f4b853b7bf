"""Take timed samples: at least a minimum number, then until a time budget is spent.

A clock of CUDA events: marks are queued on the stream and read after the GPU has passed them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from harness.measure.recorder import Clock, HostClock
from harness.runtime.ranks.cgroup import cpu_quota_s

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


# Under a CPU quota a process runs and pauses in turn, so a sample must span several periods to
# include its average share.
_N_PERIODS = 10
_LONGEST_SAMPLE_S = 0.5
# Half a millisecond at 2 GHz: longer than the host takes to call an operator or its backward.
_HOLD_CYCLES = 1_000_000


def settle(device: torch.device) -> None:
    """Wait until a device has finished its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def hold_gpu() -> None:
    """Keep the GPU busy for half a millisecond, so that the host can queue work; does not wait."""
    torch.cuda._sleep(_HOLD_CYCLES)


@dataclass(frozen=True, kw_only=True)
class Budget:
    """Limits on sampling one quantity.

    Attributes:
        time_s: stop after this long once there are `n_min` samples.
        n_warm_up: samples that are taken first and discarded.
    """

    time_s: float
    n_min: int = 5
    n_max: int = 1000
    n_warm_up: int = 2

    def count(self, sample_s: float) -> int:
        """Number of samples, if each takes `sample_s`."""
        fitting = math.ceil(self.time_s / sample_s) if sample_s > 0 else self.n_max
        return max(self.n_min, min(self.n_max, fitting))


def take_samples(
    sample: Callable[[], tuple[Any, Any]], clock: Clock, budget: Budget
) -> list[float]:
    """Time repeated calls of `sample`, which returns its two marks; returns seconds.

    The first call after the warm-up determines the number of samples. Marks are read in batches,
    so that a GPU's queue does not run dry between samples.
    """
    for _ in range(budget.n_warm_up):
        sample()
    clock.settle()
    before = clock.mark()
    durations = _read(clock, [sample()])
    after = clock.mark()
    clock.settle()
    n_samples = budget.count(clock.seconds_at(after) - clock.seconds_at(before))
    while len(durations) < n_samples:
        n_batch = min(16, n_samples - len(durations))
        durations += _read(clock, [sample() for _ in range(n_batch)])
    return durations


def _read(clock: Clock, marks: list[tuple[Any, Any]]) -> list[float]:
    clock.settle()
    return [clock.seconds_at(end) - clock.seconds_at(start) for start, end in marks]


def shortest_sample_s(device_type: str) -> float:
    """Minimum duration of a sample of computation for a steady rate; 0 without a CPU quota."""
    quota = cpu_quota_s() if device_type == "cpu" else None
    return 0.0 if quota is None else min(_N_PERIODS * quota[1], _LONGEST_SAMPLE_S)


def count_within(work: Callable[[], object], clock: Clock, least_s: float) -> int:
    """Count the calls of `work` that take `least_s` together; 1 if that is 0.

    One timed call would not do: if the quota paused the process during that call, the count would
    be too low, and samples of so many calls would be too short to include the pauses.
    """
    if least_s == 0:
        return 1
    work()
    n, start_s = 0, clock.seconds_at(clock.mark())
    while clock.seconds_at(clock.mark()) - start_s < least_s:
        work()
        n += 1
    return n
