"""The random strategies of the executor's tests: valid, repeatable, and of every kind."""

import pytest
from equivalence_cases import random_case
from equivalence_models import min_microbatch, small_graph
from made_graphs import small_cluster

from harness.domain.strategy import validate

N_CASES = 300


@pytest.fixture(scope="module")
def cases():
    return [random_case(0, index) for index in range(N_CASES)]


def test_every_case_is_valid_and_keeps_microbatches_large_enough(cases):
    for case in cases:
        validate(case.strategy, small_graph(case.model), small_cluster(case.n_ranks))
        assert min(case.strategy.microbatch_sizes()) >= min_microbatch(case.model)


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
