"""Differences of Megatron-LM and DeepSpeed from the executor."""

import pytest
from simulated import ZERO, simulate, simulate_chain

from harness.domain.cluster import Cluster
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.plan.importing.times import (
    LayerTime,
    PlannedLayer,
    TimeKey,
    chain_graph,
    layer_profile,
)
from harness.plan.simulate.network import Network
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator, Trial

KIND = "device"
FAST = Cluster.uniform(1, 4, inside_bytes_per_s=1e9, memory_bytes=10**6)


def two_layers(**last):
    """Two layers of 1 s forward and 2 s backward, 400 B of weights and 8 B of output a sample."""
    graph = chain_graph("two", [PlannedLayer("a", 400, 8), PlannedLayer("b", 400, 8, **last)], 4, 4)  # type: ignore[arg-type]
    times = {TimeKey(KIND, n, tp): [LayerTime(1.0, 2.0)] * 2 for n in (2, 4) for tp in (1, 2, 4)}
    return graph, layer_profile(graph, times)


def on(devices, dim="sample"):
    stages = {name: k for k, name in enumerate(devices)}
    shared = len({tuple(own) for own in devices.values()}) == 1
    return {
        name: OperatorPlan({dim: len(own)} if own[1:] else {}, own, 0 if shared else stages[name])
        for name, own in devices.items()
    }


@pytest.mark.parametrize(("ahead", "step_s"), [(True, 6.0), (False, 8.0)])
def test_recomputation_ahead_hides_behind_the_wait_for_a_gradient(ahead, step_s):
    graph, profile = two_layers()
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1e12, memory_bytes=10**6)
    found = simulate(
        graph,
        profile,
        cluster,
        on({"a": [0], "b": [1]}),
        batch=4,
        n_microbatches=1,
        stages=[Stage(recompute=True), Stage(recompute=True)],
        options=SimulatorOptions(recomputes_ahead=ahead),
    )
    # Forward 1 + 1, then backward 2 + 2, and 1 + 1 more where each layer runs again before it; else
    # b's values are still there, and a runs again while it waits.
    assert found.step_s == pytest.approx(step_s, rel=1e-6)


def test_memory_counts_what_is_saved_and_what_is_reserved():
    graph, profile = two_layers(saved_bytes=100)
    options = SimulatorOptions(n_optimizer_states=6, reserved_bytes=1000)
    found = simulate(graph, profile, FAST, on({"a": [0], "b": [0]}), batch=4, options=options)
    # Most is held in b's backward: both outputs, what b saved, and its gradient alone.
    weights, activations, gradient = 800 * (1 + 6), 2 * 4 * 8 + 4 * 100, 400
    assert found.memory_bytes["node0:0"] == weights + activations + gradient + 1000


def test_gradients_are_synchronised_after_backward_in_one_piece():
    graph, profile = two_layers()
    options = SimulatorOptions(overlap=False, bucket_bytes=10**9)
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=1600.0, memory_bytes=10**6)
    both = on({"a": [0, 1], "b": [0, 1]})
    found = simulate(graph, profile, cluster, both, batch=4, options=options)
    assert found.step_s == pytest.approx(6.0 + 800 / 1600)


def test_tied_weights_of_two_stages_are_synchronised_once():
    graph, profile = two_layers(tied_to="a")
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=800.0, memory_bytes=10**6)
    plans = on({"a": [0], "b": [1]})
    stages = [Stage(), Stage()]
    tied = simulate(graph, profile, cluster, plans, batch=4, stages=stages)
    free, _ = two_layers()
    alone = simulate(free, profile, cluster, plans, batch=4, stages=stages)
    assert tied.step_s - alone.step_s == pytest.approx(400 / 800)


def test_tied_operators_without_weights_need_no_memory_for_them():
    layers = PlannedLayer("a", 0, 8), PlannedLayer("b", 0, 8, tied_to="a")
    graph = chain_graph("two", layers, 4)
    profile = layer_profile(graph, {TimeKey(KIND, 4): [LayerTime(1.0, 2.0)] * 2})
    found = simulate(graph, profile, FAST, on({"a": [0], "b": [0]}), batch=4)
    assert found.memory_bytes["node0:0"] == 2 * 4 * 8  # what both keep for backward


def test_tied_weights_are_counted_once_on_each_device_and_summed_over_all():
    own = PlannedLayer("a", 400, 8), PlannedLayer("b", 100, 8)
    graph = chain_graph("three", [*own, PlannedLayer("c", 400, 8, tied_to="a")], 4)
    assert graph.parameter_bytes == 500
    profile = layer_profile(graph, {TimeKey(KIND, 4): [LayerTime(1.0, 2.0)] * 3})
    cluster = Cluster.uniform(1, 2, inside_bytes_per_s=800.0, memory_bytes=10**6)
    options = SimulatorOptions(n_optimizer_states=0)

    def found(c, stages):
        plans = {
            name: OperatorPlan({}, [device], stage)
            for name, device, stage in (("a", 0, 0), ("b", 0, 0), ("c", c, stages - 1))
        }
        done = simulate(
            graph, profile, cluster, plans, batch=4, stages=[Stage()] * stages, options=options
        )
        return list(done.memory_bytes.values()), done.step_s

    simulator = Simulator(graph, profile, cluster)
    both = dict.fromkeys("abc", OperatorPlan({"sample": 2}, [0, 1]))
    strategy = Strategy(name="both", batch=4, operators=both, shard_state="optimizer")
    trial = Trial(simulator, strategy)
    assert sorted(trial.slices()) == [(100, (0, 1)), (400, (0, 1))]
    (near, _), near_s = found(0, 1)
    (first, last), far_s = found(1, 2)
    assert near_s == pytest.approx(9.0)
    assert far_s - near_s == pytest.approx((400 + 2 * 32) / 800)  # and what is sent forth and back
    assert near == first == 2 * 500 + 16 * 4  # c's output is freed before b's gradient
    assert last == 2 * 400 + 16 * 4  # with what it receives


def test_hierarchical_ring_moves_each_byte_once_between_two_nodes():
    cluster = Cluster.uniform(
        2, 4, inside_bytes_per_s=1e12, between_bytes_per_s=1e3, memory_bytes=1
    )
    group = tuple(range(8))
    ring = Network(cluster).all_reduce(group, 8000).duration_s
    levels = Network(cluster, "hierarchical").all_reduce(group, 8000).duration_s
    assert ring == pytest.approx(2 * 7 / 8 * 8000 / 1e3)
    assert levels == pytest.approx(2 * 1 / 2 * 8000 / 1e3, rel=1e-6)


def test_a_part_of_an_output_takes_its_share_of_the_time_between_stages():
    steps = [
        simulate_chain(
            ZERO, OperatorPlan({}, [1], 1), stages=[Stage(), Stage()],
            options=SimulatorOptions(activation_share=share),
        ).step_s
        for share in (1.0, 0.5)
    ]  # fmt: skip
    # 32 B at 16 B/s, and their gradient.
    assert steps[0] - steps[1] == 2 * (2.0 - 1.0)
