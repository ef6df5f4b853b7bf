"""The state is written beside training, as it was when the save began, and is on two hosts."""

import threading

import pytest
import torch
from local_ranks import copy_shards, run_on_ranks, world_of
from safetensors.torch import load_file

from harness.errors import ResultsError
from harness.runtime.executor.state.shard import StateShard
from harness.workloads.train.saves import BackgroundSaves, second_host_of


class Samples(dict[str, list[float]]):
    def sample(self, metric, value):
        self.setdefault(metric, []).append(value)


@pytest.fixture
def weight():
    return torch.zeros(3)


@pytest.fixture
def shard(weight):
    named = {"model 0:3 weight": weight}
    return StateShard(rank=0, tensors=named, metadata={}, shared=frozenset(named))


@pytest.fixture
def may_write(monkeypatch):
    """Shards are written once it is set."""
    event, write = threading.Event(), StateShard.write

    def wait_and_write(shard, directory):
        assert event.wait(60)
        write(shard, directory)

    monkeypatch.setattr(StateShard, "write", wait_and_write)
    return event


def written(directory):
    return load_file(directory / "shard0.safetensors")["model 0:3 weight"].tolist()


def test_training_goes_on_and_the_state_is_that_of_the_start(tmp_path, weight, shard, may_write):
    outdated, samples = tmp_path / "old", Samples()
    outdated.mkdir()
    background = BackgroundSaves(world_of(0, 1), samples)
    background.start(shard, tmp_path / "new", outdated)
    weight += 1
    assert outdated.exists()
    assert not samples
    may_write.set()
    background.wait()
    background.wait()
    assert written(tmp_path / "new") == [0, 0, 0]
    assert not outdated.exists()
    assert len(samples["save_background_s"]) == 1


def test_the_next_save_waits_for_the_one_before(tmp_path, shard, may_write):
    background = BackgroundSaves(world_of(0, 1), Samples())
    background.start(shard, tmp_path / "first", None)
    threading.Timer(0.2, may_write.set).start()
    background.start(shard, tmp_path / "second", None)
    assert written(tmp_path / "first") == [0, 0, 0]
    background.wait()


def test_a_failed_save_ends_the_training(tmp_path, shard, monkeypatch):
    def fail(shard, directory):
        raise ResultsError("no space left")

    monkeypatch.setattr(StateShard, "write", fail)
    background = BackgroundSaves(world_of(0, 1), Samples())
    background.start(shard, tmp_path, None)
    with pytest.raises(ResultsError, match="no space left"):
        background.wait()


def test_without_memory_for_a_copy_training_waits(tmp_path, shard, monkeypatch):
    monkeypatch.setattr(BackgroundSaves, "_has_room", lambda *_: False)
    monkeypatch.setattr(StateShard, "copied", lambda _: pytest.fail("there is no memory"))
    BackgroundSaves(world_of(0, 1), Samples()).start(shard, tmp_path, None)
    assert written(tmp_path) == [0, 0, 0]


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
