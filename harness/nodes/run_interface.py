"""Which interface a run takes on each host: the same choice, by what the probes saw."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from dataclasses import replace

from harness.domain.interface import Interface, choose_interface
from harness.nodes.facts import Facts


def choose_run_interfaces(hosts: Sequence[Facts]) -> list[Facts]:
    """The hosts with what a run over all of them takes, where it leads to other hosts."""
    hostnames = [facts.hostname for facts in hosts]
    interfaces = [_addresses(facts) for facts in hosts]
    chosen = [choose_interface(rank, hostnames, interfaces) for rank in range(len(hosts))]
    return [
        replace(facts, run_interface=one.name, run_address=one.address)
        if one and not one.is_loopback
        else facts
        for facts, one in zip(hosts, chosen, strict=True)
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
