"""Groups of devices that share the state of a weight."""

import pytest

from harness.domain.shard_state import SHARD_STATES, shards_in_nodes, sharing_groups


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
