"""Linear operators in a row are cut in pairs, with one sum for each; experts lie on devices where
their weights are large, and tokens travel to them and back."""

import msgspec
import pytest
from made_graphs import profile_of

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.strategy import OperatorPlan, Strategy, validate
from harness.plan import builders
from harness.plan.search.mcmc import Chain, closest
from harness.plan.search.objective import Objective
from harness.plan.search.space import Space
from harness.plan.simulate.simulator import Simulator, Trial


def mlp(n_linears):
    """in -> l0 -> r0 -> l1 -> r1 -> ... with rectifiers between, 8 features everywhere."""
    same = {"shape": {"sample": 8, "feature": 8}, "activation_bytes": 256}
    attrs = {"in_features": 8, "out_features": 8}
    operators = [Operator(name="in", kind="input", shape=same["shape"])]
    for i in range(n_linears):
        weights = {"inputs": [operators[-1].name], "parameter_bytes": 256, "attrs": attrs}
        operators.append(Operator(name=f"l{i}", kind="linear", **same, **weights))
        operators.append(Operator(name=f"r{i}", kind="elementwise", inputs=[f"l{i}"], **same))
    return Graph(name="mlp", batch=8, operators=operators)


def simulator_of(graph, cluster):
    return Simulator(graph, profile_of(graph), cluster)


CLUSTER = Cluster.uniform(1, 4, inside_bytes_per_s=1e3, memory_bytes=10**9)


def test_tensor_parallel_alternates_features_and_contraction():
    graph = mlp(4)
    strategy = builders.tensor_parallel(graph, CLUSTER, 8)
    validate(strategy, graph, CLUSTER)
    cuts = {name: list(plan.partition) for name, plan in strategy.operators.items()}
    assert [cuts[f"l{i}"] for i in range(4)] == [["feature"], ["contraction"]] * 2
    assert [cuts[f"r{i}"] for i in range(4)] == [["feature"], ["replica"]] * 2


def test_a_pair_needs_no_transfer_inside_and_cuts_all_weights():
    graph = mlp(2)
    simulator = simulator_of(graph, CLUSTER)
    strategy = builders.tensor_parallel(graph, CLUSTER, 8)
    found = simulator.simulate(strategy).outcome
    assert len(found.lowered.edges.source) == 0
    # Only the second operator's sums meet: every device computes r1, and has all its gradient.
    (one,) = found.lowered.edges.sums
    assert (graph.operators[one.operator].name, one.n_rounds) == ("l1", (1, 0))
    # A quarter of both weights, times weights, gradients and momentum.
    assert found.static_bytes.tolist() == [3 * 2 * 64] * 4


def test_hybrid_pairs_linear_layers_too():
    graph = mlp(2)
    cuts = {n: list(p.partition) for n, p in builders.hybrid(graph, CLUSTER, 8).operators.items()}
    assert cuts == {"l0": ["feature"], "r0": ["feature"], "l1": ["contraction"], "r1": ["replica"]}


@pytest.mark.parametrize("build", [builders.tensor_parallel, builders.hybrid])
def test_a_sum_of_the_models_input_is_copied_too(build):
    graph = mlp(2)
    shape = graph.operators[0].shape
    added = Operator(name="add", kind="elementwise", inputs=["in", "r1"], shape=shape)
    graph = Graph(name="residual", batch=8, operators=[*graph.operators, added])
    strategy = build(graph, CLUSTER, 8)
    validate(strategy, graph, CLUSTER)
    assert strategy.operators["add"] == OperatorPlan({"replica": 4}, [0, 1, 2, 3])


def test_operators_that_share_a_weight_cut_it_alike():
    graph = mlp(2)
    tied = [changed(op, tied_to="l0") if op.name == "l1" else op for op in graph.operators]
    plans = builders.tensor_parallel(
        Graph(name="tied", batch=8, operators=tied), CLUSTER, 8
    ).operators
    assert plans["l0"].partition == plans["l1"].partition == {"sample": 4}
    plans = builders.tensor_parallel(graph, CLUSTER, 8).operators
    assert [*plans["l0"].partition, *plans["l1"].partition] == ["feature", "contraction"]


def test_what_is_read_by_samples_is_cut_by_samples_after_sums_too():
    graph = mlp(3)
    shape = graph.operators[4].shape
    norm = Operator(name="n", kind="layer_norm", inputs=["r1"], shape=shape, parameter_bytes=8)
    operators = [*graph.operators[:5], norm]
    graph = Graph(name="norm", batch=8, operators=operators)
    plans = builders.tensor_parallel(graph, CLUSTER, 8).operators
    assert list(plans["l1"].partition) == ["contraction"]
    assert list(plans["r1"].partition) == ["feature"]


def test_the_space_has_contraction_and_copies_alone_and_with_samples():
    graph = mlp(1)
    simulator = simulator_of(graph, CLUSTER)
    space = Space(simulator.costs(8), CLUSTER, simulator.placed)

    def on_four(op):
        return [p.partition for p in space.menus[op] if p.devices == [0, 1, 2, 3]]

    for op, dim in ((1, "contraction"), (2, "replica")):
        assert {dim: 4} in on_four(op)
        assert {"sample": 2, dim: 2} in on_four(op)
    assert not [p for p in space.menus[1] if "replica" in p.partition]


def test_weights_are_held_by_feature_and_contraction():
    graph = mlp(1)
    simulator = simulator_of(graph, CLUSTER)
    both = OperatorPlan({"feature": 2, "contraction": [3, 1]}, [0, 1, 2, 3])
    slices = simulator.costs(8).operator(1, both).slices
    assert slices == ((96, (0,)), (32, (1,)), (96, (2,)), (32, (3,)))
    copied = OperatorPlan({"sample": 2, "contraction": 2}, [0, 1, 2, 3])
    assert simulator.costs(8).operator(1, copied).slices == ((128, (0, 2)), (128, (1, 3)))


N, T, E, C, D, H = 8, 16, 4, 5, 32, 64
TOKENS = {"sample": N, "seq": T, "feature": D}
GIVEN = {"sample": N, "feature": E, "height": C, "width": D}
INNER = {**GIVEN, "width": H}
NODES = Cluster.uniform(4, 1, inside_bytes_per_s=1e9, between_bytes_per_s=1e6, memory_bytes=10**9)


def changed(op, **attrs):
    return msgspec.structs.replace(op, attrs=op.attrs | attrs)


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
    strategy = build(graph, NODES, N)
    validate(strategy, graph, NODES)
    others = {name: ["sample"] for name in ("x", "routes", "take", "sum", "out")}
    assert cuts_of(strategy) == {**others, **EXPERTS}


def test_with_fewer_samples_than_devices_each_device_picks_its_experts_tokens():
    graph = mixture()
    strategy = builders.hybrid(graph, NODES, 2)
    validate(strategy, graph, NODES)
    found = cuts_of(strategy)
    assert found == {**found, **EXPERTS, "take": ["feature"], "sum": ["contraction"]}


def test_tokens_travel_to_their_experts_and_back():
    """Each way, each device sends three quarters of the slots of its quarter of the samples."""
    graph = mixture()
    simulator = Simulator(graph, profile_of(graph), NODES)
    found = simulator.simulate(builders.hybrid(graph, NODES, N)).outcome
    each_way = 4 * N * E * C * D * 3 / 4
    assert sum(found.lowered.work.edge_bytes) == 2 * each_way  # out and back


def test_a_chain_puts_the_experts_of_all_layers_on_devices():
    """Data parallel sums their gradients, which takes 4 times as long as moving their tokens."""
    graph = mixture(2)
    simulator = Simulator(graph, profile_of(graph, (1e-3, 2e-3)), NODES)
    space, objective = Space(simulator.costs(N), NODES, simulator.placed), Objective(simulator)
    by_samples = OperatorPlan({"sample": 4}, [0, 1, 2, 3])
    start = {op: closest(menu, by_samples) for op, menu in space.menus.items()}
    objective.start("chain", budget=600)
    trial = Trial(simulator, Strategy(name="s", batch=N, operators=simulator.by_name(start)))
    best = Chain(trial, space, objective, seed=1, turn=0).run(start)
    hybrid = simulator.simulate(builders.hybrid(graph, NODES, N)).outcome.step_s
    assert objective.best.step_s <= hybrid
    assert all(list(best[graph.index()[f"{n}_1"]].partition) == cut for n, cut in EXPERTS.items())
