"""Monotonic clocks: one protocol for the host, a CUDA device and tests.

A mark is taken without synchronising and read outside every span, when it is ready or after
`settle`.
"""

from __future__ import annotations

import time
from typing import Any, Protocol


class Clock(Protocol):
    """Takes marks while the work runs and reads them afterwards."""

    def mark(self) -> Any:
        """Mark this point in the device's stream of work; never blocks."""
        ...

    def is_ready(self, mark: Any) -> bool:
        """Whether a mark can be read without waiting; marks become ready in order."""
        ...

    def settle(self) -> None:
        """Block until every mark so far can be read."""
        ...

    def seconds_at(self, mark: Any) -> float:
        """Seconds since the clock's origin."""
        ...


class HostClock:
    """`perf_counter_ns` on this host; the origin is the clock's creation."""

    def __init__(self) -> None:
        self.origin_ns = time.perf_counter_ns()

    def mark(self) -> int:
        return time.perf_counter_ns()

    def is_ready(self, mark: int) -> bool:
        return True

    def settle(self) -> None:
        """Host marks are readable at once."""

    def seconds_at(self, mark: int) -> float:
        return (mark - self.origin_ns) * 1e-9


class FakeClock:
    """A clock that a test moves by hand."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def advance(self, duration_s: float) -> None:
        self.now_s += duration_s

    def mark(self) -> float:
        return self.now_s

    def is_ready(self, mark: float) -> bool:
        return mark <= self.now_s

    def settle(self) -> None:
        """Fake marks are readable at once."""

    def seconds_at(self, mark: float) -> float:
        return mark
