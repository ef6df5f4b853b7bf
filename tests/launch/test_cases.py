"""Runs to be carried out: which repeat each is."""

from __future__ import annotations

from made_runs import header_of

from harness.cases import Case, PlannedRun, remaining_repeats
from harness.domain.run import RunHeader
from harness.workloads.common.contract import Workload

WORKLOAD = Workload(
    config=str, cases=lambda config, n: [config], body=lambda config, context: {},
    table=lambda runs: "",
)  # fmt: skip


def planned(key: str, repeat: int) -> PlannedRun:
    case = Case(name="case", workload=WORKLOAD, config=key)
    return PlannedRun(case=case, key=key, repeat=repeat, ranks=(0,))


def header(key: str, repeat: int) -> RunHeader:
    return header_of(workload="case", key=key, repeat=repeat)


def test_repeats_are_counted_from_0_where_nothing_is_done() -> None:
    runs = [planned("a", 0), planned("b", 0), planned("a", 1)]
    assert remaining_repeats(runs, {}) == [0, 0, 1]


def test_a_repeat_that_failed_is_made_again_under_its_number() -> None:
    runs = [planned("a", repeat) for repeat in range(4)]
    done = {"a": [header("a", 0), header("a", 2)], "b": [header("b", 0)]}
    assert remaining_repeats(runs, done) == [None, None, 1, 3]
    assert remaining_repeats([planned("b", 0), planned("b", 1)], done) == [None, 1]
