"""Experts lie on devices where their weights are large, and tokens travel to them and back."""

import pytest
from made_graphs import profile_of

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.strategy import OperatorPlan, validate
from harness.plan import builders
from harness.plan.search.mcmc import Chain, closest
from harness.plan.search.objective import Objective
from harness.plan.search.space import Space
from harness.plan.simulate.simulator import Simulator, Trial

N, T, E, C, D, H = 8, 16, 4, 5, 32, 64
TOKENS = {"sample": N, "seq": T, "feature": D}
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


def mixture(n_layers=1):
    weights = 4 * E * D * H
    routes = {"sample": N, "feature": T, "height": E, "width": C}
    operators = [Operator(name="in", kind="input", shape=TOKENS)]
    for k in range(n_layers):
        before = operators[-1].name
        tag = f"_{k}" if k else ""
        operators += [
            operator(f"x{tag}", "layer_norm", [before], TOKENS, 4 * D, n_normalized=1),
            operator(f"routes{tag}", "router", [f"x{tag}"], routes, 4 * D * E),
            product(f"take{tag}", [f"routes{tag}", f"x{tag}"], GIVEN, "ntec,ntd->necd", "t", T),
            product(f"up{tag}", [f"take{tag}"], INNER, "necd,*edh->nech", "d", D, weights),
            operator(f"act{tag}", "elementwise", [f"up{tag}"], INNER),
            product(f"down{tag}", [f"act{tag}"], GIVEN, "nech,*ehd->necd", "h", H, weights),
            product(f"sum{tag}", [f"routes{tag}", f"down{tag}"], TOKENS, "ntec,necd->ntd", "e", E),
            operator(f"out{tag}", "add", [f"x{tag}", f"sum{tag}"], TOKENS),
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
    others = {name: ["sample"] for name in ("x", "routes", "take", "sum", "out")}
    assert cuts_of(strategy) == {**others, **EXPERTS}


def test_with_fewer_samples_than_devices_each_device_picks_its_experts_tokens():
    graph = mixture()
    strategy = builders.hybrid(graph, CLUSTER, 2)
    validate(strategy, graph, CLUSTER)
    found = cuts_of(strategy)
    assert found == {**found, **EXPERTS, "take": ["feature"], "sum": ["contraction"]}


def test_tokens_travel_to_their_experts_and_back():
    """Each way, each device sends three quarters of the slots of its quarter of the samples."""
    graph = mixture()
    simulator = Simulator(graph, profile_of(graph), CLUSTER)
    found = simulator.simulate(builders.hybrid(graph, CLUSTER, N)).outcome
    each_way = 4 * N * E * C * D * 3 / 4
    assert sum(found.lowered.work.edge_bytes) == 2 * each_way  # out and back


def test_a_chain_puts_the_experts_of_all_layers_on_devices():
    """Data parallel sums their gradients, which takes 4 times as long as moving their tokens."""
    graph = mixture(2)
    simulator = Simulator(graph, profile_of(graph, (1e-3, 2e-3)), CLUSTER)
    space, objective = Space(simulator.costs(N), CLUSTER, simulator.placed), Objective(simulator)
    by_samples = OperatorPlan({"sample": 4}, [0, 1, 2, 3])
    start = {op: closest(menu, by_samples) for op, menu in space.menus.items()}
    objective.start("chain", budget=600)
    trial = Trial(simulator, start, batch=N)
    best = Chain(trial, space, objective, seed=0, turn=0).run(start)
    hybrid = simulator.simulate(builders.hybrid(graph, CLUSTER, N)).outcome.step_s
    assert objective.best.step_s <= hybrid
    assert all(list(best[graph.index()[f"{n}_1"]].partition) == cut for n, cut in EXPERTS.items())
