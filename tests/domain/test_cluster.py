"""Clusters validate themselves and survive their file."""

import pytest

from harness.domain.cluster import Cluster, Device, Link, Node
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
        ([Node(name="a", devices=[device(), device()])], [], "unique"),
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
    ],
)
def test_what_cannot_be_is_refused(nodes, links, message):
    with pytest.raises(ClusterError, match=message):
        Cluster(nodes=nodes, links=links)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"{", "not JSON"),
        (b'{"nodes": 3}', "array"),
        (
            Cluster.uniform(1, 1, inside_bytes_per_s=1, memory_bytes=1)
            .to_json()
            .replace(b'"version": 2', b'"version": 1'),
            r"version 1, .* version 2: measure it again with `./entry.sh links`",
        ),
    ],
)
def test_a_malformed_file_is_refused_by_name(data, message):
    with pytest.raises(ClusterError, match=message) as caught:
        Cluster.from_json(data, source="my.json")
    assert "my.json" in str(caught.value)
