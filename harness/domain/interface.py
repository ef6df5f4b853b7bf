"""Choose the NIC by which each rank reaches the others.

Interfaces such as docker0 have the same address on every host, so collectives over them hang.
An interface qualifies only if its subnet holds a different address of every other host.
"""

import ipaddress
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Interface:
    """One IPv4 address of a host.

    Attributes:
        speed_bits_per_s: from the driver, or the limit of a traffic shaper; 0 when unknown.
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


def find_namesakes(
    hostnames: list[str], interfaces: list[list[Interface]]
) -> tuple[int, int, str] | None:
    """Find two ranks on hosts of one name, each of which has an address that the other lacks.

    Returns:
        The ranks, and the name with these addresses; None if all names are unique.
    """
    first: dict[str, int] = {}
    addresses = [{interface.address for interface in own} for own in interfaces]
    for rank, name in enumerate(hostnames):
        other = first.setdefault(name, rank)
        theirs, mine = addresses[other] - addresses[rank], addresses[rank] - addresses[other]
        if mine and theirs:
            return other, rank, f"{name} ({min(theirs)} and {min(mine)})"
    return None


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
    """Choose the interface of `rank` that reaches every other host.

    Args:
        hostnames: by rank.
        interfaces: each rank's interfaces, by rank.
        wanted: a name that the user requires (GLOO_SOCKET_IFNAME), or empty.

    Returns:
        Loopback if all ranks share one host; else the fastest interface whose subnet holds an
        address of every other host; else any that is not loopback (a routed network). None without
        one, or if the wanted one is loopback and there are several hosts.
    """
    mine = interfaces[rank]
    others = [interfaces[k] for k, name in enumerate(hostnames) if name != hostnames[rank]]
    if wanted:
        named = (i for i in mine if i.name == wanted and not (others and i.is_loopback))
        return next(named, None)
    loopback = [i for i in mine if i.is_loopback]
    if not others and loopback:
        return loopback[0]
    outward = [i for i in mine if not i.is_loopback]
    shared = [i for i in outward if _reaches(i, others)]
    if shared:
        return _preferred(shared)
    # Hosts of a routed network share no subnet; an address that two hosts have reaches neither.
    foreign = {i.address for host in others for i in host}
    routed = [i for i in outward if i.address not in foreign]
    return _preferred(routed) if routed else None
