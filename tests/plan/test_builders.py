"""Linear operators in a row are cut in pairs, with one sum for each."""

from made_graphs import profile_of

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.strategy import OperatorPlan, validate
from harness.plan import builders
from harness.plan.search.space import Space
from harness.plan.simulate.simulator import Simulator


def mlp(n_linears=4, batch=8):
    """in -> l0 -> r0 -> l1 -> r1 -> ... with rectifiers between, 8 features everywhere."""
    shape = {"sample": batch, "feature": 8}
    operators = [Operator(name="in", kind="input", shape=shape)]
    for i in range(n_linears):
        operators.append(
            Operator(
                name=f"l{i}",
                kind="linear",
                inputs=[operators[-1].name],
                shape=shape,
                parameter_bytes=256,
                activation_bytes=256,
                attrs={"in_features": 8, "out_features": 8},
            )
        )
        rectifier = Operator(
            name=f"r{i}", kind="elementwise", inputs=[f"l{i}"], shape=shape, activation_bytes=256
        )
        operators.append(rectifier)
    return Graph(name="mlp", batch=batch, operators=operators)


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
