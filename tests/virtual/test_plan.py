"""Names, addresses and limits of a virtual cluster, from its flags."""

import pytest

from harness.errors import ConfigError
from harness.virtual.plan import check_name, make_plan


def test_one_value_serves_all_nodes():
    plan = make_plan(
        n_nodes=3, n_cores=2, bandwidth="1gbit", cpu="0.4", memory="2GiB", latency="1ms"
    )
    assert [node.name for node in plan.nodes] == ["node0", "node1", "node2"]
    assert [node.address for node in plan.nodes] == ["10.199.0.1", "10.199.0.2", "10.199.0.3"]
    assert {node.bandwidth_bytes_per_s for node in plan.nodes} == {125e6}
    assert {node.cpu for node in plan.nodes} == {0.4}
    assert {node.memory_bytes for node in plan.nodes} == {2 * 2**30}
    assert {node.latency_s for node in plan.nodes} == {1e-3}


def test_a_list_makes_unlike_nodes():
    plan = make_plan(n_nodes=3, n_cores=2, bandwidth="1gbit,1gbit,100mbit", cpu="0.8,0.4,0.2")
    assert [node.bandwidth_bytes_per_s for node in plan.nodes] == [125e6, 125e6, 12.5e6]
    assert [node.cpu for node in plan.nodes] == [0.8, 0.4, 0.2]


def test_a_second_cluster_has_its_own_names_and_subnet():
    first = make_plan(n_nodes=2, n_cores=2)
    second = make_plan(name="second", n_nodes=2, n_cores=2, taken_subnets={first.subnet_index})
    assert second.subnet == "10.199.1.0/24"
    assert second.nodes[0].name == "second-node0"
    names = [{(node.name, node.address) for node in plan.nodes} for plan in (first, second)]
    assert names[0].isdisjoint(names[1])


def test_the_subnet_of_a_cluster_that_went_is_taken_again():
    assert make_plan(n_nodes=1, n_cores=2, taken_subnets={0, 2}).subnet_index == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"n_nodes": 0}, "--nodes 0 is outside 1 to 250"),
        ({"n_nodes": 251}, "--nodes 251 is outside 1 to 250"),
        ({"cpu": "0.4,0.4"}, "--cpu has 2 values and the cluster 3 nodes"),
        ({"cpu": "3"}, "--cpu 3 is outside 0.01 to 2"),
        ({"cpu": "0"}, "--cpu 0 is outside"),
        ({"cpu": "nan"}, "--cpu 'nan' is not a number of cores"),
        ({"cpu": "fast"}, "--cpu 'fast' is not a number of cores"),
        ({"cpu": "0.4,,0.4"}, "--cpu '' is not a number of cores"),
        ({"bandwidth": "1bit"}, "a link carries 10kbit to 100gbit"),
        ({"bandwidth": "wide"}, "bandwidth 'wide' is not a number"),
        ({"memory": "1MiB"}, "a node needs 32 MiB"),
        ({"latency": "2s"}, "--latency 2s is over 1 s"),
        ({"name": "a b"}, "cluster name 'a b' must be"),
        ({"taken_subnets": range(256)}, "256 virtual clusters stand already"),
    ],
)
def test_bad_flags_get_one_clear_error(flags, message):
    with pytest.raises(ConfigError, match=message):
        make_plan(**{"n_nodes": 3, "n_cores": 2, **flags})


@pytest.mark.parametrize("name", ["", "../up", "a;b", "a.b", "-n", "A", "1st", "a" * 16, "a\n"])
def test_names_that_would_need_quoting_are_refused(name):
    with pytest.raises(ConfigError):
        check_name(name)
