"""Every rank's file is on two hosts."""

import pytest
from local_ranks import copy_shards, run_on_ranks

from harness.workloads.train.copies import second_host_of


@pytest.mark.parametrize(
    ("hostnames", "keepers"),
    [
        (["a"] * 3, [None] * 3),
        (["a", "b", "c"], [1, 2, 0]),
        (["a", "a", "b"], [2, 2, 0]),
        (["a", "a", "a", "b", "b"], [3, 4, 3, 0, 1]),
        (["a", "b", "a", "b"], [1, 0, 3, 2]),
    ],
)
def test_the_next_host_keeps_the_copy(hostnames, keepers):
    assert [second_host_of(rank, hostnames) for rank in range(len(hostnames))] == keepers


def test_copies_are_written_where_disks_are_not_shared():
    """Ranks 0 and 3 share a disk; each keeps copies of the host before its own."""
    found, _ = run_on_ranks(copy_shards, ["a", "b", "b", "c"], 4)
    assert found == [
        ["shard0", "shard1", "shard2", "shard3"],
        ["shard0", "shard1"],
        ["shard2"],
        ["shard0", "shard1", "shard2", "shard3"],
    ]


def test_one_host_keeps_no_copies():
    found, _ = run_on_ranks(copy_shards, ["a", "a"], 2)
    assert found == [["shard0", "shard1"], ["shard0", "shard1"]]
