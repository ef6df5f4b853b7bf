"""The random strategies of the executor's tests: valid, repeatable, and of every kind."""

from __future__ import annotations

from itertools import product
from random import Random

import pytest
from equivalence_cases import random_case
from equivalence_models import SMALL_MODELS, min_microbatch, small_graph
from equivalence_strategies import named_strategies, random_strategy, small_cluster

from harness.domain.schedule import SCHEDULE_NAMES
from harness.domain.strategy import validate

N_CASES = 300


@pytest.fixture(scope="module")
def cases():
    return [random_case(0, index) for index in range(N_CASES)]


def test_every_case_is_valid_and_keeps_microbatches_large_enough(cases):
    for case in cases:
        validate(case.strategy, small_graph(case.model), small_cluster(case.n_ranks))
        assert min(case.strategy.microbatch_sizes()) >= min_microbatch(case.model)


def test_a_case_is_a_function_of_its_seed_and_index():
    assert random_case(3, 17) == random_case(3, 17)
    assert random_case(3, 17) != random_case(4, 17)


def test_every_model_meets_every_number_of_ranks_under_every_schedule(cases):
    met = {(case.model, case.n_ranks, case.strategy.schedule) for case in cases}
    assert met == set(product(SMALL_MODELS, range(1, 6), SCHEDULE_NAMES))


def test_strategies_of_every_kind_are_drawn(cases):
    strategies = [case.strategy for case in cases]
    plans = [plan for strategy in strategies for plan in strategy.operators.values()]
    assert any(len(set(plan.devices)) < len(plan.devices) for plan in plans)
    assert any(plan.devices != sorted(plan.devices) for plan in plans)
    assert any(isinstance(cut, list) for plan in plans for cut in plan.partition.values())
    assert any(len(plan.partition) == 3 for plan in plans)
    assert any(len({len(d) for d in s.stage_devices()}) > 1 for s in strategies)
    assert any(len(set(s.microbatch_sizes())) > 1 for s in strategies)
    assert any(stage.recompute for s in strategies for stage in s.stages)
    assert any(s.n_ranks() < len(s.stages) and s.schedule == "interleaved" for s in strategies)


@pytest.mark.parametrize("schedule", SCHEDULE_NAMES)
def test_every_cut_of_every_operator_is_drawn(schedule):
    graph = small_graph("vit")
    drawn = {
        (graph.operators[graph.index()[name]].kind, dim)
        for seed in range(60)
        for name, plan in random_strategy(
            Random(seed), graph, 3, 8, schedule=schedule
        ).operators.items()
        for dim in plan.partition
    }
    assert {("linear", "feature"), ("linear", "seq"), ("linear", "contraction")} <= drawn
    assert {("attention", "heads"), ("attention", "seq"), ("attention", "sample")} <= drawn
    assert {("conv2d", "height"), ("conv2d", "width"), ("conv2d", "feature")} <= drawn


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("model", ["mlp", "alexnet", "dlrm_cat", "resnet18"])
def test_named_strategies_are_valid(model, n_ranks):
    graph = small_graph(model)
    for strategy in named_strategies(graph, n_ranks, 20).values():
        validate(strategy, graph, small_cluster(n_ranks))
