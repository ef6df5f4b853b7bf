"""Choose the NIC by which each rank reaches the others.

Interfaces such as docker0 carry the same address on every host and hang collectives; so an
interface counts only if its subnet holds a different address of every other host.
"""

from __future__ import annotations

import ipaddress
import json
import shutil
import socket
import subprocess
from typing import Any

import msgspec
import psutil


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """One IPv4 address of a host.

    Attributes:
        speed_bits_per_s: as the driver says, or as a traffic shaper on it limits; 0 when unknown.
    """

    name: str
    address: str
    prefix_length: int
    speed_bits_per_s: float = 0.0

    @property
    def network(self) -> ipaddress.IPv4Network:
        return ipaddress.IPv4Network(f"{self.address}/{self.prefix_length}", strict=False)

    @property
    def is_loopback(self) -> bool:
        return ipaddress.IPv4Address(self.address).is_loopback


def shaped_rates(qdiscs: list[dict[str, Any]]) -> dict[str, float]:
    """Bits per second that token bucket filters at the root let each interface send.

    Args:
        qdiscs: what `tc -j qdisc show` prints; it gives rates in bytes per second.
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
        return []  # a shaper that cannot be read leaves the driver's word
    return found


def list_interfaces() -> list[Interface]:
    """The IPv4 addresses of this host's interfaces that are up."""
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


def _reaches(mine: Interface, others: list[list[Interface]]) -> bool:
    for interfaces in others:
        peers = [i for i in interfaces if ipaddress.IPv4Address(i.address) in mine.network]
        if not peers or any(peer.address == mine.address for peer in peers):
            return False
    return True


def _preferred(candidates: list[Interface]) -> Interface:
    return max(candidates, key=lambda i: (i.speed_bits_per_s, [-ord(c) for c in i.name]))


def choose_interface(
    rank: int, hostnames: list[str], interfaces: list[list[Interface]], wanted: str = ""
) -> Interface | None:
    """The interface of `rank` that reaches every other host.

    Args:
        hostnames: by rank.
        interfaces: each rank's interfaces, by rank.
        wanted: a name that the user insists on (GLOO_SOCKET_IFNAME), or empty.

    Returns:
        Loopback when all ranks share one host; the fastest interface whose subnet holds an address
        of every other host; else any that is not loopback (a routed network); None without one.
    """
    mine = interfaces[rank]
    if wanted:
        return next((i for i in mine if i.name == wanted), None)
    others = [interfaces[k] for k, name in enumerate(hostnames) if name != hostnames[rank]]
    loopback = [i for i in mine if i.is_loopback]
    if not others and loopback:
        return loopback[0]
    outward = [i for i in mine if not i.is_loopback]
    shared = [i for i in outward if _reaches(i, others)]
    if shared:
        return _preferred(shared)
    # On a routed network no subnet is shared; an address that another host also has leads nowhere.
    foreign = {i.address for host in others for i in host}
    routed = [i for i in outward if i.address not in foreign]
    return _preferred(routed) if routed else None
