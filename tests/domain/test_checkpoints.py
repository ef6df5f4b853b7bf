"""Cuts of a stage that recomputes."""

import msgspec
import pytest

from harness.domain.checkpoints import (
    n_segments_of_least_memory,
    recomputed_segments,
    segment_numbers,
    with_recomputation,
)
from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.strategy import OperatorPlan, Stage, Strategy, validate
from harness.errors import StrategyError

ONE_DEVICE = Cluster.uniform(1, 1, inside_bytes_per_s=1.0, memory_bytes=1 << 30)


def chain(n_bytes, *, also=()):
    """Operators in a row that keep so many bytes each, and further (reader, producer) pairs."""
    inputs = {at: ["x" if at == 0 else str(at - 1)] for at in range(len(n_bytes))}
    for reader, producer in also:
        inputs[reader].append(str(producer))
    operators = [Operator(name="x", kind="input", inputs=[], shape={"sample": 8})]
    operators += [
        Operator(
            name=str(at), kind="other", inputs=inputs[at], shape={"sample": 8}, activation_bytes=n
        )
        for at, n in enumerate(n_bytes)
    ]
    return Graph(name="chain", operators=operators, batch=8)


def numbers(graph, n):
    return segment_numbers(graph, range(1, len(graph.operators)), n)


def strategy(graph, stages, stage_of=lambda at: 0):
    plans = {op.name: OperatorPlan({}, [0], stage_of(int(op.name))) for op in graph.operators[1:]}
    return Strategy(name="any", batch=8, operators=plans, stages=stages)


def test_equal_operators_are_cut_into_the_square_root_of_their_number():
    graph = chain([100] * 16)
    assert n_segments_of_least_memory(graph, range(1, 17)) == 4
    assert numbers(graph, 4) == [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4


def test_no_more_segments_are_made_than_asked_for():
    assert max(numbers(chain([100] * 16), 2)) == 1
    assert numbers(chain([100] * 16), 1) == [0] * 16


def test_any_number_of_segments_is_found_quickly():
    assert numbers(chain([100] * 100), 10**9) == numbers(chain([100] * 100), 64)


def test_a_cut_is_where_the_fewest_bytes_cross_it():
    assert numbers(chain([100, 100, 100, 4, 100, 100, 100, 4]), 2) == [0] * 4 + [1] * 4


def test_a_cut_avoids_values_that_are_read_far_behind_it():
    # Operator 5 reads the output of 2 too, so two values cross between 3 and 5.
    graph = chain([60] * 10, also=[(5, 2)])
    assert numbers(graph, 2).index(1) not in (4, 5)


def test_one_operator_is_not_cut():
    assert n_segments_of_least_memory(chain([100]), [1]) == 1


def test_only_stages_of_several_segments_are_cut():
    graph = chain([100] * 8)
    stages = [Stage(recompute=True), Stage(recompute=True, segments=2)]
    found = recomputed_segments(graph, strategy(graph, stages, lambda at: at // 4))
    assert found == {"4": 0, "5": 0, "6": 1, "7": 1}


def test_a_single_stage_gets_the_segments_of_least_memory_and_a_pipeline_one_each():
    graph = chain([100] * 16)
    single = with_recomputation(strategy(graph, [Stage()]), graph, None)
    assert single.stages == [Stage(recompute=True, segments=4)]
    two = strategy(graph, [Stage(), Stage()], lambda at: at // 8)
    assert with_recomputation(two, graph, None).stages == [Stage(recompute=True)] * 2
    assert with_recomputation(two, graph, 3).stages == [Stage(recompute=True, segments=3)] * 2


@pytest.mark.parametrize("stage", [Stage(segments=2), Stage(recompute=True, segments=0)])
def test_segments_without_recomputation_are_refused(stage):
    graph = chain([100] * 4)
    with pytest.raises(StrategyError, match=f"stage 0 .* has {stage.segments} segments"):
        validate(strategy(graph, [stage]), graph, ONE_DEVICE)


def test_a_file_without_segments_is_read_as_one():
    assert msgspec.json.decode(b'{"recompute": true}', type=Stage) == Stage(recompute=True)
    assert msgspec.json.encode(Stage(recompute=True)) == b'{"recompute":true}'
