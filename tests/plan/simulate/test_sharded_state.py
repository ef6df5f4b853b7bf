"""Sharded state: what each device keeps, and the collectives that this takes."""

import itertools
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from made_graphs import changed
from simulated import (
    BY_SAMPLES,
    ONE,
    ZERO,
    cluster_of,
    row,
    simulate,
    simulate_chain,
    timeline,
)  # fmt: skip

from harness.domain.cluster import Cluster
from harness.domain.profile import OptimizerTime
from harness.domain.shard_state import SHARD_STATES
from harness.domain.strategy import OperatorPlan, Stage
from harness.plan.again import SearchAgain, search_again
from harness.plan.costs import PlanRequest, run
from harness.plan.importing.times import (
    LayerTime,
    PlannedLayer,
    TimeKey,
    chain_graph,
    layer_profile,
)
from harness.plan.portfolio import search_portfolio
from harness.plan.simulate.network import Network
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import binding, events, explain, sent_bytes, spans
from harness.plan.simulate.sharded_state import gather_seconds

# Two nodes of two devices, and samples on all of them.
TWO_NODES = Cluster.uniform(
    2, 2, inside_bytes_per_s=16.0, between_bytes_per_s=4.0, memory_bytes=10**6
)
FOUR = OperatorPlan({"sample": 4}, [0, 1, 2, 3])


@pytest.mark.parametrize(
    ("state", "complete_s", "optimizer_s", "static_bytes", "peak_bytes", "sent"),
    [
        # All-reduces of 2.5 s and 5 s end at 11 s.
        ("none", 11.0, 12.0, 120 + 120 + 120, 16 + 8, 120),
        # New weights of a arrive at 2.5 s, those of b at 3.75 s; each device updates half of all
        # rows. Reduce-scatters of 1.25 s (6.75 s to 8 s) and 2.5 s; while the bucket of 80 B is
        # filled, that of 40 B is sent and received, and b's activations are freed.
        ("gradients", 10.5, 6.0, 120 + 60 + 60, 16 + 80 + 2 * 40, 60 + 60),
        # The same, because the one microbatch is the last.
        ("optimizer", 10.5, 6.0, 120 + 60 + 60, 16 + 80 + 2 * 40, 60 + 60),
        # a is gathered until 2.5 s, b until 3.75 s, and a again beside the backward of b; gradients
        # of b are summed until 8 s, those of a until 10.5 s. Both units are in memory at once.
        ("parameters", 10.5, 6.0, 60 + 120 + 60 + 60, 16 + 80 + 2 * 40, 60 + 40 + 60),
    ],
)
def test_each_device_keeps_half_of_the_sharded_state(
    state, complete_s, optimizer_s, static_bytes, peak_bytes, sent
):
    options = SimulatorOptions(bucket_bytes=1, optimizer_s_per_byte=0.1)
    cluster = Cluster.uniform(2, 1, inside_bytes_per_s=16.0, memory_bytes=10**6)
    found = simulate_chain(BY_SAMPLES, BY_SAMPLES, cluster, options=options, shard_state=state)
    out = found.outcome
    assert out.device_end_s.tolist() == [complete_s] * 2
    assert out.optimizer_s.tolist() == [optimizer_s] * 2
    assert out.gather_s.tolist() == [0.0] * 2
    assert out.static_bytes.tolist() == [static_bytes] * 2
    assert out.memory_bytes.tolist() == [static_bytes + peak_bytes] * 2
    assert found.step_s == complete_s + optimizer_s
    assert sent_bytes(found) == [sent] * 2


@pytest.mark.parametrize(
    ("state", "complete_s", "optimizer_s", "static_bytes", "sent"),
    [
        # A ring of four, in which a node sends 1.5 times 120 B at 4 B/s.
        ("none", 46.75, 12.0, 120 + 120 + 120, 180),
        # Each updates half of all rows and gets the other half from its node, at 16 B/s: until 2.5
        # s that of a, until 3.75 s that of b. From 5.25 s on, 40 B of gradients: 1.25 s within
        # nodes, and two rings of 20 B between them, 10 s; then 80 B.
        ("gradients_in_node", 39.0, 6.0, 120 + 60 + 60, 120),
        # The same from 6.25 s on, when a has been gathered again.
        ("parameters_in_node", 40.0, 6.0, 60 + 120 + 60 + 60, 120),
    ],
)
def test_each_node_keeps_the_whole_state_that_is_sharded_within_nodes(
    state, complete_s, optimizer_s, static_bytes, sent
):
    options = SimulatorOptions(bucket_bytes=1, optimizer_s_per_byte=0.1)
    found = simulate_chain(FOUR, FOUR, TWO_NODES, options=options, shard_state=state)
    out = found.outcome
    assert out.device_end_s.tolist() == [complete_s] * 4
    assert out.optimizer_s.tolist() == [optimizer_s] * 4
    assert out.gather_s.tolist() == [0.0] * 4
    assert out.static_bytes.tolist() == [static_bytes] * 4
    assert sent_bytes(found) == [sent] * 4


def test_where_the_optimizer_is_sharded_gradients_are_summed_to_owners_once_a_step():
    options = SimulatorOptions(bucket_bytes=1)
    cluster = Cluster.uniform(2, 1, inside_bytes_per_s=16.0, memory_bytes=10**6)
    found = simulate_chain(
        BY_SAMPLES, BY_SAMPLES, cluster, n_microbatches=2, options=options, shard_state="optimizer"
    )
    sums = [one for one in timeline(found) if one[0].startswith("reduce")]
    # 40 B in 1.25 s after the last backward of b at 7.5 s, then 80 B.
    assert sums == [("reduce-scatter b", 7.5, 8.75), ("reduce-scatter a", 8.75, 11.25)]
    assert sent_bytes(found) == [60 + 60] * 2
    # Whole gradients, and the sums of the own halves.
    assert found.outcome.static_bytes.tolist() == [120 + 120 + 60 + 60] * 2


def test_only_the_last_microbatch_sums_gradients_between_nodes():
    sent = {
        state: sent_bytes(
            simulate_chain(FOUR, FOUR, TWO_NODES, n_microbatches=2, shard_state=state)
        )
        for state in ("gradients", "gradients_in_node")
    }
    # Twice half of the gradients, and new weights once to each node; or one sum.
    assert sent == {"gradients": [2 * 60 + 60] * 4, "gradients_in_node": [120] * 4}


def test_averaged_replicas_are_sharded_within_nodes_and_send_a_part_between_them():
    options = SimulatorOptions(bucket_bytes=1)
    summed, averaged = (
        simulate_chain(FOUR, FOUR, TWO_NODES, options=how, shard_state="parameters_in_node")
        for how in (options, options.averaging(4))
    )
    assert sent_bytes(summed) == [120] * 4
    assert sent_bytes(averaged) == [120 / 4] * 4
    # After the optimizer, all 120 B are gathered at 16 B/s where they are not before each use.
    kept = simulate_chain(
        FOUR, FOUR, TWO_NODES, options=options.averaging(4), shard_state="optimizer_in_node"
    )
    assert kept.outcome.gather_s.tolist() == [60 / 16] * 4
    assert binding(kept)["all-gather of weights"] == 60 / 16
    assert kept.step_s == kept.outcome.device_end_s.max() + 60 / 16
    assert [own[-2].duration_s for own in spans(kept).values()] == [60 / 16] * 4
    # The average is one more state: half of 120 B on each device. A step sums a fourth, from two
    # copies.
    static = summed.outcome.static_bytes + 60 + 2 * 60 / 4
    assert averaged.outcome.static_bytes.tolist() == static.tolist()
    # Buckets of 40 B and 80 B take 1.25 s and 2.5 s within nodes, after a has been gathered again.
    # Averages of a fourth of them, 2.5 s and 5 s, begin after the first forward.
    sums = [one for one in timeline(averaged) if one[0].startswith(("reduce", "average"))]
    assert sums == [
        ("average b", 2.75, 5.25),
        ("average a", 5.25, 10.25),
        ("reduce-scatter b", 6.25, 7.5),
        ("reduce-scatter a", 7.5, 10.0),
    ]
    same = simulate_chain(
        FOUR, FOUR, TWO_NODES, options=options.averaging(4), shard_state="parameters"
    )
    assert same.outcome.device_end_s.tolist() == averaged.outcome.device_end_s.tolist()


@pytest.mark.parametrize(("last", "units"), [(10, [*"abcdef", *"edcba"]), (1000, None)])
def test_a_unit_has_the_weights_of_whole_segments_unless_these_are_most_of_them(last, units):
    """Six operators in two segments, cut by units that are smaller. The first segment has half of
    the weights, or less than an eighth."""
    graph, profile = row({**dict.fromkeys("abcde", 10), "f": last})
    plans = dict.fromkeys("abcdef", BY_SAMPLES)

    def gathered(stage):
        found = simulate(
            graph, profile, cluster_of(), plans, stages=[stage],
            options=SimulatorOptions(bucket_bytes=1), shard_state="parameters",
        )  # fmt: skip
        names = [event.span.label for event in events(found) if event.ranks == (0, 1)]
        return [name.removeprefix("all-gather ") for name in names if "gather" in name]

    assert gathered(Stage()) == [*"abcdef", *"edcba"]
    found = gathered(Stage(recompute=True, segments=2))
    assert found == (units or ["a to c", "d to f", "a to c"])


def test_parameters_are_gathered_one_unit_ahead_and_kept_for_their_backward():
    options = SimulatorOptions(bucket_bytes=1)
    found = simulate_chain(BY_SAMPLES, BY_SAMPLES, options=options, shard_state="parameters")
    assert [
        (event.span.label, event.span.start_s, event.end_s)
        for event in events(found)
        if event.ranks == (0, 1) and "gather" in event.span.label
    ] == [("all-gather a", 0.0, 2.5), ("all-gather b", 2.5, 3.75), ("all-gather a", 3.75, 6.25)]
    assert "per step 200 B of parameters are gathered before use" in explain(found)


def test_weights_that_autocast_rounds_are_gathered_in_its_dtype():
    def gathers(shard_state, wire):
        options = SimulatorOptions(bucket_bytes=1, wire_bytes_per_fp32_byte=wire)
        found = simulate_chain(BY_SAMPLES, BY_SAMPLES, options=options, shard_state=shard_state)
        spans = (event.span for event in events(found) if event.ranks == (0, 1))
        return [(span.n_bytes, span.duration_s) for span in spans if "gather" in span.label]

    whole = gathers("parameters", 1.0)
    assert gathers("parameters", 0.5) == [(n / 2, each_s / 2) for n, each_s in whole]
    assert gathers("optimizer", 0.5) == gathers("optimizer", 1.0)


def test_gathers_of_groups_that_share_an_interface_take_longer():
    network = Network(Cluster.uniform(2, 2, inside_bytes_per_s=1e3, memory_bytes=1))
    one = gather_seconds(network, {(0, 2): 1000}, np.zeros(4))
    both = gather_seconds(network, {(0, 2): 1000, (1, 3): 1000}, np.zeros(4))
    assert one.tolist() == [0.5, 0.0, 0.5, 0.0]
    assert both.tolist() == [1.0] * 4


def test_freed_weights_are_gathered_once_for_forward_again_and_backward():
    steps = [
        simulate_chain(
            BY_SAMPLES, BY_SAMPLES, stages=[Stage(recompute=True)], shard_state="parameters",
            options=SimulatorOptions(bucket_bytes=1, recomputes_ahead=ahead),
        ).step_s
        for ahead in (True, False)
    ]  # fmt: skip
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("bucket_bytes", "kept_bytes"),
    [
        # One unit: outputs and saved values of all layers, and the bucket of their gradients.
        (10**6, 3 * (16 + 80) + 240),
        # Three: the second's output and saved values, its input, and the buckets of two.
        (1, (16 + 80) + 16 + 80 + 2 * 80),
    ],
)
def test_each_unit_of_a_stage_that_recomputes_runs_again_by_itself(bucket_bytes, kept_bytes):
    graph = chain_graph("layers", [PlannedLayer(f"l{k}", 80, 4, 20) for k in range(3)], 8)
    profile = layer_profile(graph, {TimeKey("device", 4): [LayerTime(1.0, 2.0)] * 3})
    plans = {f"l{k}": BY_SAMPLES for k in range(3)}
    out = simulate(
        graph, profile, cluster_of(), plans, stages=[Stage(recompute=True)],
        options=SimulatorOptions(bucket_bytes=bucket_bytes), shard_state="parameters",
    ).outcome  # fmt: skip
    assert (out.memory_bytes - out.static_bytes).tolist() == [kept_bytes] * 2


def test_gradients_are_summed_after_each_microbatch_where_they_are_sharded():
    counts = []
    for state in ("optimizer", "gradients"):
        found = simulate_chain(
            BY_SAMPLES, BY_SAMPLES, n_microbatches=2, options=SimulatorOptions(bucket_bytes=1),
            shard_state=state,
        )  # fmt: skip
        counts.append(sum("reduce" in event.span.label for event in events(found)))
    assert counts == [2, 4]


def test_no_weights_travel_where_none_are_shared():
    one, other = (simulate_chain(ZERO, ONE, shard_state=state) for state in ("parameters", "none"))
    assert one.step_s == other.step_s
    assert one.memory_bytes == other.memory_bytes


@pytest.mark.parametrize(
    ("memory", "state"), [(13e6, "none"), (9e6, "optimizer"), (7.5e6, "parameters")]
)
def test_data_parallelism_shards_what_memory_needs(memory, state):
    graph, profile = row({f"fc{k}": 10**6 // 4 for k in range(16)})
    # 12 MB of weights, gradients and state: half of each sharded part, 3 buckets and 2 units more.
    cluster = cluster_of(bandwidth=1e9, memory=round(memory))
    request = PlanRequest(cluster=cluster, graph=graph, profile=profile, budget=50)
    options = SimulatorOptions(bucket_bytes=100_000)
    found = search_portfolio(request, options=options)
    fitting = {name for name in found.objective.best_of if name.startswith("ddp")}
    fitting = {name for name in fitting if "recomputed" not in name}
    names = ["ddp", *(f"ddp, sharded {each}" for each in SHARD_STATES[1:4])]
    wanted = names[:1] if state == "none" else names[SHARD_STATES.index(state) :]
    assert fitting == set(wanted)
    asked = search_portfolio(replace(request, shard_state="parameters"), options=options)
    assert asked.result().strategy.shard_state == "parameters"


def test_a_search_shards_within_nodes_where_links_between_them_are_slow():
    graph, profile = row({f"fc{k}": 10**6 // 4 for k in range(16)})
    cluster = Cluster.uniform(
        2, 2, inside_bytes_per_s=1e9, between_bytes_per_s=1e5, memory_bytes=7_500_000
    )
    request = PlanRequest(cluster=cluster, graph=graph, profile=profile, budget=50)
    found = search_portfolio(request, options=SimulatorOptions(bucket_bytes=100_000))
    step_s = {
        name.removeprefix("ddp, sharded "): one.step_s
        for name, one in found.objective.best_of.items()
        if name.startswith("ddp, sharded ") and "recomputed" not in name
    }
    assert step_s.keys() == {"optimizer", "gradients", "parameters", "parameters_in_node"}
    # Gradients and new weights cross once a step, the latter beside the forward of 15 layers, or
    # parameters in both passes and gradients.
    hidden_s = 15 * 1.0 / 4
    assert step_s["parameters_in_node"] - hidden_s == pytest.approx(step_s["gradients"], rel=1e-3)
    assert step_s["parameters_in_node"] < 0.8 * step_s["parameters"]


def wide_layers(optimizer_s_per_byte, bandwidth=16.0):
    """Two layers of 1 s and 2 s for half of the batch, with 16 B of weights each. As outputs
    take minutes to travel, data parallelism is fastest."""
    graph = chain_graph("wide", [PlannedLayer(f"l{k}", 16, 1000, 0) for k in range(2)], 8)
    times = {TimeKey("device", n): [LayerTime(n / 4, n / 2)] * 2 for n in (1, 2, 4, 8)}
    timed = OptimizerTime(device_kind="device", optimizer="sgd", s_per_byte=optimizer_s_per_byte)
    profile = msgspec.structs.replace(layer_profile(graph, times), optimizers=[timed])
    cluster = Cluster.uniform(2, 1, inside_bytes_per_s=bandwidth, memory_bytes=10**6)
    return PlanRequest(cluster=cluster, graph=graph, profile=profile, budget=100)


COSTS = pytest.mark.parametrize("cost", ["simulator", "layouts"])


@COSTS
@pytest.mark.parametrize(
    ("optimizer_s_per_byte", "bandwidth", "state"),
    [
        # Each updates half of the weights, 1.6 s instead of 3.2 s.
        (0.1, 16.0, "optimizer"),
        # 32 B go both ways in 2 s: after the backward, or half of them before the forward.
        (0.0, 16.0, "none"),
        # 0.16 s of 8.32 s are too little.
        (0.01, 16.0, "none"),
        (0.0, 1e6, "none"),
    ],
)
def test_a_search_shards_the_optimizer_where_that_is_faster(
    optimizer_s_per_byte, bandwidth, state, cost
):
    request = wide_layers(optimizer_s_per_byte, bandwidth)
    found = run(cost, request)
    assert found.strategy.shard_state == state
    assert run(cost, request).strategy == found.strategy
    whole = run(cost, replace(request, shard_state="none"))
    assert whole.strategy.shard_state == "none"
    if state == "none":
        assert found.predicted_step_s == whole.predicted_step_s
    else:
        assert whole.predicted_step_s - found.predicted_step_s == pytest.approx(1.6)


@COSTS
def test_a_search_leaves_the_optimizer_whole_where_a_gradient_may_have_a_hook(cost):
    request = wide_layers(0.1)
    graph = changed(request.graph, ["l1"], kind="other", attrs={"is_repeatable": False})
    assert run(cost, replace(request, graph=graph)).strategy.shard_state == "none"


def test_averaged_replicas_do_not_shard_the_optimizer_for_speed():
    request, options = wide_layers(0.1), SimulatorOptions(optimizer_s_per_byte=0.1)
    for how, state in ((options, "optimizer"), (options.averaging(4), "none")):
        assert search_portfolio(request, options=how).best.strategy.shard_state == state


def test_a_search_beside_training_shards_what_the_strategy_of_now_shards():
    request = wide_layers(0.1)
    again = SearchAgain(
        graph=request.graph, cluster=request.cluster, profile=request.profile, batch=8, budget=100,
        options=SimulatorOptions(optimizer_s_per_byte=0.1),
    )  # fmt: skip
    sharded = run("simulator", request).strategy
    starts = {"none": None, "optimizer": sharded}
    for state, start in starts.items():
        found = search_again(msgspec.structs.replace(again, start=start))
        assert found.strategy.shard_state == state


def test_the_fastest_plan_is_compared_with_sharded_state_even_out_of_time():
    request = replace(wide_layers(0.1), seconds=12)  # looks at the clock: after ddp
    found = search_portfolio(request, clock=itertools.count().__next__)
    assert found.best.method == "ddp, sharded optimizer"
    assert found.objective.n_proposals < 10
