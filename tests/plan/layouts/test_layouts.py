"""Layouts priced by classes of devices against the simulator on all devices."""

import dataclasses
import json

import pytest
from made_graphs import changed
from msgspec.structs import replace

from harness.domain.cluster import Cluster, CollectivePoint
from harness.domain.graph import KEPT
from harness.domain.profile import OptimizerTime
from harness.domain.shard_state import SHARD_STATES
from harness.domain.strategy import validate
from harness.errors import PlanError, StrategyError
from harness.plan.builders import check_replicas
from harness.plan.costs import PlanRequest, run
from harness.plan.importing.times import (
    LayerTime,
    PlannedLayer,
    TimeKey,
    chain_graph,
    layer_profile,
)
from harness.plan.layouts.degrees import (
    ParallelLayout,
    layout_strategy,
    parse_layout,
    profiled_layout,
)
from harness.plan.layouts.judging import judged
from harness.plan.layouts.links import NodeLinks
from harness.plan.layouts.planner import LayoutSearch
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator

BATCH = 16
STEP, MEMORY = 0.04, 0.04  # the closed form leaves out waits of 1F1B and halves of buckets


def chain(batch=BATCH):
    """Eight equal layers of 3 ms a sample, less on groups of two and four."""
    layers = [PlannedLayer(f"l{k}", 4_000_000, 100_000, 300_000) for k in range(8)]
    graph = chain_graph("chain", layers, batch, n_parts=4)
    times = {}
    for samples in (1, 2, 4, 8, 16):
        for tp in (1, 2, 4):
            seconds = 1e-3 * samples * (1 / tp + 0.05)
            times[TimeKey("device", samples, tp)] = [LayerTime(seconds, 2 * seconds)] * 8
    return graph, layer_profile(graph, times)


def cluster(memory_bytes=10**9):
    return Cluster.uniform(
        2, 2, inside_bytes_per_s=8e9, between_bytes_per_s=2e9, memory_bytes=memory_bytes
    )


def simulated(graph, profile, where, options=None, only=lambda choice: True, **more):
    """Each choice of a layout, with its simulation on all devices."""
    search = LayoutSearch(graph, profile, where, graph.batch, options, **more)
    simulator = Simulator(graph, profile, where, options=search.options)
    for choice in filter(only, search.choices()):
        yield choice, simulator.simulate(search.strategy(choice))


def request(where):
    graph, profile = chain()
    return PlanRequest(cluster=where, graph=graph, profile=profile)


@pytest.mark.parametrize("state", SHARD_STATES)
def test_steps_and_memory_are_near_those_of_the_simulator_and_so_is_the_choice(state):
    (graph, profile), where = chain(), cluster()
    # A graph that says what autograd keeps has its gradients counted too.
    kept = [op.activation_bytes + op.attrs.get("saved_bytes", 0) for op in graph.operators]
    operators = [
        replace(op, attrs={**op.attrs, KEPT: n_bytes})
        for op, n_bytes in zip(graph.operators, kept, strict=True)
    ]
    graph = replace(graph, operators=operators)
    options = SimulatorOptions(
        n_optimizer_states=2, bucket_bytes=10_000_000, optimizer_s_per_byte=1e-10
    )
    steps = {}
    for choice, found in simulated(
        graph, profile, where, options, limit_bytes=0, shard_state=state
    ):
        assert choice.shard_state == (state if choice.layout.dp > 1 else "none")
        memory_bytes = max(found.memory_bytes.values())
        assert choice.step_s == pytest.approx(found.step_s, rel=STEP), choice.name
        assert choice.memory_bytes == pytest.approx(memory_bytes, rel=MEMORY), choice.name
        steps[choice.name] = (choice.step_s, found.step_s)
    # Without and with recomputation, in segments too, by the powers of two that divide a replica's
    # samples.
    assert len(steps) == 3 * (3 + 4 + 5 + 4 + 5)
    chosen = min(steps.values())
    assert chosen[1] <= 1.02 * min(step_s for _, step_s in steps.values())


@pytest.mark.parametrize(
    ("wire", "state", "n_nodes"),
    [*((1.0, state, n) for state in SHARD_STATES[:4] for n in (1, 4)), (0.5, "parameters", 4)],
)
def test_measured_collectives_are_read_as_by_the_simulator(wire, state, n_nodes):
    graph, profile = chain()
    where = Cluster.uniform(
        n_nodes, 4 // n_nodes, inside_bytes_per_s=8e9, between_bytes_per_s=2e9,
        memory_bytes=10**9,
    )  # fmt: skip
    s_per_byte = {"all_reduce": 2e-10, "reduce_scatter": 3e-10, "all_gather": 5e-11}
    points = [
        CollectivePoint(
            operation=name, transport="nccl", n_ranks=4, n_bytes=n, duration_s=n * each_s
        )
        for name, each_s in s_per_byte.items()
        for n in (10**4, 10**8)
    ]
    where = replace(where, collectives=points)
    options = SimulatorOptions(
        bucket_bytes=10_000_000, optimizer_s_per_byte=1e-10, wire_bytes_per_fp32_byte=wire
    )
    for choice, found in simulated(
        graph, profile, where, options, limit_bytes=0, shard_state=state
    ):
        assert choice.step_s == pytest.approx(found.step_s, rel=STEP), choice.name


def test_state_is_sharded_as_far_as_memory_needs():
    graph, profile = chain()
    options = SimulatorOptions(bucket_bytes=1_000_000)
    found = {}
    # Weights, gradients and one state of 32 MB each on four replicas, two a node; where only the
    # optimizer's state is sharded, sums of 8 MB beside all gradients; layers of 4 MB are buckets
    # and units, of which three and two are in memory; activations of 3.2 MB, all of them while the
    # first bucket fills and the last one of the microbatch before is on its way.
    for limit_mb in (99.3, 83.3, 75.3, 63.3, 47.3, 47.1):
        search = LayoutSearch(graph, profile, cluster(), BATCH, options, limit_bytes=limit_mb * 1e6)
        own = [c for c in search.choices() if c.layout.dp == 4 and c.n_microbatches == 4]
        fitting = [c for c in own if c.memory_bytes <= limit_mb * 1e6 and not c.segments]
        found[limit_mb] = [c.shard_state for c in fitting]
    assert list(found.values()) == [
        ["none"],
        ["optimizer", "gradients_in_node"],
        ["gradients", "parameters_in_node"],
        ["gradients"],
        ["parameters"],
        [],
    ]


@pytest.mark.parametrize("state", ["gradients", "parameters"])
def test_buckets_are_in_memory_from_a_small_first_one_to_the_last_with_weights(state):
    graph, profile = chain()
    weightless = replace(graph.operators[0], parameter_bytes=0)
    graph, where = replace(graph, operators=[weightless, *graph.operators[1:]]), cluster()
    search = LayoutSearch(graph, profile, where, BATCH, limit_bytes=0, shard_state=state)
    simulator = Simulator(graph, profile, where)
    for choice in (choice for choice in search.choices() if not choice.segments):
        simulated = max(simulator.simulate(search.strategy(choice)).memory_bytes.values())
        assert choice.memory_bytes == pytest.approx(simulated, rel=MEMORY), choice.name


def test_layouts_that_do_not_fit_by_the_simulator_come_last():
    graph, profile = chain()
    where = Cluster.uniform(
        2, 2, inside_bytes_per_s=8e9, between_bytes_per_s=2e9, memory_bytes=10**9, latency_s=0.01
    )
    search = LayoutSearch(graph, profile, where, BATCH)
    ranked = sorted(search.choices(), key=lambda choice: choice.step_s)
    least = min(ranked, key=lambda choice: choice.memory_bytes)
    assert least.step_s > 2 * ranked[0].step_s
    simulator = Simulator(graph, profile, where, memory_bytes=least.memory_bytes)
    first, *others = judged(ranked, simulator, search.strategy, may_shard=False)
    assert first.memory_bytes == least.memory_bytes
    assert others[-1].memory_bytes > least.memory_bytes


def test_a_group_that_can_share_operators_by_samples_alone_is_refused():
    layers = [PlannedLayer(f"l{k}", 4_000_000, 100_000, 300_000) for k in range(2)]
    graph = chain_graph("chain", layers, BATCH, n_parts=2)
    layout_strategy(ParallelLayout(tp=2), graph, cluster(), BATCH)
    with pytest.raises(StrategyError, match="can be cut into 4 parts, but by samples: lower tp"):
        layout_strategy(ParallelLayout(tp=4), graph, cluster(), BATCH)


def test_stages_are_cut_where_little_crosses_if_that_is_faster():
    graph, profile = chain()
    wide = [replace(op, activation_bytes=400 * op.activation_bytes) for op in graph.operators[3:4]]
    graph = replace(graph, operators=[*graph.operators[:3], *wide, *graph.operators[4:]])
    where = Cluster.uniform(2, 1, inside_bytes_per_s=1e9, memory_bytes=10**10)
    steps = {}
    for choice, found in simulated(graph, profile, where, only=lambda one: one.layout.pp == 2):
        if not choice.segments and choice.n_microbatches == 4:
            assert choice.step_s == pytest.approx(found.step_s, rel=STEP)
            steps[choice.layout.cuts] = choice.step_s
    assert list(steps) == [(4,), (5,)]
    assert steps[5,] < 0.8 * steps[4,]


def test_a_slow_link_and_a_tied_weight_are_priced_as_by_the_simulator():
    layers = [PlannedLayer(f"l{k}", 4_000_000, 100_000, 300_000) for k in range(8)]
    layers[-1] = layers[-1]._replace(tied_to="l0")
    graph = chain_graph("tied", layers, BATCH, n_parts=4)
    _, profile = chain()
    where = Cluster.uniform(
        2, 2, inside_bytes_per_s=1e8, between_bytes_per_s=2e7, memory_bytes=10**9, latency_s=1e-3
    )
    pipelines = list(simulated(graph, profile, where, only=lambda one: one.layout.pp == 4))
    assert len(pipelines) > 10
    for choice, found in pipelines:  # one device a stage
        assert choice.step_s == pytest.approx(found.step_s, rel=1e-9), choice.name


def test_an_operator_without_time_leaves_its_producer_the_backward():
    layers = [PlannedLayer(f"l{k}", 4, 1000) for k in range(4)]
    graph = chain_graph("views", layers, BATCH)
    times = [LayerTime(1e-3 * k, 2e-3 * k) for k in (3, 1, 0, 3)]
    profile = layer_profile(graph, {TimeKey("device", BATCH): times})
    where = Cluster.uniform(1, 2, inside_bytes_per_s=8e9, memory_bytes=10**9)
    for choice, found in simulated(graph, profile, where):
        assert choice.step_s == pytest.approx(found.step_s)


def test_buckets_are_summed_in_turn_and_the_last_operator_of_a_stage_does_not_wait():
    (graph, profile), options = chain(), SimulatorOptions(bucket_bytes=10_000_000)
    where = Cluster.uniform(1, 4, inside_bytes_per_s=5e8, memory_bytes=10**9, latency_s=1e-3)
    for choice, found in simulated(graph, profile, where, options):
        layout = choice.layout
        if (layout.tp, layout.pp) in ((1, 1), (2, 2)) and not choice.segments:
            assert choice.step_s == pytest.approx(found.step_s), choice.name


def test_a_stage_waits_for_the_stages_that_it_reads_alone():
    graph, profile = chain()
    # As the tables of a DLRM: l2 to l5 read nothing of l0 and l1, and l6 reads both.
    inputs = {"l2": graph.operators[0].inputs, "l6": ("l1", "l5")}
    operators = [replace(op, inputs=inputs.get(op.name, op.inputs)) for op in graph.operators]
    graph = replace(graph, operators=operators)
    profile = replace(profile, graph_hash="")
    where = Cluster.uniform(4, 1, inside_bytes_per_s=2e8, memory_bytes=10**9, latency_s=1e-3)
    pipelines = list(simulated(graph, profile, where, only=lambda one: one.layout.pp == 4))
    assert len(pipelines) == 10
    for choice, found in pipelines:
        assert choice.step_s == pytest.approx(found.step_s, rel=STEP), choice.name
        memory_bytes = max(found.memory_bytes.values())
        assert choice.memory_bytes == pytest.approx(memory_bytes, rel=0.01), choice.name


@pytest.mark.parametrize(
    "changes",
    [
        {"shape": {"seq": 4}},
        {"shape": {}, "attrs": {"is_cut_by_samples": False}},  # a number, made of parameters
        {"attrs": {"is_cut_by_samples": False}},  # a loss that compares samples
    ],
)
def test_an_operator_that_cannot_be_cut_by_samples_is_on_one_replica(changes):
    graph = changed(GRAPH, ["l0"], kind="other", **changes)
    for text, first, both in (("dp=2", {0}, [0, 1]), ("tp=2,dp=2", {0, 1}, [0, 1, 2, 3])):
        found = layout_strategy(parse_layout(text), graph, EIGHT, 8)
        validate(found, graph, EIGHT)
        assert first.issuperset(found.operators["l0"].devices)
        assert found.operators["l1"].devices == both


@pytest.mark.parametrize("n_frozen", [3, 5, 7])
def test_frozen_segments_do_not_run_again(n_frozen):
    (graph, profile), where = chain(), cluster()
    names = {f"l{k}" for k in range(n_frozen)}
    operators = [
        replace(op, attrs={**op.attrs, "frozen_bytes": op.parameter_bytes * (op.name in names)})
        for op in graph.operators
    ]
    graph = replace(graph, operators=operators)
    points = [
        replace(point, backward_s=0.0) if point.operator in names else point
        for point in profile.measurements
    ]
    profile = replace(profile, measurements=points)
    priced = list(simulated(graph, profile, where, limit_bytes=0, shard_state="none"))
    assert {choice.segments for choice, _ in priced} == {0, 1, 64}
    for choice, found in priced:
        assert choice.step_s == pytest.approx(found.step_s, rel=0.005), choice.name


@pytest.mark.parametrize("n_frozen", [0, 7])
def test_gradients_of_weights_are_there_beside_those_of_earlier_microbatches(n_frozen):
    (graph, profile), where = chain(), cluster()
    frozen = {
        f"l{k}": {"frozen_bytes": graph.operators[-2].parameter_bytes} for k in range(n_frozen)
    }
    kept = [
        replace(op, attrs={**op.attrs, KEPT: op.activation_bytes, **frozen.get(op.name, {})})
        for op in graph.operators
    ]
    graph = replace(graph, operators=kept)
    for choice, found in simulated(graph, profile, where, only=lambda one: one.layout.pp == 4):
        if choice.n_microbatches == 4:
            memory_bytes = max(found.memory_bytes.values())
            assert choice.memory_bytes == pytest.approx(memory_bytes, rel=0.01), choice.name


def test_values_of_16_bits_travel_as_such():
    graph, profile = chain()
    halves = [replace(point, dtype="bfloat16") for point in profile.measurements]
    profile = replace(profile, measurements=halves)
    where = Cluster.uniform(1, 4, inside_bytes_per_s=2e7, memory_bytes=10**9)
    found = run("layouts", PlanRequest(cluster=where, graph=graph, profile=profile))
    options = SimulatorOptions(wire_bytes_per_fp32_byte=0.5)
    search = LayoutSearch(graph, profile, where, BATCH, options)
    simulator = Simulator(graph, profile, where, options=options)
    assert found.predicted_step_s == simulator.step_s(found.strategy)
    best = min(search.choices(), key=lambda choice: choice.step_s)
    assert best.step_s == pytest.approx(simulator.step_s(search.strategy(best)), rel=1e-9)


@pytest.mark.parametrize(
    ("batch", "inside", "between"), [(16, 8e9, 2e8), (24, 8e9, 2e8), (16, 2e7, 2e7), (16, 8e9, 2e7)]
)
def test_no_priced_layout_under_any_schedule_is_faster_by_the_simulator(batch, inside, between):
    graph, profile = chain(batch)
    where = Cluster.uniform(
        2, 2, inside_bytes_per_s=inside, between_bytes_per_s=between, memory_bytes=10**9
    )
    search, simulator = LayoutSearch(graph, profile, where, batch), Simulator(graph, profile, where)
    choices = list(search.choices())
    assert 2 in {choice.n_microbatches for choice in choices if choice.layout.dp == 1}
    found = run("layouts", PlanRequest(cluster=where, graph=graph, profile=profile))
    assert found.predicted_step_s == simulator.step_s(found.strategy)
    steps = [
        simulator.step_s(replace(search.strategy(choice), schedule=schedule))
        for choice in choices
        for schedule in (["1f1b"] if choice.layout.pp == 1 else ["1f1b", "gpipe", "zero_bubble"])
    ]
    assert found.predicted_step_s <= min(steps)


def test_layouts_have_the_time_of_the_optimizer():
    graph, profile = chain()
    times = [OptimizerTime(device_kind=profile.device_kinds[0], optimizer="adamw", s_per_byte=1e-6)]
    asked = PlanRequest(cluster=cluster(), graph=graph, profile=profile)
    timed = dataclasses.replace(asked, profile=replace(profile, optimizers=times))
    found = run("layouts", timed)
    assert found.optimizer == "adamw"
    single_s, weights = BATCH * 8 * 3 * 1.05e-3, 8 * 4_000_000
    expected = (single_s + weights * 1e-6) / found.predicted_step_s
    assert found.speedup_over_single == pytest.approx(expected)
    assert found.predicted_step_s > run("layouts", asked).predicted_step_s


def test_memory_decides_where_it_binds():
    asked = request(cluster())
    free = run("layouts", asked)
    validate(free.strategy, asked.graph, asked.cluster)
    single_s = BATCH * 8 * 3 * 1.05e-3
    assert free.speedup_over_single == pytest.approx(single_s / free.predicted_step_s)
    needed = max(free.memory_bytes.values())
    less = run("layouts", dataclasses.replace(asked, memory_bytes=needed - 1))
    assert max(less.memory_bytes.values()) < needed
    assert less.predicted_step_s >= free.predicted_step_s
    assert "data parallel does not fit into memory: it needs" in less.explanation[1]
    assert len(free.explanation) == 1
    with pytest.raises(PlanError, match="no layout of 'chain' fits"):
        run("layouts", request(cluster(memory_bytes=10**6)))


def test_2048_devices_are_planned_by_a_few_classes(tmp_path, printed):
    graph, profile = chain(batch=2048)
    (tmp_path / "chain.json").write_bytes(profile.to_json())
    (tmp_path / "chain.graph.json").write_bytes(graph.to_json())
    flags = "search --topology 512x4 --bandwidth 8e9,2e9 --memory 1GB --cost layouts --json"
    result = json.loads(printed(flags, "--profile", tmp_path / "chain.json").out)
    devices = {d for plan in result["strategy"]["operators"].values() for d in plan["devices"]}
    assert devices == set(range(2048))


@pytest.fixture
def files(tmp_path):
    """Flags of a model's and a cluster's files."""
    graph, profile = chain()
    (tmp_path / "profile.json").write_bytes(profile.to_json())
    (tmp_path / "profile.graph.json").write_bytes(graph.to_json())
    (tmp_path / "cluster.json").write_bytes(cluster().to_json())
    return ("--profile", tmp_path / "profile.json", "--cluster", tmp_path / "cluster.json")


def test_a_layout_gets_the_fastest_usual_number_of_microbatches(files, printed):
    said = [
        json.loads(printed("predict --layout pp=4 --json", *files, flags).out)
        for flags in ("", "--microbatches 4", "--microbatches 8", "--microbatches 16")
    ]
    assert said[0] == min(said[1:], key=lambda one: one["step_s"])
    n = said[0]["strategy"]["n_microbatches"]
    assert f" samples in {n} microbatches, " in printed("predict --layout pp=4", *files).out


def test_a_strategy_file_is_predicted_as_the_layout_that_wrote_it(
    files, printed, refused, tmp_path
):
    plan = tmp_path / "plan.json"
    own = json.loads(printed("predict --layout dp=2,pp=2 --json --output", plan, *files).out)
    assert json.loads(printed("predict --json --strategy", plan, *files).out) == own
    wide = json.loads(plan.read_text()) | {"made_for": {}}
    wide["operators"]["l0"]["devices"] = [0, 9]
    (tmp_path / "wide.json").write_text(json.dumps(wide))
    assert f"{tmp_path / 'wide.json'}: " in refused(
        "predict --strategy", tmp_path / "wide.json", *files
    )
    for flags, message in (
        ("--batch-size 8", f"--batch-size 8: {plan} has a batch of 16: leave the flag out"),
        ("--microbatches 2", "--microbatches goes with --layout"),
        ("--layout pp=2", "not allowed with argument"),
    ):
        assert message in refused("predict --strategy", plan, *files, flags)
    assert "--layout --strategy is required" in refused("predict", *files)


def test_unlike_nodes_are_refused():
    other = Cluster.uniform(1, 1, inside_bytes_per_s=1.0, memory_bytes=1).nodes[0]
    renamed = Cluster(nodes=[cluster().nodes[1], other], links=[])
    with pytest.raises(PlanError, match=r"equal nodes .* differ in devices in a node \(1 and "):
        run("layouts", request(renamed))
    unlinked = Cluster(nodes=cluster().nodes, links=[])
    with pytest.raises(PlanError, match="lacks links of its first node"):
        run("layouts", request(unlinked))


def test_equal_nodes_may_differ_by_the_errors_of_measurements():
    nodes = list(cluster().nodes)
    for k, node in enumerate(nodes):
        devices = [replace(device, host_s_per_byte=1e-9 * k) for device in node.devices]
        nodes[k] = replace(node, devices=devices, nic_bytes_per_s=1e9 * (1 + k / 100))
    measured = Cluster(nodes=nodes, links=cluster().links)
    assert NodeLinks.from_cluster(measured).nic == 1e9
    nodes[1] = replace(nodes[1], nic_bytes_per_s=2e9)
    with pytest.raises(PlanError, match="nic_bytes_per_s"):
        NodeLinks.from_cluster(Cluster(nodes=nodes, links=cluster().links))


GRAPH = chain_graph("chain", [PlannedLayer(f"l{k}", 8, 8) for k in range(4)], 8, 4)
EIGHT = Cluster.uniform(2, 4, inside_bytes_per_s=1.0, memory_bytes=1)


def test_neighbours_share_a_layer_and_stages_are_farthest_apart():
    found = layout_strategy(
        parse_layout("tp=2,dp=2,pp=2,cuts=2"), GRAPH, EIGHT, 8, n_microbatches=2
    )
    validate(found, GRAPH, EIGHT)
    assert [plan.devices for plan in found.operators.values()] == 2 * [[0, 1, 2, 3]] + 2 * [
        [4, 5, 6, 7]
    ]
    assert {str(plan.partition) for plan in found.operators.values()} == {
        "{'sample': 2, 'heads': 2}"
    }


def test_each_replica_computes_what_no_sample_affects():
    attrs = {"reads_samples": False}
    graph = changed(GRAPH, ["l0", "l2"], kind="other", shape={"seq": 4}, attrs=attrs)
    layout = parse_layout("tp=2,dp=2,pp=2,cuts=2").with_replicas_together()
    found = layout_strategy(layout, graph, EIGHT, 8, n_microbatches=2)
    validate(found, graph, EIGHT)
    check_replicas(found, graph)
    assert {n: (plan.partition, plan.devices) for n, plan in found.operators.items()} == {
        "l0": ({"sample": 2}, [0, 4]),
        "l1": ({"sample": 2, "heads": 2}, [0, 1, 4, 5]),
        "l2": ({"sample": 2}, [2, 6]),
        "l3": ({"sample": 2, "heads": 2}, [2, 3, 6, 7]),
    }
    unknown = changed(graph, ["l0"], attrs={})
    alone = layout_strategy(layout, unknown, EIGHT, 8, n_microbatches=2)
    with pytest.raises(StrategyError, match=r"operator 'l0' \(other\) is computed by one of"):
        check_replicas(alone, unknown)
    named = parse_layout("dp=2,devices=3-1")
    assert named.with_replicas_together() == named


def test_layout_names_cuts_shares_and_devices():
    layout = parse_layout("dp=2,pp=2,cuts=1,shares=3-1,devices=0-4-1-5")
    found = layout_strategy(layout, GRAPH, EIGHT, 8)
    validate(found, GRAPH, EIGHT)
    assert [plan.stage for plan in found.operators.values()] == [0, 1, 1, 1]
    assert found.operators["l0"].partition == {"sample": [3, 1]}
    assert found.operators["l1"].devices == [1, 5]


@pytest.mark.parametrize("memory_bytes", [1, 10**12])
def test_layout_is_cut_where_little_crosses_whether_it_fits_or_not(memory_bytes):
    graph, profile = chain()
    wide = [replace(op, activation_bytes=40 * op.activation_bytes) for op in graph.operators[3:5]]
    graph = replace(graph, operators=[*graph.operators[:3], *wide, *graph.operators[5:]])
    where = Cluster.uniform(
        2, 2, inside_bytes_per_s=1e10, between_bytes_per_s=2e9, memory_bytes=memory_bytes
    )
    simulator = Simulator(graph, profile, where)
    found = profiled_layout(parse_layout("dp=2,pp=2"), simulator, BATCH, n_microbatches=2)
    assert [plan.stage for plan in found.operators.values()].index(1) in (3, 6)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp", "write it like"),
        ("tp=0", "no degree"),
        ("tp=2,tp=2", "write it like"),
        ("ep=2", "use tp, dp, pp"),
        ("cuts=a", "no list"),
        ("cuts=", "no list"),
    ],
)
def test_bad_text_is_refused(text, message):
    with pytest.raises(StrategyError, match=message):
        parse_layout(text)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (ParallelLayout(dp=16), "needs 16 devices, the cluster has 8"),
        (ParallelLayout(dp=8), "need a sample each, the batch has"),
        (ParallelLayout(dp=2, devices=(0, 99)), "has device 99, the cluster has"),
        (ParallelLayout(pp=2, cuts=(4,)), "cannot be cut at 4"),
        (ParallelLayout(pp=2, cuts=(1, 2)), "cannot be cut at 1-2"),
        (ParallelLayout(dp=2, shares=(1,)), "2 replicas and 1 shares"),
        (ParallelLayout(dp=2, devices=(1, 1)), "needs 2 distinct devices, devices names 1-1"),
        (ParallelLayout(dp=2, devices=(0, 1, 1)), "needs 2 distinct devices, devices names 0-1-1"),
    ],
)
def test_degrees_that_do_not_fit_are_refused(layout, message):
    with pytest.raises(StrategyError, match=message):
        layout_strategy(layout, GRAPH, EIGHT, 4, n_microbatches=1)
