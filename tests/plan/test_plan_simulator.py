"""Timelines worked out by hand, then properties over random strategies."""

import itertools
import random

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from harness.domain.cluster import Cluster, CollectivePoint, Device, Link, Node
from harness.domain.graph import Graph, Operator
from harness.domain.partition import count_parts
from harness.domain.profile import Measurement, Profile, WholeStep
from harness.domain.sharding import full_shape, may_have_copies
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.errors import ClusterError, PlanError, StrategyError
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import (
    binding,
    contention_seconds,
    critical_path,
    device_seconds,
    events,
    explain,
    memory_over_time,
    spans,
)
from harness.plan.simulate.simulator import Simulator, Trial, operator_seconds

MB = 10**6


def op(name, inputs, features, parameters=0, kind="linear", **attrs):
    """A linear layer of batch 8 with a byte per element, so that bytes can be counted by eye."""
    return Operator(
        name=name,
        kind=kind,
        inputs=inputs,
        shape={"sample": 8, "feature": features},
        parameter_bytes=parameters,
        activation_bytes=8 * features,
        attrs=attrs,
    )


def chain():
    """x -> a (forward 1 s, backward 2 s, 32 B out, 80 B weights) -> b (2 s, 4 s, 16 B, 40 B)."""
    graph = Graph(
        name="chain",
        batch=8,
        operators=[op("x", [], 4, kind="input"), op("a", ["x"], 4, 80), op("b", ["a"], 2, 40)],
    )
    return graph, profile_of(graph, {"a": (1.0, 2.0), "b": (2.0, 4.0)})


def profile_of(graph, seconds, kind="device"):
    shapes = {o.name: o.shape for o in graph.operators}
    return Profile(
        model=graph.name,
        measurements=[
            Measurement(
                device_kind=kind, operator=name, shape=shapes[name], forward_s=f, backward_s=b
            )
            for name, (f, b) in seconds.items()
        ],
    )


def cluster_of(n=2, bandwidth=16.0, latency=0.0, memory=MB, **changes):
    return Cluster.uniform(
        1, n, inside_bytes_per_s=bandwidth, memory_bytes=memory, latency_s=latency, **changes
    )


def talking(cluster, *costs_s, of=("host_s_per_byte", "reduce_s_per_byte")):
    """The cluster, where each byte (or message) takes this much computation from each device."""
    costs = iter(costs_s)

    def changed(device):
        return replace(device, **dict.fromkeys(of, next(costs)))

    nodes = [
        replace(node, devices=[changed(device) for device in node.devices])
        for node in cluster.nodes
    ]
    return replace(cluster, nodes=nodes)


def simulate(graph, profile, cluster, plans, *, options=None, **flow):
    strategy = Strategy(name="s", batch=8, operators=plans, **flow)
    return Simulator(graph, profile, cluster, options=options).simulate(strategy)


def timeline(simulation):
    return [
        (event.name, event.start_s, event.start_s + event.duration_s)
        for event in events(simulation)
    ]


def test_one_device_runs_forward_and_backward_in_order():
    graph, profile = chain()
    found = simulate(
        graph, profile, cluster_of(), {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [0])}
    )
    assert timeline(found) == [("a", 0, 1), ("b", 1, 3), ("b", 3, 7), ("a", 7, 9)]
    # Weights, gradients, one optimizer state, and both outputs at the peak.
    assert found.memory_bytes == {"node0:0": 3 * 120 + 32 + 16, "node0:1": 0}


def test_microbatches_of_unlike_sizes_take_what_their_samples_take():
    graph, profile = chain()
    one = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [0])}
    found = simulate(graph, profile, cluster_of(), one, n_microbatches=3)  # of 3, 3 and 2 samples
    assert found.step_s == pytest.approx(9)
    two = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [1])}
    sent = [
        end - start
        for name, start, end in timeline(
            simulate(graph, profile, cluster_of(), two, n_microbatches=3)
        )
        if name.startswith("a #") and "->" in name
    ]
    assert sent == pytest.approx([2 / 3] * 3)  # 32 B at 16 B/s in all
    assert found.memory_bytes["node0:0"] == 3 * 120 + 3 * 6 * 3  # of the largest microbatch


@pytest.mark.parametrize(("latency_s", "exchange_s"), [(0.5, 0.25), (0.25, 0.5)])
def test_a_message_takes_the_links_latency_or_the_receivers_exchange(latency_s, exchange_s):
    graph, profile = chain()
    cluster = talking(cluster_of(latency=latency_s), exchange_s, exchange_s, of=["exchange_s"])
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [1])}
    found = timeline(simulate(graph, profile, cluster, plans))
    assert found[1] == ("a node0:0 -> node0:1", 1, 3.5)


def test_a_producer_elsewhere_sends_and_gets_gradients_back():
    graph, profile = chain()
    found = simulate(
        graph,
        profile,
        cluster_of(latency=0.5),
        {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [1])},
    )
    # 32 bytes at 16 B/s take 2 s and 0.5 s latency.
    assert timeline(found) == [
        ("a", 0, 1),
        ("a node0:0 -> node0:1", 1, 3.5),
        ("b", 3.5, 5.5),
        ("b", 5.5, 9.5),
        ("gradient of a node0:1 -> node0:0", 9.5, 12),
        ("a", 12, 14),
    ]
    # The consumer holds its own output and the 32 bytes that it received.
    assert found.memory_bytes == {"node0:0": 240 + 32, "node0:1": 120 + 16 + 32}


@pytest.mark.parametrize("plan", [OperatorPlan({}, [1]), OperatorPlan({"sample": 2}, [0, 1])])
def test_an_output_of_unknown_bytes_is_waited_for(plan):
    graph, profile = chain()
    operators = [msgspec.structs.replace(op, activation_bytes=0) for op in graph.operators]
    graph = msgspec.structs.replace(graph, operators=operators)
    plans = {"a": OperatorPlan({}, [0]), "b": plan}
    found = simulate(graph, profile, cluster_of(latency=0.5), plans)
    assert min(event.start_s for event in events(found) if event.ranks == (1,)) == 1.0 + 0.5
    assert found.outcome.edge_bytes.tolist() == [0.0]


def test_the_first_bucket_of_a_group_is_small_as_ddps():
    mib = 2**20
    sizes = {"a": 10 * mib, "b": 20 * mib, "c": mib}
    operators = [op("x", [], 4, kind="input")]
    for name, before in (("a", "x"), ("b", "a"), ("c", "b")):
        operators.append(op(name, [before], 4, sizes[name]))
    graph = Graph(name="g", batch=8, operators=operators)
    profile = profile_of(graph, dict.fromkeys(sizes, (1.0, 1.0)))
    simulator = Simulator(graph, profile, cluster_of(memory=10**9))
    plans = {name: OperatorPlan({"sample": 2}, [0, 1]) for name in sizes}
    trial = Trial.from_strategy(simulator, Strategy(name="s", batch=8, operators=plans))
    assert trial.tables.buckets().n_bytes.tolist() == [mib, 30 * mib]


def test_data_parallel_overlaps_buckets_with_the_backward_pass():
    graph, profile = chain()
    plans = {name: OperatorPlan({"sample": 2}, [0, 1]) for name in ("a", "b")}
    found = simulate(graph, profile, cluster_of(), plans, options=SimulatorOptions(bucket_bytes=1))
    # Half the samples halve the times. Ring over two: 2 * 1 steps of half the bytes at 16 B/s.
    assert timeline(found)[-1] == ("all-reduce a", 6.0, 11.0)
    assert ("all-reduce b", 3.5, 6.0) in timeline(found)
    assert found.step_s == 11.0


def test_without_overlap_gradients_wait_for_the_whole_backward_pass():
    graph, profile = chain()
    plans = {name: OperatorPlan({"sample": 2}, [0, 1]) for name in ("a", "b")}
    found = simulate(graph, profile, cluster_of(), plans, options=SimulatorOptions(overlap=False))
    assert timeline(found)[-1] == ("all-reduce b to a", 4.5, 12.0)


def test_feature_parallel_gathers_and_needs_no_synchronisation():
    graph, profile = chain()
    plans = {"a": OperatorPlan({"feature": 2}, [0, 1]), "b": OperatorPlan({}, [0])}
    found = simulate(graph, profile, cluster_of(), plans)
    # Half of a's output (16 bytes) crosses, 1 s each way.
    assert timeline(found) == [
        ("a", 0, 0.5),
        ("a", 0, 0.5),
        ("a node0:1 -> node0:0", 0.5, 1.5),
        ("b", 1.5, 3.5),
        ("b", 3.5, 7.5),
        ("a", 7.5, 8.5),
        ("gradient of a node0:0 -> node0:1", 7.5, 8.5),
        ("a", 8.5, 9.5),
    ]


def two_stages(schedule, n_microbatches, recompute=False, bandwidth=np.inf):
    graph, profile = chain()
    profile = profile_of(graph, {"a": (2.0, 4.0), "b": (2.0, 4.0)})
    cluster = cluster_of(bandwidth=1e30 if np.isinf(bandwidth) else bandwidth)
    return simulate(
        graph,
        profile,
        cluster,
        {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [1], 1)},
        n_microbatches=n_microbatches,
        schedule=schedule,
        stages=[Stage(recompute), Stage(recompute)],
    )


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_balanced_pipeline_takes_fill_and_drain_of_one_stage(schedule):
    # 4 microbatches of 0.5 + 1 s on each of 2 stages: (4 + 2 - 1) * 1.5.
    assert two_stages(schedule, 4).step_s == pytest.approx(7.5, abs=1e-12)


def test_1f1b_holds_fewer_activations_than_gpipe():
    assert two_stages("gpipe", 4).memory_bytes["node0:0"] == 240 + 4 * 8
    assert two_stages("1f1b", 4).memory_bytes["node0:0"] == 240 + 2 * 8


def test_weight_passes_fill_the_bubble_of_zero_bubble():
    # Rank 1 starts after one forward (0.5 s) and then never waits: 4 * (0.5 + 0.5 + 0.5).
    assert two_stages("zero_bubble", 4).step_s == pytest.approx(6.5, abs=1e-12)


def test_the_next_step_fills_a_pipeline_while_this_one_drains():
    operators = [op("x", [], 4, kind="input"), op("a", ["x"], 4, 10), op("b", ["a"], 2, 60)]
    graph = Graph(name="g", batch=8, operators=operators)
    profile = profile_of(graph, {"a": (1.0, 2.0), "b": (2.0, 4.0)})
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [1], 1)}
    options = SimulatorOptions(optimizer_s_per_byte=0.1)
    found = simulate(
        graph, profile, cluster_of(bandwidth=1e30), plans, stages=[Stage()] * 2, options=options
    )
    # A step alone takes 13 s: a 1, b 2 + 4, then b's optimizer 6. Beside that a has its backward,
    # its optimizer of 1 s, and the next forward, so that b's device works all the time.
    computed = [event for event in timeline(found) if "->" not in event[0]]
    assert computed == [("a", 0, 1), ("b", 3, 5), ("b", 5, 9), ("a", 9, 11)]
    assert found.step_s == pytest.approx(12.0)
    assert found.outcome.device_begin_s == pytest.approx([0.0, 3.0])
    steps = {rank: own[-1] for rank, own in spans(found).items()}
    assert (steps[1].kind, steps[1].start_s, steps[1].duration_s) == ("step", 3.0, found.step_s)
    assert {name: s for name, s in binding(found).items() if s > 1e-9} == pytest.approx(
        {
            "node0:1": 6.0,
            "the step before on node0:1": 3.0,
            "node0:0": 2.0,
            "optimizer of node0:0": 1.0,
        }
    )


def test_recomputation_costs_a_forward_and_saves_activations():
    plain, again = two_stages("gpipe", 4), two_stages("gpipe", 4, recompute=True)
    # Rank 1 is done with B0 at 4.0; then rank 0 repeats backward 1 s, recomputation 0.5 s, and
    # only its first recomputation is hidden: 4 + 4 * 1 + 3 * 0.5.
    assert (plain.step_s, again.step_s) == pytest.approx((7.5, 9.5), abs=1e-12)
    # One microbatch's output is 8 B on rank 0; rank 1 keeps the 8 B it received of each, and has
    # 4 B of its own output at the peak instead of 4 times that.
    assert again.memory_bytes == {"node0:0": 240 + 8, "node0:1": 120 + 4 * 8 + 4}
    assert plain.memory_bytes == {"node0:0": 240 + 4 * 8, "node0:1": 120 + 4 * (8 + 4)}


def test_transfers_pace_the_pipeline_when_they_are_slowest():
    # A microbatch of 8 bytes takes 1 s: arrivals at 1.5, 2.5, 3.5, 4.5; rank 1 runs its forwards
    # until 5 and its backwards until 9; the last gradient arrives at 10.
    assert two_stages("gpipe", 4, bandwidth=8.0).step_s == pytest.approx(11.0, abs=1e-12)


def fan(n, nic=None, bandwidth=16.0):
    """Node 0 sends one tensor to n consumers, each on a node of its own."""
    operators = [op("x", [], 4, kind="input"), op("a", ["x"], 4, 8)]
    operators += [op(f"b{i}", ["a"], 1) for i in range(n)]
    graph = Graph(name="fan", batch=8, operators=operators)
    profile = profile_of(graph, {o.name: (1.0, 0.0) for o in operators[1:]})
    nodes = [
        Node(
            name=f"n{i}",
            devices=[Device(name=f"n{i}:0", kind="device", memory_bytes=MB)],
            nic_bytes_per_s=nic,
        )
        for i in range(n + 1)
    ]
    names = [node.name + ":0" for node in nodes]
    links = [
        Link(source=a, target=b, latency_s=0.0, bandwidth_bytes_per_s=bandwidth)
        for a in names
        for b in names
        if a != b
    ]
    plans = {"a": OperatorPlan({}, [0])}
    plans |= {f"b{i}": OperatorPlan({}, [i + 1]) for i in range(n)}
    return graph, profile, Cluster(nodes=nodes, links=links), plans


def test_an_interface_serves_its_links_one_after_another():
    free = simulate(*fan(3))
    assert free.step_s == pytest.approx(1 + 2 + 1 + 2)  # links in parallel, both ways
    # The sender's interface is as fast as a link: 3 x 2 s out, and gradients 2 s each back in.
    bound = simulate(*fan(3, nic=16.0))
    arrivals = [e for e in timeline(bound) if "->" in e[0] and "gradient" not in e[0]]
    assert [(s, e) for _, s, e in arrivals] == [(1, 3), (3, 5), (5, 7)]
    assert bound.step_s == pytest.approx(1 + 6 + 1 + 2)


def test_a_fast_interface_overlaps_slow_links():
    found = simulate(*fan(3, nic=32.0))
    arrivals = [e for e in timeline(found) if "->" in e[0] and "gradient" not in e[0]]
    assert [(s, e) for _, s, e in arrivals] == [(1, 3), (2, 4), (3, 5)]


def test_both_directions_of_a_link_are_apart():
    graph = Graph(
        name="cross",
        batch=8,
        operators=[
            op("x", [], 4, kind="input"),
            op("a", ["x"], 4),
            op("b", ["x"], 4),
            op("c", ["a"], 1),
            op("d", ["b"], 1),
        ],
    )
    profile = profile_of(graph, dict.fromkeys("abcd", (1.0, 0.0)))
    plans = {n: OperatorPlan({}, [d]) for n, d in (("a", 0), ("b", 1), ("c", 1), ("d", 0))}
    found = simulate(graph, profile, cluster_of(), plans)
    assert found.step_s == 4.0  # 1 s, 2 s across at once in both directions, 1 s


def test_slow_device_takes_longer_and_shares_balance_it():
    graph, profile = chain()
    cluster = cluster_of(bandwidth=1e30)
    slow = msgspec.structs.replace(cluster.nodes[0].devices[1], speed=1 / 3)
    cluster = Cluster(
        nodes=[
            msgspec.structs.replace(cluster.nodes[0], devices=[cluster.nodes[0].devices[0], slow])
        ],
        links=cluster.links,
    )
    even = {name: OperatorPlan({"sample": 2}, [0, 1]) for name in ("a", "b")}
    fair = {name: OperatorPlan({"sample": [3, 1]}, [0, 1]) for name in ("a", "b")}
    assert simulate(graph, profile, cluster, even).step_s == pytest.approx(9 / 2 * 3)
    assert simulate(graph, profile, cluster, fair).step_s == pytest.approx(9 * 3 / 4)


def test_a_device_that_is_slower_now_than_when_it_was_profiled_takes_longer():
    graph, profile = chain()
    step = WholeStep(
        device_kind="device", batch=8, dtype="float32", step_s=9.0, operators_s=9.0, latest_s=18.0,
        graph_hash=graph.content_hash(),
    )  # fmt: skip
    profile = msgspec.structs.replace(profile, whole_steps=[step])
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [0])}
    assert simulate(graph, profile, cluster_of(), plans).step_s == 18.0


def test_each_kind_of_device_has_its_own_times():
    graph, profile = chain()
    other = profile_of(graph, {"a": (5.0, 0.0), "b": (5.0, 0.0)}, kind="old")
    both = Profile(model="chain", measurements=profile.measurements + other.measurements)
    cluster = cluster_of()
    old = msgspec.structs.replace(cluster.nodes[0].devices[1], kind="old")
    cluster = Cluster(
        nodes=[
            msgspec.structs.replace(cluster.nodes[0], devices=[cluster.nodes[0].devices[0], old])
        ],
        links=cluster.links,
    )
    plans = {"a": OperatorPlan({}, [1]), "b": OperatorPlan({}, [1])}
    assert simulate(graph, both, cluster, plans).step_s == 10.0


def test_measured_collectives_replace_the_ring():
    graph, profile = chain()
    points = [
        CollectivePoint(
            operation="all_reduce", transport="gloo", n_ranks=2, n_bytes=n, duration_s=s
        )
        for n, s in ((12, 1.0), (1200, 100.0))
    ]
    cluster = msgspec.structs.replace(cluster_of(), collectives=points)
    plans = {name: OperatorPlan({"sample": 2}, [0, 1]) for name in ("a", "b")}
    # 120 bytes lie half-way on the logarithmic scale: 10 s after 4.5 s of computation.
    assert simulate(graph, profile, cluster, plans).step_s == pytest.approx(14.5)


@pytest.mark.parametrize(
    ("plan", "nodes", "slower"),
    [
        (OperatorPlan({"sample": 3}, [0, 1, 2]), (3, 1), 2.0),  # each sends to both others
        (OperatorPlan({}, [0]), (3, 1), 1.0),  # both others send to one
        (OperatorPlan({"sample": 3}, [0, 1, 2]), (1, 3), 1.0),  # inside a node
    ],
)
def test_flows_that_share_interfaces_at_both_ends_take_longer(plan, nodes, slower):
    graph, profile = chain()
    plain = Cluster.uniform(*nodes, inside_bytes_per_s=16.0, memory_bytes=MB)
    plans = {"a": OperatorPlan({"feature": 3}, [0, 1, 2]), "b": plan}
    before, after = (
        sorted(e.duration_s for e in events(simulate(graph, profile, c, plans)) if "->" in e.name)
        for c in (plain, replace(plain, crowding=2.0))
    )
    assert before
    assert after == pytest.approx([slower * seconds for seconds in before])


def test_optimizer_runs_at_the_end_on_what_a_device_owns():
    graph, profile = chain()
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [0])}
    options = SimulatorOptions(optimizer_s_per_byte=0.01)
    found = simulate(graph, profile, cluster_of(), plans, options=options)
    assert found.step_s == pytest.approx(9 + 1.2)
    assert device_seconds(found, 0) == pytest.approx(
        {"forward": 3, "backward": 6, "exposed": 0, "optimizer": 1.2}
    )


def test_gradients_of_microbatches_are_added_up_and_shared_ones_copied():
    graph, profile = chain()
    options = SimulatorOptions(stream_s_per_byte=0.01)

    def added_s(plan, n_microbatches):
        plans = dict.fromkeys(("a", "b"), plan)
        found, bare = (
            simulate(
                graph, profile, cluster_of(), plans, n_microbatches=n_microbatches, options=given
            )
            for given in (options, SimulatorOptions())
        )
        return device_seconds(found, 0)["backward"] - device_seconds(bare, 0)["backward"]

    # 120 bytes of weights: the first microbatch's gradient stays, the second's is added to it.
    assert added_s(OperatorPlan({}, [0]), 1) == 0
    assert added_s(OperatorPlan({}, [0]), 2) == pytest.approx(3 * 120 * 0.01)
    assert added_s(OperatorPlan({"sample": 2}, [0, 1]), 1) == pytest.approx(2 * 120 * 0.01)


def simulated_joined(
    joined_weight_bytes, n_microbatches=2, *, n_stages=1, weight_bytes=80, first=None
):
    """Two products with weights, fed and giving 32 bytes in a microbatch of 4 samples."""
    graph = two_linears(1)[0]
    operators = [
        msgspec.structs.replace(op, parameter_bytes=weight_bytes) if op.name in ("a", "b") else op
        for op in graph.operators
    ]
    graph = Graph(name="joined", batch=8, operators=operators)
    points = [
        Measurement(
            device_kind="device", operator=op.profile_key, shape={"sample": n, "feature": 4},
            forward_s=n / 4, backward_s={4: 2.0, 8: 2.75}[n],
        )
        for op in {op.profile_key: op for op in operators[1:]}.values() for n in (4, 8)
    ]  # fmt: skip
    profile = Profile(model=graph.name, graph_hash=graph.content_hash(), measurements=points)
    last = n_stages - 1
    plans = {
        "a": first or OperatorPlan({}, [0], 0),
        "b": OperatorPlan({}, [last], last),
        "c": OperatorPlan({}, [last], last),
    }
    return simulate(
        graph,
        profile,
        cluster_of(2, bandwidth=1e12),
        plans,
        n_microbatches=n_microbatches,
        stages=[Stage()] * n_stages,
        options=SimulatorOptions(stream_s_per_byte=0.01, joined_weight_bytes=joined_weight_bytes),
    )


def test_gradients_of_joined_microbatches_are_computed_once_and_not_added_up():
    apart, joined = simulated_joined(81), simulated_joined(80)
    # Half of the 2 s of each backward was for the weights, both at once take 0.75 s.
    added_s, copied_s = 0.01 * 3 * 80, 0.01 * 2 * 64
    saved_s = added_s + 2 * 1.0 - 0.75 - copied_s
    assert apart.step_s - joined.step_s == pytest.approx(2 * saved_s)
    assert joined.memory_bytes["node0:0"] - apart.memory_bytes["node0:0"] == 2 * 64
    assert simulated_joined(80, 1).step_s == simulated_joined(81, 1).step_s


def test_an_operators_seconds_hold_its_part_of_joined_gradients():
    apart, joined = (operator_seconds(simulated_joined(n).simulator, 8, 2) for n in (81, 80))
    saved_s = 0.01 * 3 * 80 + 2 * 1.0 - 0.75 - 0.01 * 2 * 64
    assert apart.shape == (2, 3)
    assert (apart - joined).tolist() == [pytest.approx([saved_s / 2, saved_s / 2, 0.0])] * 2
    # 1 s forward and 2 s backward of four samples, and adding up.
    assert apart[0].tolist() == pytest.approx([3 + 0.01 * 3 * 80 / 2] * 2 + [3])


def test_microbatches_are_joined_on_all_devices_of_an_operator_or_on_none():
    # Of its 64 bytes the devices keep 48 and 16; b keeps 64 on the first.
    def joined_bytes(weight_bytes):
        first = OperatorPlan({"sample": [3, 1]}, [0, 1])
        apart, joined = (
            simulated_joined(least, weight_bytes=weight_bytes, first=first).memory_bytes
            for least in (np.inf, 1)
        )
        return [joined[device] - apart[device] for device in ("node0:0", "node0:1")]

    assert joined_bytes(47) == [0, 0]
    assert joined_bytes(48) == [48, 16]
    assert joined_bytes(64) == [48 + 64, 16]


def test_a_product_without_samples_may_be_joined():
    shape = {"seq": 4, "feature": 4}
    query = Operator(name="q", kind="linear", inputs=[], shape=shape, parameter_bytes=800,
                     activation_bytes=16)  # fmt: skip
    graph = Graph(name="query", batch=8, operators=[op("x", [], 4, kind="input"), query])
    steps = [
        simulate(
            graph,
            profile_of(graph, {"q": (1.0, 3.0)}),
            cluster_of(1),
            {"q": OperatorPlan({}, [0])},
            n_microbatches=2,
            options=SimulatorOptions(joined_weight_bytes=least),
        ).step_s
        for least in (800, 801)
    ]
    assert steps == [2 * (1.0 + 3.0)] * 2


def test_joined_gradients_come_after_what_the_stage_before_waits_for():
    found = timeline(simulated_joined(80, n_stages=2))
    (weights,) = [event for event in found if event[0].startswith("weights of")]
    assert weights[0].startswith("weights of b")
    assert weights[2] - weights[1] == pytest.approx(0.75 + 0.01 * 2 * 64)
    # Meanwhile the first stage has its last backward, which began as soon as b's had ended.
    backward = max((event for event in found if event[0].startswith("a ")), key=lambda e: e[1])
    assert backward[1] == pytest.approx(weights[1])


def test_gradients_in_place_are_added_up_within_their_backward():
    graph, profile, cluster, plans = two_linears(1)
    times = [
        simulate(graph, profile, cluster, plans, n_microbatches=2, options=options).step_s
        for options in (
            SimulatorOptions(),
            SimulatorOptions(stream_s_per_byte=0.01, in_place_bytes=1),
            SimulatorOptions(stream_s_per_byte=0.01),
        )
    ]
    assert times[0] == times[1] < times[2]


def test_records_are_those_of_a_measured_run():
    graph, profile = chain()
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [1])}
    found = simulate(graph, profile, cluster_of(), plans)
    by_rank = spans(found, step=3)
    assert {span.step for own in by_rank.values() for span in own} == {3}
    assert [(s.kind, s.start_s) for s in by_rank[1]] == [
        ("communication", 1.0),
        ("forward", 3.0),
        ("backward", 5.0),
        ("communication", 9.0),
        ("step", 0.0),
    ]
    assert by_rank[0][1].n_bytes == 32


def test_memory_over_time_rises_and_falls():
    graph, profile = chain()
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [0])}
    found = simulate(graph, profile, cluster_of(), plans)
    assert memory_over_time(found, 0) == [(0, 392), (1, 408), (3, 408), (7, 392)]


def test_the_critical_path_names_what_binds():
    graph, profile = chain()
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [1])}
    found = simulate(graph, profile, cluster_of(bandwidth=1.0), plans)
    assert [event.name for event in critical_path(found)] == [
        "a",
        "a node0:0 -> node0:1",
        "b",
        "b",
        "gradient of a node0:1 -> node0:0",
        "a",
    ]
    assert next(iter(binding(found))) in ("link node0:0 -> node0:1", "link node0:1 -> node0:0")
    assert sum(binding(found).values()) == pytest.approx(found.step_s)
    assert any("busiest: link" in line for line in explain(found))


def test_out_of_memory_is_predicted_and_names_the_device():
    graph, profile = chain()
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [0])}
    simulator = Simulator(graph, profile, cluster_of(memory=400))
    found = simulator.simulate(Strategy(name="s", batch=8, operators=plans))
    assert not found.fits
    with pytest.raises(PlanError, match="needs 408 B on device node0:0, which has 400 B"):
        found.check_memory()
    assert simulator.step_s(found.strategy) == np.inf


def test_bad_input_gets_its_error():
    graph, profile = chain()
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [7])}
    with pytest.raises(StrategyError, match="device 7, the cluster has devices 0 to 1"):
        simulate(graph, profile, cluster_of(), plans)
    with pytest.raises(PlanError, match="measured for graph"):
        Simulator(graph, msgspec.structs.replace(profile, graph_hash="abc"), cluster_of())
    with pytest.raises(PlanError, match="no device kind 'T4'"):
        simulate(graph, profile, cluster_of(kind="T4"), {k: OperatorPlan({}, [0]) for k in "ab"})
    with pytest.raises(ClusterError, match="no link node0:0 -> node0:1"):
        Simulator(graph, profile, msgspec.structs.replace(cluster_of(), links=[]))
    with pytest.raises(PlanError, match="a bucket needs a byte"):
        SimulatorOptions(bucket_bytes=0)


def random_case(rng, n_ops=6, n_devices=3):
    """A graph with branches, a cluster of unlike devices and links, and operators' menus."""
    operators = [op("x", [], 4, kind="input")]
    for i in range(n_ops):
        before = [o.name for o in operators[-3:]]
        inputs = rng.sample(before, k=rng.randint(1, len(before)))
        kind = rng.choice(["linear", "linear", "batch_norm", "elementwise"])
        size = 0 if kind == "elementwise" else rng.choice([0, 40, 400])
        operators.append(op(f"o{i}", inputs, 4, size, kind=kind, in_features=4))
    graph = Graph(name="random", batch=8, operators=operators)
    profile = profile_of(
        graph, {o.name: (rng.uniform(0.1, 2), rng.uniform(0.1, 4)) for o in operators[1:]}
    )
    nodes = [
        Node(
            name=f"n{i}",
            devices=[
                Device(
                    name=f"n{i}:{j}",
                    kind="device",
                    memory_bytes=MB,
                    speed=rng.choice([0.5, 1.0, 2.0]),
                )
                for j in range(1 + i % 2)
            ],
            nic_bytes_per_s=rng.choice([None, 20.0, 60.0]),
        )
        for i in range(n_devices - 1)
    ]
    names = [d.name for node in nodes for d in node.devices]
    links = [
        Link(
            source=a,
            target=b,
            latency_s=rng.uniform(0, 0.1),
            bandwidth_bytes_per_s=rng.uniform(8, 99),
        )
        for a in names
        for b in names
        if a != b
    ]
    crowding = rng.choice([1.0, 1.5])
    return graph, profile, Cluster(nodes=nodes, links=links, crowding=crowding)


def random_plan(rng, n_devices, operator=None, samples=8):
    cuts = rng.choice(
        [{}, {"sample": 2}, {"feature": 2}, {"sample": [3, 1]}, {"sample": 2, "feature": 2}]
    )
    if operator is not None:
        full = full_shape(operator, batch=samples, graph_batch=8)
        if "contraction" in full and rng.random() < 0.4:
            cuts = rng.choice([{"contraction": 3}, {"contraction": 2}, {"feature": 2}])
            if cuts == {"contraction": 3} and rng.random() < 0.7:
                return OperatorPlan(cuts, rng.sample(range(n_devices), 3))
    devices = [rng.randrange(n_devices) for _ in range(count_parts(cuts))]
    if operator is not None and may_have_copies(operator) and rng.random() < 0.6:
        if rng.random() < 0.5:
            cuts, devices = {}, [0]
        n = rng.randint(2, n_devices)
        others = [rng.sample([d for d in range(n_devices) if d != own], n - 1) for own in devices]
        devices = [d for own, more in zip(devices, others, strict=True) for d in (own, *more)]
        return OperatorPlan({**cuts, "replica": n}, devices)
    return OperatorPlan(dict(cuts), devices)


@pytest.mark.parametrize("seed", range(4))
def test_delta_simulation_equals_the_full_one_on_thousands_of_moves(seed):
    rng = random.Random(seed)
    n_moves = n_replayed = n_sums = 0
    for case in range(10):
        graph, profile, cluster = random_case(rng)
        operators = graph.operators[1:]
        plans = {o.name: random_plan(rng, cluster.n_devices, o) for o in operators}
        n_microbatches = rng.choice([1, 2, 4])
        flow = {"n_microbatches": n_microbatches, "stages": [Stage(recompute=case % 3 == 0)]}
        options = SimulatorOptions(
            overlap=case % 4 != 0,
            bucket_bytes=100,
            batch_norm=rng.choice(["local", "global"]),
            joined_weight_bytes=rng.choice([40, 1e9]),
        )
        if case == 9:
            cluster = talking(cluster, *[0.01] * cluster.n_devices)
        kept = Simulator(graph, profile, cluster, options=options)
        trial = Trial.from_strategy(kept, Strategy(name="s", batch=8, operators=plans, **flow))
        for _ in range(100):
            for operator in rng.sample(operators, k=rng.choice([1, 1, 1, 2])):
                plan = random_plan(rng, cluster.n_devices, operator, 8 // n_microbatches)
                plans[operator.name] = plan
                trial.replace(graph.index()[operator.name], plan)
            delta = trial.outcome()
            fresh = Simulator(graph, profile, cluster, options=options)
            full = Trial.from_strategy(
                fresh, Strategy(name="s", batch=8, operators=plans, **flow)
            ).outcome()
            assert delta.step_s == full.step_s
            assert (delta.memory_bytes == full.memory_bytes).all()
            for name in ("start", "finish", "cause", "busy", "device_end_s"):
                np.testing.assert_array_equal(getattr(delta, name), getattr(full, name))
            n_moves += 1
            n_replayed += trial.n_replayed
            n_sums += len(delta.sums)
    assert n_moves == 1000
    assert n_replayed > n_moves
    assert n_sums > 100


def test_a_change_at_the_end_repeats_only_the_end():
    names = [f"o{i}" for i in range(20)]
    operators = [op("x", [], 4, kind="input")]
    operators += [op(n, [operators[-1].name] if i == 0 else [names[i - 1]], 4, 40)
                  for i, n in enumerate(names)]  # fmt: skip
    graph = Graph(name="long", batch=8, operators=operators)
    profile = profile_of(graph, dict.fromkeys(names, (1.0, 2.0)))
    simulator = Simulator(graph, profile, cluster_of())
    plans = {n: OperatorPlan({}, [0]) for n in names}
    trial = Trial.from_strategy(simulator, Strategy(name="s", batch=8, operators=plans))
    trial.outcome()
    assert (trial.n_replayed, trial.n_events) == (0, 40)
    trial.replace(20, OperatorPlan({}, [1]))
    trial.outcome()
    # The last operator moves: the 18 forward passes before its producer's are as they were, and
    # two transfers come to the 40 tasks.
    assert (trial.n_replayed, trial.n_events) == (18, 42)
    trial.outcome()
    assert trial.n_replayed == trial.n_events == 42


def test_no_device_and_no_link_does_two_things_at_once():
    rng = random.Random(2)
    for _ in range(30):
        graph, profile, cluster = random_case(rng)
        plans = {o.name: random_plan(rng, cluster.n_devices) for o in graph.operators[1:]}
        found = simulate(graph, profile, cluster, plans, n_microbatches=2)
        by_resource = {}
        for event in events(found):
            if len(event.ranks) <= 2 and "all-reduce" not in event.name:
                by_resource.setdefault(event.resource, []).append(event)
        for name, own in by_resource.items():
            for before, after in itertools.pairwise(own):
                busy = before.duration_s
                if name.startswith("link"):  # latency does not occupy the link
                    link = next(
                        link
                        for link in cluster.links
                        if name == f"link {link.source} -> {link.target}"
                    )
                    busy = before.n_bytes / link.bandwidth_bytes_per_s
                assert after.start_s >= before.start_s + busy - 1e-9


def test_a_device_fetches_a_region_once_for_all_that_read_it_there():
    operators = [op("x", [], 4, kind="input"), op("a", ["x"], 4, 8)]
    operators += [op("b", ["a"], 1), op("c", ["a"], 1), op("d", ["a"], 1)]
    graph = Graph(name="once", batch=8, operators=operators)
    profile = profile_of(graph, dict.fromkeys("abcd", (1.0, 2.0)))
    plans = {n: OperatorPlan({}, [d]) for n, d in (("a", 0), ("b", 1), ("c", 1), ("d", 0))}
    found = simulate(graph, profile, cluster_of(), plans)
    # 32 B at 16 B/s go once; c finds them there, and one gradient comes back after b, the last.
    assert timeline(found) == [
        ("a", 0, 1),
        ("d", 1, 2),
        ("a node0:0 -> node0:1", 1, 3),
        ("d", 2, 4),
        ("b", 3, 4),
        ("c", 4, 5),
        ("c", 5, 7),
        ("b", 7, 9),
        ("gradient of a node0:1 -> node0:0", 9, 11),
        ("a", 11, 13),
    ]
    assert found.memory_bytes["node0:1"] == 8 + 8 + 32


def test_different_regions_are_fetched_each():
    operators = [op("x", [], 4, kind="input"), op("a", ["x"], 4, 8)]
    operators += [op("b", ["a"], 1), op("c", ["a"], 1)]
    graph = Graph(name="twice", batch=8, operators=operators)
    profile = profile_of(graph, dict.fromkeys("abc", (1.0, 2.0)))
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [1])}
    plans["c"] = OperatorPlan({"sample": 2}, [1, 0])
    sent = [e for e in timeline(simulate(graph, profile, cluster_of(), plans)) if "a node" in e[0]]
    # All of it for b, and the first half for c.
    assert [round((e - s) * 16) for name, s, e in sent if "gradient" not in name] == [32, 16]


def two_linears(n_devices, **attrs):
    """x -> a (4 features) -> b (2 features from those 4), both with weights."""
    graph = Graph(
        name="mlp",
        batch=8,
        operators=[
            op("x", [], 4, kind="input"),
            op("a", ["x"], 4, 80, in_features=4),
            op("b", ["a"], 4, 40, in_features=4),
            op("c", ["b"], 4, 0),
        ],
    )
    profile = profile_of(graph, {"a": (4.0, 8.0), "b": (4.0, 8.0), "c": (4.0, 8.0)})
    devices = list(range(n_devices))
    plans = {
        "a": OperatorPlan({"feature": n_devices}, devices),
        "b": OperatorPlan({"contraction": n_devices}, devices),
        "c": OperatorPlan({"feature": n_devices}, devices),
    }
    return graph, profile, cluster_of(n_devices), plans


def test_contraction_reads_what_features_left_and_sums_among_two_pairwise():
    found = simulate(*two_linears(2))
    moved = [e for e in timeline(found) if e[1] < 10 and "->" in e[0]]
    # Nothing between a and b; then both send their 32 B of partial sums to the other.
    assert moved == [("b node0:0 -> node0:1", 4, 6), ("b node0:1 -> node0:0", 4, 6)]
    assert [e for e in timeline(found) if "all-reduce" in e[0]] == []
    assert found.memory_bytes["node0:0"] == 3 * (40 + 20) + 16 + 32 + 16 + 32


def test_partial_sums_of_more_than_two_devices_are_all_reduced():
    found = simulate(*two_linears(4))
    # A ring of 4: 6 steps of 8 B at 16 B/s; forward before c and backward before b.
    assert [e for e in timeline(found) if "sum" in e[0]] == [
        ("sum of b", 2.0, 5.0),
        ("gradient of sum of b", 8.0, 11.0),
    ]
    assert not [e for e in timeline(found) if "->" in e[0]]
    assert found.step_s == 15.0


def test_partial_sums_are_sent_where_others_want_them_or_not_all_of_them():
    graph, profile, cluster, plans = two_linears(4)
    for reader in (
        OperatorPlan({"sample": 4}, [0, 1, 2, 3]),
        OperatorPlan({}, [0]),
        OperatorPlan({"feature": 3}, [0, 1, 2]),
    ):
        found = simulate(graph, profile, cluster, plans | {"c": reader})
        names = [e[0] for e in timeline(found)]
        assert not [name for name in names if "sum" in name]
        assert [name for name in names if "b node0:1 -> node0:0" in name]


def with_copies(n_devices):
    """A contraction, an elementwise that all devices compute, and a reader cut by features."""
    graph, _, cluster, plans = two_linears(n_devices)
    ops = [*graph.operators[:3], op("r", ["b"], 4, kind="elementwise"), op("c", ["r"], 4, 0)]
    graph = Graph(name="copies", batch=8, operators=ops)
    seconds = {"a": (4.0, 8.0), "b": (4.0, 8.0), "r": (1.0, 2.0), "c": (4.0, 8.0)}
    devices = list(range(n_devices))
    plans = plans | {"r": OperatorPlan({"replica": n_devices}, devices)}
    return graph, profile_of(graph, seconds), cluster, plans


def test_copies_have_what_they_read_and_give_without_a_word():
    found = timeline(simulate(*with_copies(2)))
    # Forward the partial sums of b meet before r; backward those of r's gradient before r.
    moved = {e for e in found if "->" in e[0]}
    assert moved == {
        ("b node0:0 -> node0:1", 4, 6),
        ("b node0:1 -> node0:0", 4, 6),
        ("gradient of r node0:0 -> node0:1", 13, 15),
        ("gradient of r node0:1 -> node0:0", 13, 15),
    }
    # Every copy is all of r.
    assert [e for e in found if e[0] == "r"] == [("r", 6, 7), ("r", 6, 7)] + [("r", 15, 17)] * 2


def test_copies_on_more_than_two_devices_are_all_reduced_once_each_way():
    found = timeline(simulate(*with_copies(4)))
    assert not [e for e in found if "->" in e[0]]
    assert [e[0] for e in found if "sum" in e[0]] == ["sum of b", "gradient of sum of r"]


def test_a_copy_elsewhere_reads_and_one_copy_alone_gives_its_gradient_back():
    graph, profile, cluster, plans = with_copies(2)
    plans |= {
        "b": OperatorPlan({}, [0]),
        "r": OperatorPlan({"replica": 2}, [0, 1]),
        "c": OperatorPlan({}, [1]),
    }
    moved = [e[0] for e in timeline(simulate(graph, profile, cluster, plans)) if "->" in e[0]]
    # c's gradient goes to both copies of r, but b has its own device's already.
    assert moved == [
        "a node0:1 -> node0:0",
        "b node0:0 -> node0:1",
        "gradient of r node0:1 -> node0:0",
        "gradient of a node0:0 -> node0:1",
    ]


def test_groups_of_partial_sums_are_all_reduced_apart():
    graph, profile, _, plans = two_linears(3)
    devices = [0, 1, 2, 3, 4, 5]
    plans["a"] = OperatorPlan({"sample": 2, "feature": 3}, devices)
    plans["b"] = OperatorPlan({"sample": 2, "contraction": 3}, devices)
    plans["c"] = OperatorPlan({"sample": 2, "feature": 3}, devices)
    found = simulate(graph, profile, cluster_of(6), plans)
    groups = [e.ranks for e in events(found) if e.name == "sum of b"]
    assert groups == [(0, 1, 2), (3, 4, 5)]


def test_global_batch_norm_sums_its_statistics():
    operators = [op("x", [], 4, kind="input"), op("a", ["x"], 4, 80)]
    operators += [op("n", ["a"], 4, 0, kind="batch_norm"), op("b", ["n"], 4)]
    graph = Graph(name="norm", batch=8, operators=operators)
    profile = profile_of(graph, {"a": (2.0, 4.0), "n": (2.0, 4.0), "b": (2.0, 4.0)})
    plans = {name: OperatorPlan({"sample": 2}, [0, 1]) for name in "anb"}
    local = simulate(graph, profile, cluster_of(), plans)
    options = SimulatorOptions(batch_norm="global")
    found = simulate(graph, profile, cluster_of(), plans, options=options)
    # Forward two all-reduces of 4 features in 4 B, 1 s each; backward one of twice as many in 8 B.
    assert [e for e in timeline(found) if "statistics" in e[0]] == [
        ("statistics of n", 2.0, 4.0),
        ("gradient of statistics of n", 9.0, 13.0),
    ]
    assert found.step_s == local.step_s + 2 + 4


def test_receives_are_posted_one_action_ahead():
    graph, profile = chain()
    profile = profile_of(graph, {"a": (1.0, 0.0), "b": (8.0, 0.0)})
    found = simulate(
        graph,
        profile,
        cluster_of(),
        {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [1], 1)},
        n_microbatches=4,
        stages=[Stage(), Stage()],
    )
    begin = found.outcome.device_begin_s[0]
    assert begin == 4 * 0.5  # b's device is done once it has sent the four gradients
    sent = [
        (s - begin, e - begin)
        for name, s, e in timeline(found)
        if name.startswith("a #") and "->" in name
    ]
    # a ends at 0.25, 0.5, ...; b runs from 0.75 in steps of 2 s. The third transfer waits until b's
    # first microbatch is done at 2.75, the fourth until its second is.
    assert sent == [(0.25, 0.75), (0.75, 1.25), (2.75, 3.25), (4.75, 5.25)]


def test_transfers_take_computing_time_from_both_ends():
    operators = [op("x", [], 4, kind="input"), op("a", ["x"], 4), op("s", ["x"], 1)]
    operators += [op("b", ["a"], 1), op("r", ["x"], 1)]
    graph = Graph(name="host", batch=8, operators=operators)
    profile = profile_of(graph, dict.fromkeys("asbr", (4.0, 0.0)))
    plans = {n: OperatorPlan({}, [d]) for n, d in (("a", 0), ("s", 0), ("b", 1), ("r", 1))}
    cluster = talking(cluster_of(), 0.5 / 32, 1.0 / 32)
    simulation = simulate(graph, profile, cluster, plans)
    found = {e[0]: e[1:] for e in timeline(simulation) if e[2] > e[1]}
    assert contention_seconds(simulation) == [0.5, 0]
    # 32 B begin at 4, when device 0 goes on with s: that takes 0.5 s longer. Device 1 waits for
    # them, so that its second of work is done when they arrive.
    assert found == {
        "a": (0, 4),
        "s": (4, 8.5),
        "a node0:0 -> node0:1": (4, 6),
        "b": (6, 10),
        "r": (10, 14),
    }


@pytest.mark.parametrize(
    ("cost_s", "of"), [(0.5 / 32, ["host_s_per_byte"]), (0.5, ["host_s_per_message"])]
)
def test_a_short_computation_pays_for_its_part_of_a_transfer(cost_s, of):
    operators = [op("x", [], 4, kind="input"), op("a", ["x"], 4), op("s", ["x"], 1)]
    operators += [op("b", ["a"], 1)]
    graph = Graph(name="host", batch=8, operators=operators)
    profile = profile_of(graph, {"a": (4.0, 0.0), "s": (0.75, 0.0), "b": (4.0, 0.0)})
    plans = {n: OperatorPlan({}, [d]) for n, d in (("a", 0), ("s", 0), ("b", 1))}
    cluster = talking(cluster_of(), cost_s, cost_s, of=of)
    found = {e[0]: e[1:] for e in timeline(simulate(graph, profile, cluster, plans)) if e[2] > e[1]}
    # The transfer takes 2 s and a quarter of the processor all the while.
    assert found["a node0:0 -> node0:1"] == (4, 6)
    assert found["s"] == (4, 5)


def test_small_pieces_for_one_operator_share_the_cost_of_a_message():
    operators = [op("x", [], 4, kind="input"), op("a", ["x"], 4), op("s", ["x"], 4)]
    operators += [op("b", ["a", "s"], 1)]
    graph = Graph(name="join", batch=8, operators=operators)
    profile = profile_of(graph, {"a": (4.0, 0.0), "s": (1.0, 0.0), "b": (4.0, 0.0)})
    plans = {n: OperatorPlan({}, [d]) for n, d in (("a", 0), ("s", 0), ("b", 1))}
    cluster = talking(cluster_of(bandwidth=64), 0.25, 0.25, of=["host_s_per_message"])
    for joined_bytes, seconds in ((16, 1.25), (32, 1.125)):
        options = SimulatorOptions(joined_bytes=joined_bytes)
        found = timeline(simulate(graph, profile, cluster, plans, options=options))
        # The output of a is on its way for the first half of s.
        assert ("s", 4, 4 + seconds) in found


def test_a_device_that_begins_before_its_transfer_is_worked_off_takes_the_rest_longer():
    graph, profile, cluster, plans = two_linears(2)
    free = simulate(graph, profile, cluster, plans)
    # Two transfers of 32 B occupy each device for 8 s from 4, and only 2 s of it pass idly; twice.
    found = simulate(graph, profile, talking(cluster, 0.125, 0.125), plans)
    assert found.step_s == free.step_s + 12
    assert contention_seconds(free) == [0, 0]
    assert contention_seconds(found) == [12, 12]


def test_what_arrives_in_parts_is_put_together():
    graph, profile = chain()
    options = SimulatorOptions(stream_s_per_byte=1 / 32)
    gathered = {"a": OperatorPlan({"sample": 2}, [0, 1]), "b": OperatorPlan({}, [0])}
    free = simulate(graph, profile, cluster_of(), gathered)
    found = simulate(graph, profile, cluster_of(), gathered, options=options)
    # b reads and writes the 32 B of a, and device 1 gets all of its part's gradient; 80 B of
    # gradients of a, on both, are copied into a bucket.
    assert found.step_s - free.step_s == 2 * 32 / 32 + 2 * 80 / 32
    # Device 1 uses its half as it arrives; its gradient is added to the other half's on device 0.
    spread = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({"sample": 2}, [0, 1])}
    found = simulate(graph, profile, cluster_of(), spread, options=options)
    seconds = [end - start for name, start, end in timeline(found) if name == "a"]
    assert seconds == [1, 2 + 3 * 16 / 32]


def test_no_host_cost_in_order_of_time_is_the_same_as_none():
    rng = random.Random(3)
    for _ in range(20):
        graph, profile, cluster = random_case(rng)
        plans = {o.name: random_plan(rng, cluster.n_devices) for o in graph.operators[1:]}
        free = simulate(graph, profile, cluster, plans, n_microbatches=2)
        # A smaller number than any time's last digit puts the loop in order of time.
        tiny = talking(cluster, *[1e-30] * cluster.n_devices)
        found = simulate(graph, profile, tiny, plans, n_microbatches=2)
        np.testing.assert_array_equal(found.outcome.finish, free.outcome.finish)


def test_seconds_of_a_byte_of_memory_must_be_possible():
    with pytest.raises(PlanError, match="a byte of memory takes -1 s"):
        SimulatorOptions(stream_s_per_byte=-1)
