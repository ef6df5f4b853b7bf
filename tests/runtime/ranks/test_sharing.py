"""Files travel between hosts that share no disk: processes with directories of their own."""

import multiprocessing
import os
from pathlib import Path

import pytest
from torch.distributed import FileStore

from harness.runtime.ranks import sharing
from harness.runtime.ranks.control import Control

STATE, HOSTS = Path("state"), ["a", "b", "b", "c"]


def collect(control):
    def act(fetch):
        fetch(STATE)
        for path in sorted(STATE.iterdir()):
            fetch(path)
        return "done"

    return sharing.with_fetch(control, act)


@pytest.fixture
def ranks(tmp_path, monkeypatch):
    """Call a function on four ranks, each in a directory of its own; returns what they return.

    They are forks, which import nothing. A TCPStore would have a thread, beside which a fork may
    never get a lock.
    """
    monkeypatch.setattr(sharing, "_BLOCK_BYTES", 1000)
    places = [tmp_path / f"rank{rank}" for rank in range(4)]
    for place in places:
        place.mkdir()
    context = multiprocessing.get_context("fork")
    results = context.SimpleQueue()

    def start(act, rank):
        os.chdir(places[rank])
        control = Control(FileStore(str(tmp_path / "store"), 4), rank, 4)
        results.put((rank, act(control)))
        control.leave()

    def run(act):
        processes = [context.Process(target=start, args=(act, rank)) for rank in range(4)]
        for process in processes:
            process.start()
        for process in processes:
            process.join(120)
            process.kill()
        assert [process.exitcode for process in processes] == [0] * 4
        found = dict(results.get() for _ in processes)
        return [found[rank] for rank in range(4)]

    return places, run


def write(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def files_in(place):
    paths = [path for path in place.rglob("*") if path.is_file()]
    return {str(path.relative_to(place)): path.read_bytes() for path in paths}


def test_rank_0_fetches_what_other_hosts_have(ranks):
    places, run = ranks
    long = bytes(range(256)) * 10  # three blocks
    write(places[0] / "state/step-4/shard0", b"own")
    write(places[1] / "state/step-4/shard1", long)
    write(places[1] / "state/step-4/shard0", b"not this one")
    write(places[2] / "state/step-4/shard1", b"nor this one")
    write(places[2] / "state/step-4/empty", b"")
    write(places[3] / "state/step-8/shard3", b"later")
    others = [files_in(place) for place in places[1:]]
    assert run(collect) == ["done", None, None, None]
    assert files_in(places[0]) == {
        "state/step-4/shard0": b"own",
        "state/step-4/shard1": long,
        "state/step-4/empty": b"",
        "state/step-8/shard3": b"later",
    }
    assert [files_in(place) for place in places[1:]] == others


def test_hosts_get_what_they_lack_once_each(ranks):
    places, run = ranks
    whole = {"state/shard0": b"a" * 2500, "state/shard1": b"b"}
    for name, data in whole.items():
        write(places[0] / name, data)
    write(places[3] / "state/shard1", b"b")
    run(lambda control: sharing.distribute(control, STATE, HOSTS))
    # Ranks 1 and 2 are of one host, so the second would have found the first one's files.
    assert [files_in(place) for place in places] == [whole, whole, {}, whole]


def test_hosts_get_what_runs_are_planned_by_without_records(ranks):
    places, run = ranks
    planned_by = {"state/profile.json": b"{}", "state/run/run.json": b"[]"}
    records = {"state/run/rank0.jsonl": b"x" * 2500, "state/run/state/shard0": b"y"}
    for name, data in (planned_by | records).items():
        write(places[0] / name, data)
    run(lambda control: sharing.distribute_results(control, STATE, HOSTS))
    assert files_in(places[3]) == planned_by


def test_a_file_that_cannot_be_written_is_told_and_the_others_arrive(ranks):
    places, run = ranks
    for rank in (1, 2):
        write(places[rank] / f"rank{rank}.jsonl", b"x" * 1500)
    (places[0] / "rank1.jsonl").mkdir()  # in its place
    paths = {rank: Path(f"rank{rank}.jsonl") for rank in (1, 2, 3)}
    told, *others = run(lambda control: sharing.copy_to_first(control, paths))
    assert list(told) == [1]
    assert "rank1.jsonl" in told[1]
    assert others == [{}, {}, {}]
    assert files_in(places[0]) == {"rank2.jsonl": b"x" * 1500}
