"""The `ip` and `tc` lines of a cluster, as tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.virtual import network
from harness.virtual.plan import NodePlan


def _node(**limits: float) -> NodePlan:
    return NodePlan(name="node0", address="10.199.0.1", **limits)


@pytest.mark.parametrize(
    ("limits", "netem", "lines"),
    [
        ({}, True, []),
        ({}, False, []),
        (
            {"bandwidth_bytes_per_s": 125e6},
            True,
            ["qdisc add dev eth0 root handle 1: tbf rate 1000000000bit burst 131250 latency 50ms"],
        ),
        (
            {"bandwidth_bytes_per_s": 12.5e6, "latency_s": 500e-6},
            True,
            [
                "qdisc add dev eth0 root handle 1: tbf rate 100000000bit burst 16384 latency 50ms",
                "qdisc add dev eth0 parent 1:1 handle 10: netem delay 500us limit 10000",
            ],
        ),
        (
            {"bandwidth_bytes_per_s": 12.5e6, "latency_s": 500e-6},
            False,
            ["qdisc add dev eth0 root handle 1: tbf rate 100000000bit burst 16384 latency 50ms"],
        ),
        (
            {"latency_s": 2e-3},
            True,
            ["qdisc add dev eth0 root netem delay 2000us limit 10000"],
        ),
        ({"latency_s": 2e-3}, False, []),
    ],
)
def test_shaping_commands(limits, netem, lines):
    assert network.shaping_commands("eth0", _node(**limits), netem=netem) == lines


def test_burst_holds_a_millisecond_of_a_link():
    assert network.burst_bytes(1.25e9) == 1_312_500
    assert network.burst_bytes(12.5e6) == 16 * 1024


def test_a_node_gets_its_address_and_no_other():
    node = NodePlan(name="node3", address="10.199.7.4")
    assert network.node_commands(7, 3, node) == [
        "link set lo up",
        "link set eth0 addrgenmode none",
        "link set eth0 address 02:68:07:00:00:04",
        "addr add 10.199.7.4/24 dev eth0",
        "link set eth0 up",
    ]


def test_a_pair_ends_in_the_nodes_namespace():
    assert network.pair_commands(2, Path("/run/x/ns/node2")) == [
        "link add port2 type veth peer name eth0 netns /run/x/ns/node2"
    ]


def test_no_two_nodes_share_a_mac_address():
    addresses = {network.mac_address(k, i) for k in (0, 1, 255) for i in range(250)}
    assert len(addresses) == 750
