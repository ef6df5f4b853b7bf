"""What transfers take: links, interfaces, flows that share them, collectives, processor time."""

import msgspec
import pytest
from made_graphs import changed, links_between
from made_runs import cluster_of as nodes_of
from simulated import (
    BY_SAMPLES,
    MB,
    ONE,
    ZERO,
    chain,
    cluster_of,
    model,
    op,
    profile_of,
    simulate,
    simulate_chain,
    talking,
    timeline,
    two_linears,
)

from harness.domain.cluster import Cluster, CollectivePoint
from harness.domain.graph import Graph, Operator
from harness.domain.strategy import OperatorPlan, Stage
from harness.plan.builders import tensor_parallel
from harness.plan.costs import PlanRequest
from harness.plan.portfolio import plan
from harness.plan.report import describe_strategy
from harness.plan.show import strategy_lines
from harness.plan.simulate.network import Network
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import contention_seconds, events, explain


def test_a_producer_elsewhere_sends_and_gets_gradients_back():
    found = simulate_chain(ZERO, ONE, cluster_of(latency=0.5))
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


@pytest.mark.parametrize("plan", [ONE, BY_SAMPLES])
def test_an_output_of_unknown_bytes_is_waited_for(plan):
    graph, profile = chain()
    graph = changed(graph, "xab", activation_bytes=0)
    found = simulate(graph, profile, cluster_of(latency=0.5), {"a": ZERO, "b": plan})
    assert min(event.span.start_s for event in events(found) if event.ranks == (1,)) == 1.0 + 0.5
    assert found.outcome.lowered.work.edge_bytes.tolist() == [0.0]


def star(n, nic=None):
    """Node 0 sends one tensor to n consumers, each on a node of its own."""
    consumers = [op(f"b{i}", ["a"], 1) for i in range(n)]
    graph, profile = model([op("a", ["x"], 4, 8), *consumers], (1.0, 0.0))
    hosts = [f"n{i}" for i in range(n + 1)]
    nodes = nodes_of(hosts, kind="device", memory_bytes=MB, nic_bytes_per_s=nic).nodes
    links = links_between([f"{host}:0" for host in hosts], lambda a, b: (0.0, 16.0))
    plans = {"a": OperatorPlan({}, [0])}
    plans |= {f"b{i}": OperatorPlan({}, [i + 1]) for i in range(n)}
    return graph, profile, Cluster(nodes=nodes, links=links), plans


def test_an_interface_serves_its_links_one_after_another():
    free = simulate(*star(3))
    assert free.step_s == pytest.approx(1 + 2 + 1 + 2)  # links in parallel, both ways
    # The sender's interface is as fast as a link: 3 x 2 s out, and gradients 2 s each back in.
    bound = simulate(*star(3, nic=16.0))
    arrivals = [e for e in timeline(bound) if "->" in e[0] and "gradient" not in e[0]]
    assert [(s, e) for _, s, e in arrivals] == [(1, 3), (3, 5), (5, 7)]
    assert bound.step_s == pytest.approx(1 + 6 + 1 + 2)


def test_a_fast_interface_overlaps_slow_links():
    found = simulate(*star(3, nic=32.0))
    arrivals = [e for e in timeline(found) if "->" in e[0] and "gradient" not in e[0]]
    assert [(s, e) for _, s, e in arrivals] == [(1, 3), (2, 4), (3, 5)]


@pytest.mark.parametrize(("n_bytes", "arrives_s"), [(160, 6.5), (24, 5.75)])
def test_a_transfer_and_a_bucket_share_an_interface(n_bytes, arrives_s):
    """Two replicas of two stages. The gradient of `a` takes 1 s alone, from 4.5 s on; the bucket of
    `c` takes a second per 16 B, from 3.5 s on."""
    graph, profile = model([op("a", ["x"], 4, 8), op("b", ["a"], 4), op("c", ["b"], 4, n_bytes)])
    nodes = Cluster.uniform(
        4, 1, inside_bytes_per_s=16.0, between_bytes_per_s=16.0, memory_bytes=MB
    )
    first, last = OperatorPlan({"sample": 2}, [0, 1]), OperatorPlan({"sample": 2}, [2, 3])
    found = timeline(simulate(graph, profile, nodes, {"a": first, "b": last, "c": last}))
    assert ("all-reduce c", 3.5, 3.5 + n_bytes / 16) in found
    assert ("gradient of a node2:0 -> node0:0", 4.5, arrives_s) in found


def test_both_directions_of_a_link_are_apart():
    operators = [op("a", ["x"], 4), op("b", ["x"], 4), op("c", ["a"], 1), op("d", ["b"], 1)]
    graph, profile = model(operators, (1.0, 0.0))
    plans = {n: OperatorPlan({}, [d]) for n, d in (("a", 0), ("b", 1), ("c", 1), ("d", 0))}
    found = simulate(graph, profile, cluster_of(), plans)
    assert found.step_s == 4.0  # 1 s, 2 s across at once in both directions, 1 s


def test_measured_collectives_replace_the_ring():
    points = [
        CollectivePoint(
            operation="all_reduce", transport="gloo", n_ranks=2, n_bytes=n, duration_s=s
        )
        for n, s in ((12, 1.0), (1200, 100.0))
    ]
    cluster = msgspec.structs.replace(cluster_of(), collectives=points)
    # 120 bytes lie half-way on the logarithmic scale: 10 s after 4.5 s of computation.
    assert simulate_chain(BY_SAMPLES, BY_SAMPLES, cluster).step_s == pytest.approx(14.5)


@pytest.mark.parametrize(
    ("n_nodes", "transport", "measured", "seconds"),
    [
        (1, "nccl", ["all_reduce", "reduce_scatter", "all_gather"], (2.0, 3.0)),
        (4, "nccl", ["all_reduce", "reduce_scatter", "all_gather"], (2.0, 3.0)),
        # Over gloo both are messages.
        (1, "gloo", ["all_reduce", "reduce_scatter", "all_gather"], (0.5, 0.5)),
        (1, "nccl", ["all_reduce"], (0.5, 0.5)),
        (1, "nccl", [], (0.75, 0.75)),
        (1, "ucc", ["all_reduce"], (0.75, 0.75)),
        # Half of 1 s within each node, then two rings of 0.25 s that share a NIC.
        (2, "nccl", ["reduce_scatter", "all_gather"], (0.5 + 2 * 0.25,) * 2),
    ],
)
def test_parts_take_what_was_measured_else_half_of_an_all_reduce(
    n_nodes, transport, measured, seconds
):
    known_s = {"all_reduce": 1.0, "reduce_scatter": 2.0, "all_gather": 3.0}
    points = [
        CollectivePoint(
            operation=name, transport=transport, n_ranks=4, n_bytes=1000, duration_s=known_s[name]
        )
        for name in measured
    ]
    where = Cluster.uniform(n_nodes, 4 // n_nodes, inside_bytes_per_s=1e3, memory_bytes=1)
    network = Network(msgspec.structs.replace(where, collectives=points))
    found = [network.priced(name, (0, 1, 2, 3), 1000) for name in ("reduce_scatter", "all_gather")]
    assert tuple(one.duration_s for one in found) == pytest.approx(seconds)
    if "reduce_scatter" in measured and n_nodes == 4:
        # Of three devices, at twice the largest size.
        assert network.priced("reduce_scatter", (0, 1, 3), 2000).duration_s == pytest.approx(
            2 * 2.0 * (2 / 3) / (3 / 4)
        )
        assert max(seconds for _, seconds in found[0].occupied) == 2.0


def test_a_curve_of_one_node_is_not_that_of_groups_between_nodes():
    point = CollectivePoint(
        operation="all_reduce", transport="nccl", n_ranks=2, n_bytes=100, duration_s=1.0
    )
    nodes = Cluster.uniform(2, 2, inside_bytes_per_s=1e3, between_bytes_per_s=2.0, memory_bytes=1)
    network = Network(msgspec.structs.replace(nodes, collectives=[point]))
    found = [network.all_reduce(group, 100).duration_s for group in ((0, 1), (0, 2), (0, 1, 2, 3))]
    assert found == [1.0, 50.0, 75.0]
    wide = msgspec.structs.replace(point, n_ranks=4, duration_s=9.0)
    network = Network(msgspec.structs.replace(nodes, collectives=[point, wide]))
    found = [network.all_reduce(group, 100).duration_s for group in ((0, 1), (0, 2), (0, 1, 2, 3))]
    assert found == pytest.approx([1.0, 6.0, 9.0])


def test_replicas_are_those_of_nodes_or_of_the_devices_of_one():
    two, one = (
        Network(Cluster.uniform(n, 4 // n, inside_bytes_per_s=1e3, memory_bytes=1)) for n in (2, 1)
    )
    assert two.replicas((0, 1, 2, 3)) == [(0, 1), (2, 3)]
    assert two.replicas((1, 3)) == [(1,), (3,)]
    assert one.replicas((0, 1, 2, 3)) == [(0,), (1,), (2,), (3,)]


def test_replicas_of_several_nodes_sum_gradients_within_and_average_a_part_between():
    cluster = Cluster.uniform(2, 2, inside_bytes_per_s=16.0, memory_bytes=10**6)
    plan = OperatorPlan({"sample": 4}, [0, 1, 2, 3])
    options = SimulatorOptions(bucket_bytes=1).averaging(4)
    found = timeline(simulate_chain(plan, plan, cluster, options=options))
    # Rings of four devices for a fourth of 40 B and of 80 B, from the first forward on; then rings
    # of two for all, at 16 B/s, whose links those have used.
    assert [one for one in found if one[0].startswith(("all-reduce", "average"))] == [
        ("average b", 0.25, 0.25 + 0.9375),
        ("average a", 1.1875, 1.1875 + 1.875),
        ("all-reduce b", 3.0625, 3.0625 + 2.5),
        ("all-reduce a", 5.5625, 5.5625 + 5.0),
    ]


def test_a_device_fetches_a_region_once_for_all_that_read_it_there():
    graph, profile = model([op("a", ["x"], 4, 8), *(op(name, ["a"], 1) for name in "bcd")])
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


def test_what_crosses_devices_is_told_of_both_ways_and_all_microbatches():
    found = simulate_chain(ZERO, OperatorPlan({}, [1], 1), n_microbatches=3, stages=[Stage()] * 2)
    # a's 32 B, as 3, 3 and 2 of 8 samples, and the gradient of them.
    assert "per step 64 B of activations and their gradients" in "\n".join(explain(found))
    assert {event.span.n_bytes for event in events(found) if "->" in event.span.label} == {
        round(32 / 3)
    }


def test_sums_are_told_of_the_mean_microbatch():
    graph, profile, cluster, plans = two_linears(3)
    found = simulate(graph, profile, cluster, plans, n_microbatches=3)
    # b's 32 B and their gradient, as 12, 12 and 8.
    assert {event.span.n_bytes for event in events(found) if "sum" in event.span.label} == {11}
    assert "66 B of activations too" in "\n".join(explain(found))


def test_transfers_take_computing_time_from_both_ends():
    operators = [op("a", ["x"], 4), op("s", ["x"], 1), op("b", ["a"], 1), op("r", ["x"], 1)]
    graph, profile = model(operators, (4.0, 0.0))
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


def test_what_arrives_in_parts_is_put_together():
    options = SimulatorOptions(stream_s_per_byte=1 / 32)
    free = simulate_chain(BY_SAMPLES, ZERO)
    found = simulate_chain(BY_SAMPLES, ZERO, options=options)
    # b reads and writes the 32 B of a, and device 1 gets all of its part's gradient; 80 B of
    # gradients of a, on both, are copied into a bucket.
    assert found.step_s - free.step_s == 2 * 32 / 32 + 2 * 80 / 32
    # Device 1 uses its half as it arrives; its gradient is added to the other half's on device 0.
    found = simulate_chain(ZERO, BY_SAMPLES, options=options)
    seconds = [end - start for name, start, end in timeline(found) if name == "a"]
    assert seconds == [1, 2 + 3 * 16 / 32]


NAMES = {"input": "attention", "gathered": "attention over gathered keys", "ring": "ring attention"}
SHAPE = {"sample": 1, "seq": 8, "feature": 4}


def attention(n_heads=2, key_features=2):
    """x -> n (1 s, 2 s) -> a (13 s, 26 s) -> b (1 s, 2 s), a byte per element."""
    operators = [Operator(name="x", kind="input", shape=SHAPE)]
    for name, kind, inputs, attrs in (
        ("n", "layer_norm", ["x"], {"n_normalized": 1}),
        ("a", "attention", ["n", "n"], {"n_heads": n_heads, "key_features": key_features}),
        ("b", "linear", ["a"], {"in_features": 4}),
    ):
        fields = {"inputs": inputs, "attrs": attrs, "activation_bytes": 32, "parameter_bytes": 1}
        operators.append(Operator(name=name, kind=kind, shape=SHAPE, **fields))
    graph = Graph(name="attention", batch=1, operators=operators)
    return graph, profile_of(graph, {"n": (1.0, 2.0), "a": (13.0, 26.0), "b": (1.0, 2.0)})


def simulated(keys, bandwidth=1.0):
    graph, profile = attention()
    cut = OperatorPlan({"seq": 2}, [0, 1])
    plans = {"n": cut, "a": OperatorPlan({"seq": 2}, [0, 1], keys=keys), "b": cut}
    return simulate(graph, profile, cluster_of(bandwidth=bandwidth), plans, batch=1)


# Half of the positions take half of 13 s, of which scores are 8/13, 2 s in each of two rounds. Keys
# and values of 4 positions are 8 B, and their gradients too.
@pytest.mark.parametrize(
    ("keys", "bandwidth", "forward_s", "backward_s"),
    [("gathered", 1.0, 8.0, 8.0), ("ring", 1.0, 8.0 - 2, (8.0 - 4) + 8), ("ring", 4.0, 0.0, 2.0)],
)
def test_messages_cost_what_no_round_hides(keys, bandwidth, forward_s, backward_s):
    found = timeline(simulated(keys, bandwidth))
    spans = {name: (start, end) for name, start, end in found if "keys" in name}
    assert spans["keys of a"] == (7.0, 7.0 + forward_s)
    computed = [end for name, _, end in found if name == "a"]
    assert computed[:2] == [7.0, 7.0]
    start, end = spans["gradient of keys of a"]
    assert end - start == pytest.approx(backward_s)
    assert not [name for name, *_ in found if "->" in name]


def test_gathering_the_input_moves_it_and_projects_all_of_it():
    found = timeline(simulated("input"))
    assert [one for one in found if one[1] < 20 and "->" in one[0]] == [
        ("n node0:0 -> node0:1", 0.5, 16.5),
        ("n node0:1 -> node0:0", 0.5, 16.5),
    ]
    assert [one for one in found if one[0] == "a"][:2] == [("a", 16.5, 23.5)] * 2


def test_a_ring_keeps_keys_of_its_own_positions_only():
    kept = {keys: simulated(keys).memory_bytes["node0:0"] for keys in ("input", "gathered", "ring")}
    # Queries and mixed values of 4 positions; keys and values of 8 positions of width 4, or of 4 of
    # width 1; and 8 positions of the input, 4 of them received.
    assert kept["gathered"] - kept["ring"] == 2 * 8 * 4 - 8
    assert kept["input"] - kept["gathered"] == 8 * 4


def test_every_device_of_a_ring_with_cut_heads_meets_those_with_its_heads():
    graph, profile = attention()
    plans = dict.fromkeys("nb", OperatorPlan({"seq": 4}, [0, 1, 2, 3]))
    plans["a"] = OperatorPlan({"seq": 2, "heads": 2}, [3, 1, 2, 0], keys="ring")
    found = simulate(graph, profile, cluster_of(4), plans, batch=1)
    sums = found.outcome.lowered.edges.sums
    rings = {one.group: one.n_bytes for one in sums if one.passes is not None}
    assert rings == {(3, 2): (4, 4), (1, 0): (4, 4)}


@pytest.mark.parametrize(
    ("key_features", "bandwidth", "memory_bytes", "keys"),
    [
        (8, 4.0, MB, "input"),  # as many heads of keys as of queries: keys and values are wider
        (2, 1.0, MB, "gathered"),
        (2, 4.0, MB, "ring"),  # computing hides most messages
        (2, 1.0, 120, "ring"),  # the others do not fit
    ],
)
def test_a_search_chooses_the_form_that_pays(key_features, bandwidth, memory_bytes, keys):
    graph, profile = attention(1, key_features)
    cluster = cluster_of(bandwidth=bandwidth, memory=memory_bytes)
    request = PlanRequest(graph=graph, profile=profile, cluster=cluster, budget=400)
    found = plan(request)
    assert found.strategy.operators["a"] == OperatorPlan({"seq": 2}, [0, 1], keys=keys)
    assert f"seq-parallel {NAMES[keys]}" in describe_strategy(found.strategy, graph)
    assert any(f"keys {keys}" in line for line in strategy_lines(found.strategy)) == (
        keys != "input"
    )


@pytest.mark.parametrize(("key_features", "keys"), [(2, "gathered"), (8, "input")])
def test_tensor_parallelism_cuts_by_positions_where_heads_are_too_few(key_features, keys):
    graph, _ = attention(2, key_features)
    strategy = tensor_parallel(graph, cluster_of(4), 1)
    assert strategy.operators["a"] == OperatorPlan({"seq": 4}, [0, 1, 2, 3], keys=keys)
    assert tensor_parallel(graph, cluster_of(2), 1).operators["a"].partition == {"heads": 2}


def test_bandwidths_of_interfaces_may_be_whole_numbers_beside_a_node_without_a_limit():
    nodes = Cluster.uniform(2, 1, inside_bytes_per_s=10, memory_bytes=MB).nodes
    for limits in ((10, 20), (10, None)):
        given = zip(nodes, limits, strict=True)
        own = [msgspec.structs.replace(node, nic_bytes_per_s=limit) for node, limit in given]
        rate = Network(Cluster(nodes=own)).rate(0, 1)
        assert rate == 10.0
