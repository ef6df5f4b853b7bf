"""This host's network interfaces and the bytes that they carry."""

from __future__ import annotations

import ipaddress
import json
import shutil
import socket
import subprocess
from typing import Any

import psutil

from harness.domain.interface import Interface


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


def shaped_rates(qdiscs: list[dict[str, Any]]) -> dict[str, float]:
    """Bits per second that the root token bucket filter of each interface allows.

    Args:
        qdiscs: output of `tc -j qdisc show`, with rates in bytes per second.
    """
    return {
        str(qdisc["dev"]): 8.0 * float(qdisc["options"]["rate"])
        for qdisc in qdiscs
        if qdisc.get("kind") == "tbf" and qdisc.get("root") and "rate" in qdisc.get("options", {})
    }


def _read_qdiscs() -> list[dict[str, Any]]:
    tc = shutil.which("tc", path="/usr/sbin:/sbin:/usr/bin:/bin")
    if tc is None:
        return []
    command = [tc, "-j", "qdisc", "show"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=5, check=True)
        found: list[dict[str, Any]] = json.loads(done.stdout)
    except (OSError, subprocess.SubprocessError, json.JSONDecodeError):
        return []  # list_interfaces then uses the driver's speed
    return found


def list_interfaces() -> list[Interface]:
    """IPv4 addresses of this host's interfaces that are up."""
    stats = psutil.net_if_stats()
    shaped = shaped_rates(_read_qdiscs())
    found = []
    for name, addresses in sorted(psutil.net_if_addrs().items()):
        if name not in stats or not stats[name].isup:
            continue
        for entry in addresses:
            if entry.family == socket.AF_INET:
                length = ipaddress.IPv4Network(f"0.0.0.0/{entry.netmask or 32}").prefixlen
                speed = shaped.get(name, stats[name].speed * 1e6)
                found.append(
                    Interface(
                        name=name,
                        address=entry.address,
                        prefix_length=length,
                        speed_bits_per_s=speed,
                    )
                )
    return found
