"""Graphs validate themselves; which of their layers are frozen when."""

import pytest

from harness.domain.freezing import freezable_layers, n_frozen_by_norms, n_frozen_layers
from harness.domain.graph import Graph, Operator
from harness.errors import GraphError


def op(name, *inputs, **fields):
    return Operator(name=name, kind="other", inputs=list(inputs), **fields)  # type: ignore[arg-type]


def diamond():
    operators = [op("a"), op("b", "a"), op("c", "a"), op("d", "c", "b", "b")]
    return Graph(name="diamond", operators=operators, batch=8)


def test_operators_that_share_a_written_buffer_or_a_batch_norm_are_planned_alike():
    writes = {"a": ["u"], "b": ["v"], "d": ["w"], "e": ["u", "v"], "f": ["w"]}
    operators = [op(name, attrs={"writes_buffers": names}) for name, names in writes.items()]
    operators.append(op("g", attrs={"shares_norm_with": "d", "writes_buffers": ["w"]}))
    graph = Graph(name="six", operators=[*operators, op("h")], batch=8)
    assert graph.planned_alike() == [("a", "b"), ("a", "e"), ("d", "f"), ("d", "g")]


def test_hash_depends_on_content_only():
    assert diamond().content_hash() == diamond().content_hash()
    other = Graph(name="diamond", operators=[*diamond().operators, op("e")], batch=8)
    assert other.content_hash() != diamond().content_hash()


def test_from_unordered_sorts_and_keeps_the_listed_order_where_it_can():
    graph = Graph.from_unordered("g", [op("d", "b", "c"), op("c", "a"), op("a"), op("b", "a")])
    assert [o.name for o in graph.operators] == ["a", "c", "b", "d"]


@pytest.mark.parametrize(
    ("operators", "message"),
    [
        ([], "graph 'g' is empty"),
        ([op("a"), op("a")], "two operators named 'a'"),
        ([op("a", "x")], "operator 'a' reads from an unknown operator 'x'"),
        ([op("s"), op("a", "s", "c"), op("b", "a"), op("c", "b")], "cyclic: a -> b -> c -> a"),
        ([op("a", "a")], "cyclic: a -> a"),
        ([op("b", "a"), op("a")], "'b' comes before its producer 'a'"),
    ],
)
def test_inconsistent_graph_is_refused_by_name(operators, message):
    with pytest.raises(GraphError, match=message):
        Graph(name="g", operators=operators)


def test_cycle_is_named_though_it_is_listed_out_of_order():
    with pytest.raises(GraphError, match="cyclic: b -> a -> b"):
        Graph.from_unordered("g", [op("end", "b"), op("a", "b"), op("b", "a")])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"parameter_bytes": -1}, "'a' has parameter_bytes -1"),
        ({"activation_bytes": -4}, "'a' has activation_bytes -4"),
        ({"forward_flops": float("nan")}, "'a' has forward_flops nan"),
        ({"shape": {"sample": 0}}, "'a' has sample 0"),
        ({"shape": {"batch": 3}}, "unknown dim 'batch'"),
        ({"attrs": {"n_heads": 0}}, "'a' has n_heads 0: give a number >= 1"),
        ({"attrs": {"stride": [1, -2]}}, r"'a' has stride \[1, -2\]: give a number >= 1"),
        ({"attrs": {"kept_bytes": -1}}, "'a' has kept_bytes -1: give a number >= 0"),
        ({"attrs": {"padding": "same", "n_rows": "9"}}, "'a' has n_rows '9': give a number >= 1"),
    ],
)
def test_impossible_operator_is_refused_by_name(fields, message):
    with pytest.raises(GraphError, match=message):
        op("a", **fields)


@pytest.mark.parametrize(
    "changed",
    [
        {"equation": "tec,td"},
        {"equation": "tec,td->ec"},
        {"equation": "tec->ecd"},
        {"equation": 3},
        {"n_summed": 0},
        {"n_summed": "many"},
        {"summed": None},
    ],
)
def test_an_equation_that_does_not_fit_its_operator_is_refused(changed):
    right = {"equation": "tec,td->ecd", "summed": "t", "n_summed": 4}
    attrs = {key: x for key, x in {**right, **changed}.items() if x is not None}
    fields = {"kind": "einsum", "inputs": ["a", "b"]}
    shape = {"seq": 2, "feature": 3, "height": 4}
    Operator(name="o", shape=shape, attrs=right, **fields)
    with pytest.raises(GraphError, match="operator 'o' has the equation"):
        Operator(name="o", shape=shape, attrs=attrs, **fields)


def test_the_schedule_is_that_of_pipetransformer():
    """12 layers and a third, as the released code computes them."""
    assert [n_frozen_layers(12, 1 / 3, t) for t in range(8)] == [0, 4, 7, 9, 10, 11, 11, 12]


@pytest.mark.parametrize(
    ("n_frozen", "norms", "wanted"),
    [
        (0, [3, 1, 2, 4, 5, 6], 2),  # up to the layer of the least gradient, which is the second
        (0, [9, 8, 7, 6, 5, 1], 2),  # a third of six is the most
        (2, [0, 0, 5, 4, 1, 3], 4),  # a third of four, rounded up
        (2, [0, 0, 1, 4, 2, 3], 3),
        (5, [0, 0, 0, 0, 0, 3], 6),
        (6, [0, 0, 0, 0, 0, 0], 6),
    ],
)
def test_the_gradient_rule_takes_the_least_layer_or_the_bound(n_frozen, norms, wanted):
    assert n_frozen_by_norms(1 / 3, n_frozen, norms) == wanted


def operator(name, *parameters):
    attrs = {"module": name, "parameters": list(parameters)} if parameters else {"module": name}
    return Operator(name=name, kind="linear", shape={"sample": 2}, attrs=attrs)


@pytest.mark.parametrize(
    ("operators", "layers"),
    [
        # An embedding goes with the first block; a head has parameters of its own.
        (
            [operator("embed", "embed.weight"), operator("blocks.0", "blocks.0.weight"),
             operator("relu"), operator("blocks.1", "blocks.1.weight"),
             operator("head", "head.weight")],
            [("embed blocks.0 relu", "blocks.0.weight embed.weight"),
             ("blocks.1", "blocks.1.weight")],
        ),
        # Without another head the last layer is it.
        ([operator("0.a", "0.a.weight"), operator("1.a", "1.a.weight")], [("0.a", "0.a.weight")]),
        # The head is tied to the embedding, which is trained to the end.
        (
            [operator("embed", "embed.weight"), operator("blocks.0", "blocks.0.weight"),
             operator("head", "embed.weight")],
            [("embed blocks.0", "blocks.0.weight")],
        ),
        ([operator("a", "a.weight"), operator("b", "b.weight")], []),
    ],
)  # fmt: skip
def test_layers_are_found_by_numbers(operators, layers):
    found = freezable_layers(Graph(name="g", batch=2, operators=operators))
    assert [(" ".join(x.operators), " ".join(sorted(x.parameters))) for x in found] == layers
