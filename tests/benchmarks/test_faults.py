"""What the program that injects faults takes for as stated, and its page of docs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def faults(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import faults

    yield faults
    for name in ("faults", "faults_cases", "faults_cluster", "comparison"):
        sys.modules.pop(name, None)


@pytest.fixture
def cut(faults):
    (cut,) = [fault for fault in faults.FAULTS if fault.name == "cut-ddp"]
    return cut


ROW = {
    "name": "cut-ddp", "what": "a | b", "workload": "train ddp", "limit": "heartbeat",
    "limit_s": 15.0, "is_struck": True, "time_s": 17.2, "exit_code": 1, "status": "timeout",
    "reason": "rank 1 (c-node1) was last heard 15 s ago\nmore", "message": ["c-node1 is silent"],
    "kept": {"0": [10, 0], "1": [9, 1]}, "left_running": [], "left_after_heal": [],
    "next_run": "ok", "problems": [], "command": "c", "machine": "m", "commit": "abc",
}  # fmt: skip


def test_a_row_that_is_as_stated_has_no_problems(faults, cut, tmp_path):
    assert faults.problems(cut, faults.Cluster("c", tmp_path), ROW) == []


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"is_struck": False}, "did not get to the injection"),
        ({"exit_code": None}, "mpirun had not ended after 17 s"),
        ({"time_s": 40.0}, "mpirun took 40 s, the limit is 15 s"),
        ({"exit_code": 0}, "exit code 0"),
        ({"status": "running"}, "status running, not timeout"),
        ({"reason": "rank 0 (c-node0) was last heard"}, "the reason does not say 'c\\\\-node1'"),
        ({"message": ["bye"]}, "the message does not say 'c\\\\-node1'"),
        ({"left_running": ["c-node0: ssh"]}, "left running: c-node0: ssh"),
        ({"left_after_heal": ["c-node1: python"]}, "left after it came back: c-node1: python"),
        ({"kept": {"0": [10, 2]}}, "more than the line being written is broken"),
        ({"next_run": "exit code 1: error"}, "the next run: exit code 1: error"),
    ],
)
def test_whatever_is_not_as_stated_is_a_problem(faults, cut, tmp_path, change, problem):
    (found,) = faults.problems(cut, faults.Cluster("c", tmp_path), {**ROW, **change})
    assert problem in found


def test_the_page_has_a_line_for_each_row(faults):
    *_, line = faults.page([ROW, ROW]).splitlines()
    assert line == (
        "| a / b | train ddp | 17 s | 15 s (heartbeat) | 1 | timeout: rank 1 (c-node1) was last "
        "heard 15 s ago | 10, 9 | 0 | ok | yes |"
    )


def test_names_are_unique(faults):
    names = [fault.name for fault in faults.FAULTS]
    assert len(set(names)) == len(names)
