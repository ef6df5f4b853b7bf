"""Experts lie on devices where their weights are large, and tokens travel to them and back."""

import pytest
from made_graphs import profile_of

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.strategy import validate
from harness.plan import builders
from harness.plan.portfolio import plan
from harness.plan.request import PlanRequest
from harness.plan.simulate.simulator import Simulator

N, T, E, C, D, H = 8, 16, 4, 5, 32, 64
TOKENS = {"sample": N, "seq": T, "feature": D}
SLOTS = {"sample": N, "seq": E, "feature": C}
GIVEN = {"sample": N, "feature": E, "height": C, "width": D}
INNER = {**GIVEN, "width": H}
CLUSTER = Cluster.uniform(4, 1, inside_bytes_per_s=1e9, between_bytes_per_s=1e6, memory_bytes=10**9)


def operator(name, kind, inputs, shape, weights=0, **attrs):
    n_elements = 1
    for size in shape.values():
        n_elements *= size
    return Operator(
        name=name, kind=kind, inputs=inputs, shape=shape, attrs=attrs,
        parameter_bytes=weights, activation_bytes=4 * n_elements,
    )  # fmt: skip


def product(name, inputs, shape, equation, summed, n_summed, weights=0):
    attrs = {"equation": equation, "summed": summed, "n_summed": n_summed}
    return operator(name, "einsum", inputs, shape, weights, **attrs)


def mixture():
    weights = 4 * E * D * H
    routes = {"sample": N, "feature": T, "height": E, "width": C}
    operators = [
        Operator(name="in", kind="input", shape=TOKENS),
        operator("x", "layer_norm", ["in"], TOKENS, 4 * D, n_normalized=1),
        operator("routes", "router", ["x"], routes, 4 * D * E),
        product("take", ["routes", "x"], GIVEN, "ntec,ntd->necd", "t", T),
        product("up", ["take"], INNER, "necd,*edh->nech", "d", D, weights),
        operator("act", "elementwise", ["up"], INNER),
        product("down", ["act"], GIVEN, "nech,*ehd->necd", "h", H, weights),
        product("add_up", ["routes", "down"], TOKENS, "ntec,necd->ntd", "e", E),
        operator("out", "add", ["x", "add_up"], TOKENS),
    ]
    return Graph(name="mixture", batch=N, operators=operators)


def cuts_of(strategy):
    return {name: list(p.partition) for name, p in strategy.operators.items()}


EXPERTS = {"up": ["feature"], "act": ["feature"], "down": ["feature"]}


@pytest.mark.parametrize("build", [builders.hybrid, builders.tensor_parallel])
def test_experts_are_cut_and_all_else_is_data_parallel(build):
    graph = mixture()
    strategy = build(graph, CLUSTER, N)
    validate(strategy, graph, CLUSTER)
    others = {name: ["sample"] for name in ("x", "routes", "take", "add_up", "out")}
    assert cuts_of(strategy) == {**others, **EXPERTS}


def test_with_fewer_samples_than_devices_each_device_picks_its_experts_tokens():
    graph = mixture()
    strategy = builders.hybrid(graph, CLUSTER, 2)
    validate(strategy, graph, CLUSTER)
    found = cuts_of(strategy)
    assert found == {**found, **EXPERTS, "take": ["feature"], "add_up": ["contraction"]}


def test_tokens_travel_to_their_experts_and_back():
    """Each way, each device sends three quarters of the slots of its quarter of the samples."""
    graph = mixture()
    simulator = Simulator(graph, profile_of(graph), CLUSTER)
    found = simulator.simulate(builders.hybrid(graph, CLUSTER, N)).outcome
    each_way = 4 * N * E * C * D * 3 / 4
    assert sum(found.edge_bytes) == 2 * each_way  # out and back


def test_a_search_puts_large_experts_on_devices():
    """An all-reduce of the experts' weights takes 4 times the step that moves their tokens."""
    graph = mixture()
    profile = profile_of(graph, (1e-3, 2e-3))
    found = plan(PlanRequest(graph=graph, profile=profile, cluster=CLUSTER, budget=600))
    cuts = cuts_of(found.strategy)
    assert cuts["up"] == cuts["down"] == ["feature"]
