"""Runs to be carried out: which repeat each is."""

from dataclasses import dataclass, replace

import pytest
from made_runs import header_of

from harness.cases import Case, PlannedRun, find_last, has_failed, remaining_repeats
from harness.measure.store import write_header
from harness.workloads.common.contract import Workload

WORKLOAD = Workload(
    config=str, cases=lambda config, n: [config], body=lambda config, context: {},
    table=lambda runs: "",
)  # fmt: skip


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
    for name, other in (("a", "b"), ("b", "a")):
        made = header_of(workload="case", run_id=name, config={"continues": other}, status="crash")
        write_header(tmp_path / name, made)
    workload = replace(WORKLOAD, is_same=lambda one, other: True)
    case = Case(name="case", workload=workload, config=Empty())
    assert find_last(tmp_path, case, 0, 1) is not None


@pytest.mark.parametrize(("last", "failed"), [("ok", False), ("crash", True)])
def test_a_run_that_lost_a_rank_counts_by_the_one_that_goes_on(last, failed):
    lost = header_of(run_id="a", status="crash")
    assert has_failed([lost])
    assert has_failed([lost, header_of(status=last, config={"continues": "a"})]) == failed
