"""Pipelines small enough to count their idle seconds by hand."""

import pytest
from made_runs import run_of

from harness.domain.record import Span
from harness.measure.derive.pipeline import pass_of, pipeline_summary


def at(stage, microbatch, **fields):
    """Fields of a span of a pass."""
    return {"stage": stage, "microbatch": microbatch, **fields}


# GPipe on two ranks and two microbatches; backward takes twice as long as forward:
#
#             0   1   2   3   4   5   6   7   8   9   10
#   rank 0    F0  F1  w   w   w   B0--B0  B1--B1  opt
#   rank 1    w   F0  F1  B0--B0  B1--B1  opt .   .
RANK0 = [
    ("step", {}, 0, 10),
    ("forward", at(0, 0), 0, 1),
    ("forward", at(0, 1), 1, 2),
    ("communication", {"is_wait": True}, 2, 5),
    ("backward", at(0, 0), 5, 7),
    ("backward", at(0, 1), 7, 9),
    ("optimizer", {}, 9, 10),
]
RANK1 = [
    ("step", {}, 0, 10),
    ("communication", {"is_wait": True}, 0, 1),
    ("forward", at(1, 0), 1, 2),
    ("forward", at(1, 1), 2, 3),
    ("backward", at(1, 0), 3, 5),
    ("backward", at(1, 1), 5, 7),
    ("optimizer", {}, 7, 8),
]


def spans(layout, *, n_steps=1):
    return [
        Span(kind=kind, step=step, start_s=50.0 * step + start, duration_s=stop - start, **fields)
        for step in range(n_steps)
        for kind, fields, start, stop in layout
    ]


def test_bubble_is_the_idle_share_of_the_step_over_ranks():
    summary = pipeline_summary(run_of(spans(RANK0, n_steps=2), spans(RANK1, n_steps=2)))
    assert summary.bubble_by_rank == {0: pytest.approx(0.3), 1: pytest.approx(0.3)}
    assert summary.bubble.median == pytest.approx(0.3)
    assert summary.bubble.n == 2
    assert (summary.n_stages, summary.n_microbatches) == (2, 2)


def test_stage_times_are_those_of_one_microbatch():
    summary = pipeline_summary(run_of(spans(RANK0), spans(RANK1)))
    assert [stage.ranks for stage in summary.stages] == [(0,), (1,)]
    assert [(stage.forward_s, stage.backward_s) for stage in summary.stages] == [(1, 2), (1, 2)]
    assert summary.stages[0].total_s == 3


def test_a_wait_inside_a_pass_is_idle_and_no_time_of_the_stage():
    inside = [
        ("step", {}, 0, 10),
        ("forward", at(0, 0), 0, 4),
        ("communication", {"is_wait": True}, 1, 3),
        ("backward", at(0, 0), 4, 10),
        ("communication", {"name": "bucket0"}, 5, 9),  # beside backward: no wait
    ]
    summary = pipeline_summary(run_of(spans(inside), spans(RANK1)))
    assert summary.bubble_by_rank[0] == pytest.approx(0.2)
    assert summary.stages[0].forward_s == 2
    assert summary.stages[0].backward_s == 6


def test_weight_passes_are_backward_and_recomputation_is_computing():
    own = [
        ("step", {}, 0, 10),
        ("forward", at(0, 0), 0, 1),
        ("forward", at(0, 0, pass_="recompute"), 3, 4),
        ("backward", at(0, 0), 4, 6),
        ("backward", at(0, 0, pass_="weights"), 6, 9),
    ]
    summary = pipeline_summary(run_of(spans(own), spans(RANK1)))
    stage = summary.stages[0]
    assert (stage.forward_s, stage.recompute_s, stage.backward_s) == (1, 1, 5)
    assert summary.bubble_by_rank[0] == pytest.approx(0.3)


def test_the_slowest_replica_stands_for_its_stage():
    slow = [("step", {}, 0, 10), ("forward", at(0, 0), 0, 3), ("backward", at(0, 0), 3, 9)]
    summary = pipeline_summary(run_of(spans(RANK0), spans(RANK1), spans(slow)))
    assert summary.stages[0].ranks == (0, 2)
    assert (summary.stages[0].forward_s, summary.stages[0].backward_s) == (3, 6)


def test_steps_that_a_rank_never_ended_are_left_out():
    unfinished = spans([line for line in RANK1 if line[0] != "step"], n_steps=2)[-6:]
    summary = pipeline_summary(run_of(spans(RANK0, n_steps=2), [*spans(RANK1), *unfinished]))
    assert summary.bubble.n == 1


def test_one_stage_is_no_pipeline():
    assert pipeline_summary(run_of(spans(RANK0))) is None
    assert pipeline_summary(run_of([])) is None


def test_a_pass_is_the_kind_unless_the_span_says_more():
    def found(kind, **fields):
        return pass_of(Span(kind=kind, start_s=0, duration_s=1, **fields))

    assert found("forward", **at(12, 7)) == "forward"
    assert found("forward", **at(12, 7, pass_="recompute")) == "recompute"
    assert found("backward", **at(12, 7, pass_="weights")) == "backward"
    assert found("communication", operator="conv1", microbatch=7, pass_="backward") is None
    assert found("optimizer") is None
