"""Read this host's network interfaces."""

from __future__ import annotations

import ipaddress
import json
import shutil
import socket
import subprocess
from typing import Any

import psutil

from harness.domain.interface import Interface


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
