"""A rank that fails costs its own run; the others go on, and every run stays readable."""

import os
import sys
from pathlib import Path

import pytest
from launching import PROGRAM, ROOT, launch
from made_runs import read_results, workload_of
from waiting import is_alive, wait_until

from harness.cases import Case, needs_of
from harness.workloads.common.contract import Need

FAULTY = Path(__file__).with_name("faulty_ranks.py")
AGENT = (sys.executable, "-SP", str(ROOT / "harness/runtime/agent/__main__.py"))

pytestmark = pytest.mark.mpi


def mpirun(n_ranks, *arguments, timeout_s=120):
    path = (Path(__file__).parents[1],)
    return launch(n_ranks, *AGENT, *PROGRAM, *arguments, path=path, timeout_s=timeout_s)


def test_each_fault_becomes_its_status_and_a_resumed_sweep_skips_what_is_done(tmp_path):
    faults = ["oom", "none", "wrong", "error", "killed", "hang", "none"]
    done = mpirun(2, FAULTY, tmp_path, *faults)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["oom", "ok", "invalid", "crash", "crash", "timeout", "ok"]
    results = read_results(tmp_path)
    assert results.skipped == []
    by_status = {run.header.status: run for run in results.runs}
    assert "rank 1" in by_status["oom"].header.reason
    crashes = [run.header.reason for run in results.runs if run.header.status == "crash"]
    assert any("rank 1" in reason and "rank 1 has a bug" in reason for reason in crashes)
    assert any("rank 1" in reason and "killed by SIGKILL" in reason for reason in crashes)
    assert "tried to allocate 1 TiB" in by_status["oom"].header.reason
    assert by_status["ok"].header.summary == {"total": 2.0}
    assert sorted(by_status["ok"].ranks) == [0, 1]
    resumed = mpirun(2, FAULTY, tmp_path, "--resume", "none", "none", "none")
    assert resumed.returncode == 0, resumed.stderr
    # Runs that were done before are told too, so that tables are of the whole sweep.
    assert resumed.stdout.split() == ["ok", "ok", "ok"]
    ended = [run.header for run in read_results(tmp_path).runs if run.header.status == "ok"]
    assert sorted(header.repeat for header in ended) == [0, 1, 2]


FAULTS = [
    "ddp:building:1",
    "tensor:backward:0",
    "hybrid:forward:1",
    "1f1b:building:0",
    "zero_bubble:backward:0",
    "asynchronous:forward:1",
]
SAID = {
    "building": "AttributeError: 'NoneType' object has no attribute 'factory' (failing_engines",
    "forward": "KeyError: 'cannot go on' (failing_engines.py:",
    "backward": "ValueError: cannot go back (failing_engines.py:",
}
CODE = {
    "building": ")",
    "forward": ' in troubled: raise KeyError("cannot go on"))',
    "backward": ' in backward: raise ValueError("cannot go back"))',
}


@pytest.mark.timeout(600)
def test_a_rank_that_fails_in_an_engine_gives_the_reason_and_its_peers_do_not(tmp_path):
    program = Path(__file__).with_name("failing_engines.py")
    done = mpirun(2, program, tmp_path, *FAULTS, timeout_s=570)
    assert done.returncode == 0, done.stderr
    found = {run.header.config["fault"]: run.header.reason for run in read_results(tmp_path).runs}
    assert sorted(found) == sorted(FAULTS)
    for fault, reason in found.items():
        _, phase, rank = fault.split(":")
        first = reason.splitlines()[0]
        assert first.startswith(f"rank {rank} (")
        assert f"): {SAID[phase]}" in first
        assert first.endswith(CODE[phase])
        assert "peer" not in first
        assert "Traceback" in reason


@pytest.mark.parametrize(
    ("fault", "status", "reason"),
    [("oom", "oom", "tried to allocate 1 TiB"), ("hang", "timeout", "not done after 10 s")],
)
def test_a_rank_that_mpi_waits_for_in_vain_ends_the_launch_with_its_row(
    tmp_path, fault, status, reason
):
    done = mpirun(2, FAULTY, tmp_path, "--over-mpi", "--late-rank-0", "none", fault, "none")
    assert done.returncode != 0
    first, ended = sorted(read_results(tmp_path).runs, key=lambda run: run.header.start_utc)
    assert first.header.status == "ok"
    assert (ended.header.config["fault"], ended.header.status) == (fault, status)
    assert reason in ended.header.reason
    assert f"{ended.header.run_id}: {status}: " in done.stderr
    if fault == "oom":
        assert ended.header.reason.startswith(f"rank 1 ({os.uname().nodename}): ")


@pytest.mark.parametrize(
    ("fault", "over_mpi", "code", "status", "words"),
    [
        ("first_killed", [], 137, "crash", "its first process was killed by SIGKILL"),
        ("zeroth_stopped", ["--over-mpi"], 1, "timeout", "its first process has been stopped (SIG"),
        ("agent_stopped", [], 1, "timeout", "no heartbeat for "),
    ],
)
def test_a_first_process_that_is_killed_or_stopped_ends_the_launch_with_its_row(
    tmp_path, fault, over_mpi, code, status, words
):
    done = mpirun(2, FAULTY, tmp_path, *over_mpi, fault, "none")
    assert done.returncode == code, done.stderr
    (run,) = read_results(tmp_path).runs
    rank = 0 if fault.startswith("zeroth") else 1
    assert run.header.status == status
    assert run.header.reason.startswith(f"rank {rank} ({os.uname().nodename}): {words}")
    assert f"error: {run.header.run_id}: {status}: rank {rank} " in done.stderr
    assert "BrokenPipe" not in done.stderr
    pids = (tmp_path / "pids").read_text().split()
    wait_until(lambda: not any(map(is_alive, pids)))


@pytest.mark.cluster
def test_a_full_disk_ends_the_sweep_with_a_row_and_a_resumed_one_goes_on(small_disk):
    full = mpirun(2, FAULTY, small_disk, "none", "full", "none")
    assert full.stdout.split() == ["ok", "crash"], full.stderr
    assert "no further runs, because " in full.stderr
    _, run = sorted(read_results(small_disk).runs, key=lambda run: run.header.start_utc)
    host = os.uname().nodename
    assert f"({host}): {run.path}/rank" in run.header.reason
    assert f" on {host} cannot be written: No space left on device" in run.header.reason
    (small_disk / "filler").unlink()
    assert len(run.ranks[0]) + len(run.ranks[1]) < 400
    resumed = mpirun(2, FAULTY, small_disk, "--resume", "none", "none")
    assert resumed.stdout.split() == ["ok", "ok"], resumed.stderr
    assert read_results(small_disk).skipped == []


def test_what_builds_on_more_is_carried_out_last(monkeypatch):
    def workload(*needs):
        return workload_of(dict, needs=lambda config: list(needs))

    def need(name):
        return Need(name=name, config={}, is_met=lambda results, cluster: False)

    links, profile, search = map(need, ("links", "profile", "search"))
    table = {"links": workload(), "profile": workload(), "search": workload(links)}
    monkeypatch.setattr("harness.cases.load_workload", table.__getitem__)
    cases = [
        Case(name="train", workload=workload(*needs), config={})
        for needs in ([links, search], [], [profile])
    ]
    assert needs_of(cases) == [links, profile, search]
