"""Runs to be carried out: which repeat each is, what is looked at before, and how one ends."""

import re
import sys
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from made_runs import header_of, workload_of, world_of

from harness import launch
from harness.cases import Case, PlannedRun, exit_code, finished_repeats, remaining_repeats
from harness.launch import Launcher
from harness.measure.heartbeat import HEADER_FILE, HEARTBEAT_FILE
from harness.measure.store import read_header, write_header
from harness.resume import find_earlier
from harness.run import Outcome, RunSpec, run_case
from harness.runtime.agent.wire import Channel
from harness.runtime.ranks.rendezvous import Meeting
from harness.workloads.common.contract import Continuing
from harness.workloads.common.flags import RunOptions
from harness.workloads.train.config import TrainCase
from harness.workloads.train.workload import WORKLOAD as TRAIN

WORKLOAD = workload_of(str)


def planned(key, repeat):
    case = Case(name="case", workload=WORKLOAD, config=key)
    return PlannedRun(case=case, key=key, repeat=repeat, ranks=(0,))


def header(key, repeat):
    return header_of(workload="case", key=key, repeat=repeat)


def test_repeats_are_counted_from_0_where_nothing_is_done():
    runs = [planned("a", 0), planned("b", 0), planned("a", 1)]
    assert remaining_repeats(runs, {}) == [0, 0, 1]


def test_a_repeat_that_failed_is_made_again_under_its_number():
    runs = [planned("a", repeat) for repeat in range(4)]
    done = {"a": [header("a", 0), header("a", 2)], "b": [header("b", 0)]}
    assert remaining_repeats(runs, done) == [None, None, 1, 3]
    assert remaining_repeats([planned("b", 0), planned("b", 1)], done) == [None, 1]


@dataclass(frozen=True)
class Empty:
    """A configuration."""


def test_runs_that_continue_each_other_in_a_circle_are_read(tmp_path):
    for name, other in (("a", "b"), ("b", "a"), ("c", "a")):
        made = header_of(workload="case", run_id=name, config={"continues": other}, status="crash")
        write_header(tmp_path / name, made)
    never: Any = None
    continuing = Continuing(
        find=never, go_on=never, grace_s=never, is_saved=never,
        differing=lambda one, other: frozenset(), strategy_flags=frozenset(),
    )  # fmt: skip
    workload = replace(WORKLOAD, continuing=continuing)
    case = Case(name="case", workload=workload, config=Empty())
    run = PlannedRun(case=case, key="", repeat=0, ranks=(0,))
    assert [one.header.run_id for one in find_earlier(tmp_path, run, [run], 1)] == ["c"]


@pytest.mark.parametrize(("last", "code"), [("ok", 0), ("crash", 1), ("invalid", 2)])
def test_a_run_that_lost_a_rank_counts_by_the_one_that_goes_on(last, code):
    lost = header_of(run_id="a", status="crash")
    assert exit_code([lost]) == exit_code([lost, header_of(run_id="b", status="invalid")]) == 1
    assert exit_code([lost, header_of(status=last, config={"continues": "a"})]) == code


@pytest.mark.parametrize(("save_every", "code"), [(None, 0), (20, 1)])
def test_a_training_that_saves_its_state_has_not_ended_when_memory_is_short(
    save_every, code, tmp_path
):
    run = header_of(status="oom", config={"save_every": save_every})
    (tmp_path / run.run_id).mkdir()
    write_header(tmp_path / run.run_id, run)
    assert exit_code([run]) == code
    assert len(finished_repeats(tmp_path)) == 1 - code


class Answers:
    """Control as one of two ranks sees it; the other one finds nothing wrong."""

    def __init__(self, rank):
        self.rank = rank

    def gather(self, name, value, type_):
        if name == "code":
            return [value | {flags: "older" for flags in value if rank == 1} for rank in range(2)]
        if name != "problem":
            return [value, value]
        return [value if rank == self.rank else "" for rank in range(2)]

    def broadcast(self, name, value, type_):
        return value


def launcher(rank, results):
    control: Any = Answers(rank)
    meeting = Meeting(
        world=world_of(rank, 2),
        control=control,
        channel=Channel(None),
        address="",
        port=0,
        facts=[],
    )
    return Launcher(meeting, RunOptions(results=results), [])


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_needs_a_directory_that_it_can_write_to(tmp_path, rank):
    (tmp_path / "taken").touch()
    problem = launcher(rank, tmp_path / "taken").problem([])
    assert f"cannot be written on node{rank} (Not a directory)" in problem
    (tmp_path / "link").symlink_to(tmp_path / "missing")
    problem = launcher(rank, tmp_path / "link").problem([])
    assert f"on node{rank} ({tmp_path / 'link'} is a link to nothing): give" in problem
    assert launcher(rank, tmp_path / "free").problem([]) == ""


@pytest.mark.parametrize(("rank", "looked_at"), [(0, ["a", "b"]), (1, [])])
def test_rank_0_looks_once_at_what_repeats_name(tmp_path, rank, looked_at):
    seen: list[str] = []
    workload = workload_of(str, check=lambda config, results: seen.append(config))
    cases = [Case(name="case", workload=workload, config=config) for config in "abab"]
    assert launcher(rank, tmp_path).problem(cases) == ""
    assert seen == looked_at


@pytest.mark.parametrize(
    ("digest", "problem"),
    [
        ("", ""),
        ("newer", "--model lenet --data own:set: rank 0 on node0 and rank 1 on node1 have "
         "different code of it"),
    ],
)  # fmt: skip
def test_a_users_own_code_is_the_same_on_every_rank(tmp_path, digest, problem):
    config = TrainCase(model="lenet", data="own:set", code_digest=digest)
    case = Case(name="case", workload=WORKLOAD, config=config)
    assert re.match(f"{problem}($|, which)", launcher(0, tmp_path).problem([case]))


@pytest.mark.parametrize(
    ("save_every", "has_header", "wanted"),
    [(5, False, True), (5, True, False), (None, False, False)],
)
def test_a_host_with_a_disk_of_its_own_keeps_the_header_of_a_run_that_is_saved(
    tmp_path, save_every, has_header, wanted
):
    config: Any = SimpleNamespace(save_every=save_every)
    plan: Any = SimpleNamespace(case=SimpleNamespace(config=config, workload=TRAIN))
    if has_header:
        (tmp_path / HEADER_FILE).touch()
    assert launcher(1, tmp_path)._keeps_copy(plan, tmp_path) == wanted


def test_a_launch_is_warned_of_one_that_began_beside_its_run(tmp_path, monkeypatch, caplog):
    one = launcher(0, tmp_path)
    other = tmp_path / "other"

    def run_beside_another(*_: object) -> list[Outcome]:
        write_header(other, header_of(run_id="other", status="running"))
        (other / HEARTBEAT_FILE).touch()
        return [Outcome(status="ok")]

    monkeypatch.setattr(one, "_new_header", lambda plan: header_of(run_id="own", status="running"))
    monkeypatch.setattr(one, "_watch_run", run_beside_another)
    monkeypatch.setattr(one, "_result", lambda *_: ("ok", "", None))
    case = Case(name="case", workload=WORKLOAD, config=Empty())
    one._record_run(PlannedRun(case=case, key="", repeat=0, ranks=(0,)), "run1", "own")
    assert read_header(tmp_path / "own").status == "ok"
    assert caplog.text.count("another launch measures on") == 1
    assert "now (other)" in caplog.text


def test_a_run_whose_records_were_removed_is_no_result(tmp_path):
    plan = replace(planned("a", 0), ranks=(0, 1))
    outcomes = [Outcome(status="ok")] * 2
    status, reason, _ = launcher(0, tmp_path)._result(plan, tmp_path, outcomes, [])
    path = tmp_path / "rank0.jsonl"
    assert (status, reason) == ("crash", f"rank 0 (node0): {path} was removed during the run")


def out_of_memory(config, context):
    raise MemoryError


def leave(config, context):
    sys.exit(0)


@pytest.mark.parametrize(
    ("body", "status", "reason"),
    [(out_of_memory, "oom", "MemoryError"), (leave, "crash", "SystemExit: 0 (test_runs.py:")],
)
def test_an_error_that_says_nothing_is_named_by_its_type(tmp_path, body, status, reason):
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    spec = RunSpec(
        name="run",
        run_dir=str(tmp_path),
        address="127.0.0.1",
        port=store.port,
        collective_timeout_s=60.0,
    )
    outcome = run_case(body, None, world_of(), spec)
    dist.destroy_process_group()
    assert outcome.status == status
    assert outcome.reason.startswith(reason)


def test_a_run_begins_after_its_state_has_come(tmp_path, monkeypatch):
    order: list[str] = []

    def begin(self, plan):
        order.append("header")
        raise InterruptedError

    monkeypatch.setattr(launch.sharing, "distribute", lambda *words: order.append("state"))
    monkeypatch.setattr(Launcher, "_new_header", begin)
    config = SimpleNamespace(load_state=tmp_path)
    case = Case(name="case", workload=WORKLOAD, config=config)
    with pytest.raises(InterruptedError):
        launcher(0, tmp_path)._record_run(replace(planned("", 0), case=case), "", "")
    assert order == ["state", "header"]
