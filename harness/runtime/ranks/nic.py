"""Count the bytes that a network interface sends and receives."""

from __future__ import annotations

import psutil


class NicCounter:
    """Reads the differences of one interface's counters between calls."""

    def __init__(self, interface: str) -> None:
        self._interface = interface
        self._last = self._read()

    def _read(self) -> tuple[int, int]:
        counters = psutil.net_io_counters(pernic=True, nowrap=False)
        if self._interface not in counters:
            return 0, 0
        found = counters[self._interface]
        return found.bytes_sent, found.bytes_recv

    def advance(self) -> tuple[int, int]:
        """Bytes sent and received since the last call (or the creation)."""
        now = self._read()
        sent, received = now[0] - self._last[0], now[1] - self._last[1]
        self._last = now
        return sent, received
