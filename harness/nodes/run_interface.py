"""Choose the interface that a run would use on each host, by the run's own rule."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import replace

from harness.domain.interface import Interface, choose_interface
from harness.nodes.facts import Facts


def choose_run_interfaces(hosts: Sequence[Facts]) -> list[Facts]:
    """Add to each host the interface and address that a run over all these hosts would use."""
    hostnames = [facts.hostname for facts in hosts]
    interfaces = [_addresses(facts) for facts in hosts]
    chosen = [choose_interface(rank, hostnames, interfaces) for rank in range(len(hosts))]
    return [
        replace(facts, run_interface=nic.name, run_address=nic.address)
        if nic and not nic.is_loopback
        else facts
        for facts, nic in zip(hosts, chosen, strict=True)
    ]


def _addresses(facts: Facts) -> list[Interface]:
    return [
        Interface(
            name=interface.name,
            address=str(network.ip),
            prefix_length=network.network.prefixlen,
            speed_bits_per_s=(interface.claimed_mbit_per_s or 0) * 1e6,
        )
        for interface in facts.interfaces
        if interface.is_up
        for network in map(ipaddress.ip_interface, interface.networks)
        if network.version == 4
    ]
