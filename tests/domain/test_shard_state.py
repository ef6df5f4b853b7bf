"""Groups of devices that share the state of a weight."""

import pytest

from harness.domain.shard_state import (
    SHARD_STATES,
    averaged_replicas,
    shards_in_nodes,
    sharing_groups,
)


@pytest.mark.parametrize(
    ("holders", "groups"),
    [
        ((0, 1, 2, 3), [(0, 2), (1, 3)]),  # nodes a b a b
        ((0, 2), [(0, 2)]),
        ((0, 1), [(0,), (1,)]),
        ((0, 1, 2), [(0, 1, 2)]),  # two in one node, one in the other
    ],
)
def test_the_holders_of_each_node_share_the_state_if_they_are_equally_many(holders, groups):
    assert sharing_groups("none", holders, "abab") == [(holder,) for holder in holders]
    for state in SHARD_STATES[1:]:
        wanted = groups if shards_in_nodes(state) else [holders]
        assert sharing_groups(state, holders, "abab") == wanted


@pytest.mark.parametrize(
    ("nodes", "wanted"),
    [
        ("ab", [(0,), (1,)]),
        ("aaa", [(0,), (1,), (2,)]),
        ("aabbb", [(0, 1), (2, 3, 4)]),
        ("aba", [(0, 2), (1,)]),
    ],
)
def test_a_replica_is_that_of_a_node_or_of_a_device_of_a_single_one(nodes, wanted):
    assert averaged_replicas(tuple(range(len(nodes))), nodes) == wanted
