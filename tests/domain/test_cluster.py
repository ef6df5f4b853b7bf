"""Clusters validate themselves; the NIC that reaches every other host."""

import pytest

from harness.domain.cluster import Cluster, CollectivePoint, Device, Link, Node
from harness.domain.interface import Interface, choose_interface, find_namesakes
from harness.errors import ClusterError


def device(name="a:0", **fields):
    return Device(name=name, kind="k", memory_bytes=1, **fields)


def test_a_uniform_cluster_has_every_ordered_pair():
    cluster = Cluster.uniform(
        2, 2, inside_bytes_per_s=10.0, between_bytes_per_s=1.0, memory_bytes=5
    )
    speeds = {(link.source, link.target): link.bandwidth_bytes_per_s for link in cluster.links}
    assert len(speeds) == 12
    assert speeds["node0:0", "node0:1"] == 10.0
    assert speeds["node1:1", "node0:0"] == 1.0
    assert cluster.node_of() == [0, 0, 1, 1]
    assert cluster.n_devices == 4


@pytest.mark.parametrize(
    ("nodes", "links", "message"),
    [
        ([], [], "no device"),
        ([Node(name="a", devices=[device()]), Node(name="b", devices=[])], [], "node b has no"),
        ([Node(name="a", devices=[device(), device()])], [], "2 devices are named 'a:0': give"),
        (
            [Node(name="a", devices=[device(f"a:{k}")]) for k in range(3)],
            [],
            "3 nodes are named 'a'",
        ),
        ([Node(name="a", devices=[device(flops_per_s={"fp32": -1.0})])], [], "-1.0 of fp32"),
        ([Node(name="a", devices=[device(speed=0.0)])], [], "speed 0.0"),
        (
            [Node(name="a", devices=[device()], nic_bytes_per_s=0.0)],
            [],
            "node a has nic_bytes_per_s 0.0: it must be above 0",
        ),
        (
            [Node(name="a", devices=[device()])],
            [Link(source="a:0", target="b:0", latency_s=0, bandwidth_bytes_per_s=1)],
            "not in the cluster",
        ),
        (
            [Node(name="a", devices=[device(), device("a:1")])],
            [Link(source="a:0", target="a:1", latency_s=-1, bandwidth_bytes_per_s=1)],
            "latency must be >= 0",
        ),
        (
            [Node(name="a", devices=[device(), device("a:1")])],
            [Link(source="a:0", target="a:1", latency_s=50, bandwidth_bytes_per_s=1)],
            "has latency 50 s and .* at most 10 s",
        ),
        (
            [Node(name="a", devices=[device(), device("a:1")])],
            [Link(source="a:0", target="a:0", latency_s=0, bandwidth_bytes_per_s=1)],
            "link a:0 -> a:0 joins a device with itself: name two devices",
        ),
    ],
)
def test_what_cannot_be_is_refused(nodes, links, message):
    with pytest.raises(ClusterError, match=message):
        Cluster(nodes=nodes, links=links)


def test_a_collective_that_takes_no_time_is_refused():
    point = CollectivePoint(
        operation="all_reduce", transport="gloo", n_ranks=2, n_bytes=8, duration_s=0.0
    )
    with pytest.raises(
        ClusterError, match=r"all_reduce of 2 ranks and 8 B takes 0\.0 s: each must"
    ):
        Cluster(nodes=[Node(name="a", devices=[device()])], collectives=[point])


LO = Interface(name="lo", address="127.0.0.1", prefix_length=8)
DOCKER = Interface(name="docker0", address="172.17.0.1", prefix_length=16, speed_bits_per_s=1e10)


def ethernet(host, subnet="10.0.0", name="eth0", speed=1e9):
    address = f"{subnet}.{host}"
    return Interface(name=name, address=address, prefix_length=24, speed_bits_per_s=speed)


def test_hosts_of_one_name_are_told_by_addresses_that_only_one_has():
    hosts = [[LO, DOCKER, ethernet(k)] for k in (1, 2, 2, 1)]
    assert find_namesakes(["a", "b", "b", "a"], hosts) is None
    assert find_namesakes(["a", "b", "b", "b"], hosts) == (1, 3, "b (10.0.0.2 and 10.0.0.1)")
    # A bridge that was made meanwhile.
    assert find_namesakes(["a", "a"], [[LO, ethernet(1)], [LO, DOCKER, ethernet(1)]]) is None


def infiniband(host):
    return ethernet(host, "10.1.0", name="ib0", speed=1e11)


@pytest.mark.parametrize(
    ("hosts", "name"),
    [
        # Faster, but of the same address everywhere.
        ([[LO, DOCKER, ethernet(k)] for k in (1, 2, 3)], "eth0"),
        ([[LO, ethernet(k), infiniband(k)] for k in (1, 2)], "ib0"),
        # Faster, but one host lacks it.
        ([[ethernet(1), infiniband(1)], [ethernet(2), infiniband(2)], [ethernet(3)]], "eth0"),
    ],
)
def test_the_fastest_network_that_all_hosts_share_is_chosen(hosts, name):
    for rank in range(len(hosts)):
        assert choose_interface(rank, list("abc"[: len(hosts)]), hosts).name == name


def test_routed_hosts_share_no_subnet_and_still_find_one():
    hosts = [[LO, DOCKER, ethernet(1, "10.0.1")], [LO, DOCKER, ethernet(1, "10.0.2")]]
    chosen = choose_interface(0, ["a", "b"], hosts)
    assert chosen.address == "10.0.1.1"


def test_the_users_choice_wins_and_a_missing_one_is_none():
    hosts = [[LO, ethernet(1), DOCKER], [LO, ethernet(2), DOCKER]]
    assert choose_interface(0, ["a", "b"], hosts, "docker0") == DOCKER
    assert choose_interface(0, ["a", "b"], hosts, "eth9") is None


def test_loopback_is_taken_on_one_host_only():
    assert choose_interface(0, ["a", "a"], [[LO, ethernet(1)], [LO, ethernet(1)]]) == LO
    assert choose_interface(0, ["a", "a"], [[LO], [LO]], "lo") == LO
    assert choose_interface(0, ["a", "b"], [[LO, ethernet(1)], [LO, ethernet(2)]], "lo") is None
