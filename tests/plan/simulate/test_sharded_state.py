"""Sharded optimizer state: less memory and a shorter optimizer, then an all-gather of weights."""

import pytest
from simulated import chain, cluster_of, op, profile_of, simulate

from harness.domain.graph import Graph
from harness.domain.strategy import OperatorPlan
from harness.plan.portfolio import search_portfolio
from harness.plan.request import PlanRequest
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import binding, spans

BY_SAMPLES = {name: OperatorPlan({"sample": 2}, [0, 1]) for name in ("a", "b")}


def test_each_device_updates_its_slices_and_receives_the_others():
    graph, profile = chain()
    options = SimulatorOptions(bucket_bytes=1, optimizer_s_per_byte=0.1)
    flags = {"options": options, "optimizer_state": "sharded"}
    found = simulate(graph, profile, cluster_of(), BY_SAMPLES, **flags)
    # Gradients are complete at 11 s. Device 0 owns the 80 B of a, device 1 the 40 B of b.
    assert found.outcome.optimizer_s.tolist() == [8.0, 4.0]
    assert found.outcome.static_bytes.tolist() == [2 * 120 + 80, 2 * 120 + 40]
    # Half an all-reduce of 120 B: a ring step of 60 B at 16 B/s, after the slower optimizer.
    assert found.outcome.gather_s.tolist() == [3.75, 4.0 + 3.75]
    assert found.step_s == 11.0 + 8.0 + 3.75
    last = spans(found)[1][-2]
    assert (last.name, last.start_s, last.duration_s) == ("all-gather of weights", 15.0, 7.75)
    assert binding(found)["all-gather of weights"] == 3.75
    replicated = simulate(graph, profile, cluster_of(), BY_SAMPLES, options=options)
    assert replicated.step_s == 11.0 + 12.0


def test_no_weights_travel_where_none_are_shared():
    graph, profile = chain()
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [1])}
    one, other = (
        simulate(graph, profile, cluster_of(), plans, optimizer_state=state)
        for state in ("sharded", "replicated")
    )
    assert one.step_s == other.step_s
    assert one.memory_bytes == other.memory_bytes


def test_data_parallelism_is_found_that_fits_by_sharding_only():
    parameters = 10**6
    operators = [op("x", [], 4, kind="input")]
    for k in range(4):
        operators.append(op(f"fc{k}", [operators[-1].name], 4, parameters))
    graph = Graph(name="g", batch=8, operators=operators)
    profile = profile_of(graph, {one.name: (1.0, 2.0) for one in operators[1:]})
    # Weights and gradients of 4 MB, and state of 4 MB, or of 2 MB on each of two.
    cluster = cluster_of(bandwidth=1e9, memory=round(11e6))
    found = search_portfolio(PlanRequest(cluster=cluster, graph=graph, profile=profile, budget=50))
    assert "ddp" not in found.objective.best_of
    candidate = found.objective.best_of["ddp, sharded optimizer"]
    strategy = found.strategy(candidate)
    assert strategy.optimizer_state == "sharded"
    assert strategy.name == "data-parallel MLPs, sharded optimizer"
    assert found.simulator.simulate(strategy).step_s == pytest.approx(candidate.step_s)
