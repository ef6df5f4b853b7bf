"""Timelines worked out by hand, then properties over random strategies."""

import itertools
import random

import msgspec
import numpy as np
import pytest

from harness.domain.cluster import Cluster, CollectivePoint, Device, Link, Node
from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, Profile
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.errors import ClusterError, PlanError, StrategyError
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import (
    binding,
    critical_path,
    device_seconds,
    events,
    explain,
    memory_over_time,
    spans,
)
from harness.plan.simulate.simulator import Simulator, Trial

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


def test_optimizer_runs_at_the_end_on_what_a_device_owns():
    graph, profile = chain()
    plans = {"a": OperatorPlan({}, [0]), "b": OperatorPlan({}, [0])}
    options = SimulatorOptions(optimizer_s_per_byte=0.01)
    found = simulate(graph, profile, cluster_of(), plans, options=options)
    assert found.step_s == pytest.approx(9 + 1.2)
    assert device_seconds(found, 0) == pytest.approx(
        {"forward": 3, "backward": 6, "exposed": 0, "optimizer": 1.2}
    )


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
        operators.append(op(f"o{i}", inputs, 4, rng.choice([0, 40, 400])))
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
    return graph, profile, Cluster(nodes=nodes, links=links)


def random_plan(rng, n_devices):
    cuts = rng.choice(
        [{}, {"sample": 2}, {"feature": 2}, {"sample": [3, 1]}, {"sample": 2, "feature": 2}]
    )
    n = 1
    for cut in cuts.values():
        n *= cut if isinstance(cut, int) else len(cut)
    return OperatorPlan(dict(cuts), [rng.randrange(n_devices) for _ in range(n)])


def test_delta_simulation_equals_the_full_one_on_thousands_of_moves():
    rng = random.Random(1)
    n_moves = 0
    for case in range(20):
        graph, profile, cluster = random_case(rng)
        names = [o.name for o in graph.operators[1:]]
        plans = {name: random_plan(rng, cluster.n_devices) for name in names}
        flow = {"n_microbatches": rng.choice([1, 2]), "stages": [Stage(recompute=case % 3 == 0)]}
        options = SimulatorOptions(overlap=case % 4 != 0, bucket_bytes=100)
        kept = Simulator(graph, profile, cluster, options=options)
        trial = Trial.from_strategy(kept, Strategy(name="s", batch=8, operators=plans, **flow))
        for _ in range(100):
            name = rng.choice(names)
            plans[name] = random_plan(rng, cluster.n_devices)
            trial.replace(graph.index()[name], plans[name])
            delta = trial.outcome()
            fresh = Simulator(graph, profile, cluster, options=options)
            full = fresh.simulate(Strategy(name="s", batch=8, operators=plans, **flow)).outcome
            assert delta.step_s == full.step_s
            assert (delta.memory_bytes == full.memory_bytes).all()
            np.testing.assert_array_equal(delta.finish, full.finish)
            n_moves += 1
    assert n_moves == 2000


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
