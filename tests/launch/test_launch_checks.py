"""What is looked at before a sweep, and by whom."""

from typing import Any

import pytest
from made_runs import world_of

from harness.cases import Case
from harness.launch import Launcher
from harness.runtime.agent.wire import Channel
from harness.runtime.ranks.rendezvous import Meeting
from harness.workloads.common.contract import Workload
from harness.workloads.common.flags import RunOptions


class Answers:
    """Control as one of two ranks sees it; the other one finds nothing wrong."""

    def __init__(self, rank):
        self._rank = rank

    def gather(self, name, value, type_):
        if name != "problem":
            return [value, value]
        return [value if rank == self._rank else "" for rank in range(2)]

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
    assert launcher(rank, tmp_path / "free").problem([]) == ""


@pytest.mark.parametrize(("rank", "looked_at"), [(0, ["a", "b"]), (1, [])])
def test_rank_0_looks_once_at_what_repeats_name(tmp_path, rank, looked_at):
    seen: list[str] = []
    workload = Workload(
        config=str, cases=lambda config, n: [config], body=lambda config, context: {},
        table=lambda runs: "", check=seen.append,
    )  # fmt: skip
    cases = [Case(name="case", workload=workload, config=config) for config in "abab"]
    assert launcher(rank, tmp_path).problem(cases) == ""
    assert seen == looked_at
