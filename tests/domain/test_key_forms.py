"""Keys and values of an attention that is cut by positions: who moves what, and when."""

import pytest

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph, Operator
from harness.domain.key_forms import (
    flops_ratio,
    foreign_key_elements,
    kept_elements,
    rounds,
    scores_share,
)
from harness.domain.sharding import full_shape, input_block
from harness.domain.strategy import OperatorPlan, Strategy, validate
from harness.errors import StrategyError

SHAPE = {"sample": 2, "seq": 8, "feature": 4}
CLUSTER = Cluster.uniform(4, 1, inside_bytes_per_s=1e9, memory_bytes=1 << 30)


def graph_of(key_features=2, length=8, shape=SHAPE):
    attention = Operator(
        name="a", kind="attention", inputs=["x", "m"], shape=shape,
        attrs={"n_heads": 2, "key_features": key_features},
    )  # fmt: skip
    inputs = [
        Operator(name="x", kind="input", shape=SHAPE),
        Operator(name="m", kind="input", shape={**SHAPE, "seq": length}),
    ]
    return Graph(name="attention", batch=2, operators=[*inputs, attention])


@pytest.mark.parametrize(
    ("keys", "n", "is_backward", "beside", "alone"),
    [
        ("input", 4, False, (0, 0, 0, 0), 0),
        ("gathered", 4, False, (0, 0, 0, 0), 3),
        ("gathered", 4, True, (0, 0, 0, 0), 3),
        ("ring", 4, False, (1, 1, 1, 0), 0),
        # Gradients leave a round after their block: two messages beside the third of four rounds.
        ("ring", 4, True, (1, 1, 2, 1), 1),
        ("ring", 2, True, (1, 0), 1),
    ],
)
def test_messages_of_each_round(keys, n, is_backward, beside, alone):
    assert rounds(keys, n, is_backward=is_backward) == (beside, alone)


def test_a_block_that_has_its_own_keys_reads_and_computes_and_keeps_less():
    operator = graph_of().operators[-1]
    shape = full_shape(operator, batch=2, graph_batch=2)
    block = ((0, 2), (2, 4), (0, 4), (0, 2))
    read = {
        own: input_block(operator, shape, block, SHAPE, argument=1, has_own_keys=own)
        for own in (False, True)
    }
    assert read == {False: ((0, 2), (0, 8), (0, 4)), True: ((0, 2), (2, 4), (0, 4))}
    intervals = dict(zip(shape, block, strict=True))
    assert scores_share(operator, shape) == 4 * 8 * 4 / (4 * 8 * 4 + 4 * 4 * 4 + 2 * 2 * 4)
    # Queries and mixed values of 2 positions; all keys and values for each head, or 2 positions'.
    assert kept_elements(operator, "gathered", shape, intervals) == 2 * (2 * 8 + 8 * 8)
    assert kept_elements(operator, "ring", shape, intervals) == 2 * (2 * 8 + 2 * 2)
    assert foreign_key_elements("gathered", shape, intervals) == 2 * 2 * (8 - 2) * 4
    assert foreign_key_elements("ring", shape, intervals) == 0


@pytest.mark.parametrize(
    ("keys", "is_causal", "positions", "scored", "n_projected"),
    [
        ("input", False, (2, 4), 8, 8),
        ("gathered", False, (2, 4), 8, 2),
        ("ring", False, (2, 4), 8, 2),
        ("gathered", True, (2, 4), 4, 2),  # masks what it has computed of the keys up to 4
        ("ring", True, (2, 4), 3, 2),
        ("ring", True, (6, 8), 7, 2),
    ],
)
def test_flops_of_a_quarter_beside_those_of_the_whole(
    keys, is_causal, positions, scored, n_projected
):
    operator = graph_of().operators[-1]
    operator.attrs["is_causal"] = is_causal
    shape = full_shape(operator, batch=2, graph_batch=2)
    # A query of width 4: a column of scores and mixed values for each key, and two projections of 4
    # columns; a key and its value: one column each of 4.
    quarter = 2 * (4 * 4 * (scored + 4)) + n_projected * 4 * 4
    whole = 8 * (4 * 4 * ((4 if is_causal else 8) + 4) + 4 * 4)
    found = flops_ratio(operator, keys, shape, positions)
    assert found == pytest.approx(quarter / (whole / 4))
    operator.attrs["scores_all"] = True
    found = flops_ratio(operator, keys, shape, positions)
    assert found == pytest.approx(quarter / (2 * (4 * 4 * (8 + 4) + 4 * 4)))


@pytest.mark.parametrize(
    ("graph", "cuts", "devices", "why"),
    [
        (graph_of(), {"seq": 2}, [1, 1], "several blocks on one device of"),
        (graph_of(), {"heads": 2}, [0, 1], "cut it along 'seq'"),
        (graph_of(key_features=0), {"seq": 2}, [0, 1], "captured as one operator"),
        (graph_of(length=6), {"seq": 2}, [0, 1], "as many keys as queries"),
        (graph_of(shape={"seq": 8, "feature": 4}), {"seq": 2}, [0, 1], "captured as one operator"),
    ],
)
def test_keys_that_cannot_travel_are_refused(graph, cuts, devices, why):
    for keys in ("gathered", "ring"):
        plans = {"a": OperatorPlan(cuts, devices, keys=keys)}
        strategy = Strategy(name="s", batch=2, operators=plans)
        with pytest.raises(
            StrategyError, match=f"operator 'a' .attention. has keys '{keys}', .*{why}"
        ):
            validate(strategy, graph, CLUSTER)


def test_a_ring_drops_no_probabilities():
    graph = graph_of()
    graph.operators[-1].attrs["has_dropout"] = True
    gathered, ring = (
        Strategy(name="s", batch=2, operators={"a": OperatorPlan({"seq": 2}, [0, 1], keys=keys)})
        for keys in ("gathered", "ring")
    )
    validate(gathered, graph, CLUSTER)
    with pytest.raises(StrategyError, match=r"without dropout .*: use keys 'input' or 'gathered'"):
        validate(ring, graph, CLUSTER)


def test_keys_are_part_of_a_strategy_file():
    plans = {"a": OperatorPlan({"seq": 2}, [0, 1], keys="ring")}
    strategy = Strategy(name="s", batch=2, operators=plans)
    validate(strategy, graph_of(), CLUSTER)
    data = strategy.to_json()
    assert b'"keys"' in data
    assert Strategy.from_json(data) == strategy
    with pytest.raises(StrategyError, match="keys"):
        Strategy.from_json(data.replace(b'"ring"', b'"rung"'))
