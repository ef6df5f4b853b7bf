"""The price of an attention whose devices give each other keys and values."""

import pytest
from made_graphs import profile_of
from simulated import MB, cluster_of, simulate, timeline

from harness.domain.graph import Graph, Operator
from harness.domain.strategy import OperatorPlan
from harness.plan.builders import tensor_parallel
from harness.plan.costs import PlanRequest
from harness.plan.portfolio import plan
from harness.plan.report import describe_strategy
from harness.plan.show import strategy_lines

NAMES = {
    "input": "attention",
    "gathered": "attention over gathered keys",
    "ring": "ring attention",
}
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
    [
        ("gathered", 1.0, 8.0, 8.0),
        ("ring", 1.0, 8.0 - 2, (8.0 - 4) + 8),
        ("ring", 4.0, 0.0, 2.0),
    ],
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
    # width 1; and 4 positions of the input, received.
    assert kept["gathered"] - kept["ring"] == 2 * 8 * 4 - 8
    assert kept["input"] - kept["gathered"] == 4 * 4


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
