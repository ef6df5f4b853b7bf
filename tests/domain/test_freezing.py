"""How many layers are frozen when."""

import pytest

from harness.domain.freezing import freezable_layers, n_frozen_by_norms, n_frozen_layers
from harness.domain.graph import Graph, Operator


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
