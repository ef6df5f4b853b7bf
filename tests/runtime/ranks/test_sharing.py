"""Files travel between hosts that share no disk: processes with directories of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from harness.runtime.ranks import sharing

RANK = """
import json, os, sys
from datetime import timedelta
from pathlib import Path
from torch.distributed import TCPStore
from harness.runtime.ranks import sharing
from harness.runtime.ranks.control import Control

rank, port, size = (int(word) for word in sys.argv[1:4])
sharing._BLOCK_BYTES = 1000
store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=60))
control = Control(store, rank, size)
{act}
control.leave()
"""
COLLECT = """
def act(fetch):
    fetch(Path("state"))
    for path in sorted(Path("state").iterdir()):
        fetch(path)
    return "done"
print(json.dumps(sharing.with_fetch(control, act)))
"""
DISTRIBUTE = 'sharing.distribute(control, Path("state"), ["a", "b", "b", "c"])'
TO_FIRST = """
paths = {1: Path("rank1.jsonl"), 2: Path("rank2.jsonl"), 3: Path("rank3.jsonl")}
print(json.dumps(sharing.copy_to_first(control, paths)))
"""


@pytest.fixture
def ranks(tmp_path):
    """Run a program on four ranks, each in a directory of its own; returns what they print."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    places = [tmp_path / f"rank{rank}" for rank in range(4)]
    for place in places:
        place.mkdir()

    def run(act):
        started = [
            subprocess.Popen(
                [sys.executable, "-c", RANK.format(act=act), str(rank), str(server.port), "4"],
                cwd=place,
                env={**os.environ, "PYTHONPATH": str(Path(sharing.__file__).parents[3])},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank, place in enumerate(places)
        ]
        printed = [process.communicate(timeout=120)[0] for process in started]
        assert [process.returncode for process in started] == [0] * 4
        return printed

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
    assert [json.loads(text) for text in run(COLLECT)] == ["done", None, None, None]
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
    run(DISTRIBUTE)
    # Ranks 1 and 2 are of one host, so the second would have found the first one's files.
    assert [files_in(place) for place in places] == [whole, whole, {}, whole]


def test_hosts_get_what_runs_are_planned_by_without_records(ranks):
    places, run = ranks
    planned_by = {"state/profile.json": b"{}", "state/run/run.json": b"[]"}
    records = {"state/run/rank0.jsonl": b"x" * 2500, "state/run/state/shard0": b"y"}
    for name, data in (planned_by | records).items():
        write(places[0] / name, data)
    run(DISTRIBUTE.replace("distribute", "distribute_results"))
    assert files_in(places[3]) == planned_by


def test_a_file_that_cannot_be_written_is_told_and_the_others_arrive(ranks):
    places, run = ranks
    for rank in (1, 2):
        write(places[rank] / f"rank{rank}.jsonl", b"x" * 1500)
    (places[0] / "rank1.jsonl").mkdir()  # in its place
    told, *others = map(json.loads, run(TO_FIRST))
    assert list(told) == ["1"]
    assert "rank1.jsonl" in told["1"]
    assert others == [{}, {}, {}]
    assert files_in(places[0]) == {"rank2.jsonl": b"x" * 1500}
