"""The random strategies of the executor's tests are of every kind; drawing them validates them."""

from equivalence_cases import random_case
from equivalence_models import min_microbatch

N_CASES = 300


def test_strategies_of_every_kind_are_drawn():
    cases = [random_case(0, index) for index in range(N_CASES)]
    for case in cases:
        assert min(case.strategy.microbatch_sizes()) >= min_microbatch(case.model)
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
