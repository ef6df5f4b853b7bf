"""Find out how an attention with its projections is cut by positions.

Operators that lead to keys or values alone, or to these and queries, compute `keys`; a device does
so for all positions, or for its own. All others compute queries, scores and output of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import fx

from harness.runtime.tracing.attention_core import Core, find_core
from harness.runtime.tracing.dim_rules import (
    ATTENTION,
    PRODUCTS,
    DimRules,
    NotCuttableError,
    operator_name,
    require,
    shape_of,
    size_of,
    slice_bounds,
)


class RowSlice(NamedTuple):
    """Where an operator takes a device's positions of a value.

    Attributes:
        with_input, with_own: whether it does so where the device computes keys of all positions,
            and where it computes its own.
    """

    dim: int
    with_input: bool
    with_own: bool


@dataclass(frozen=True)
class FoundPositions:
    """How the nodes of an attention are cut by positions.

    Attributes:
        n: positions of the output.
        keys: nodes that compute keys.
        numbers: as `DimRules.numbers`.
        slices: by reader and value.
        of_inputs: by input of a projection, `keys` if a device wants all positions to compute keys,
            or `rows`; other values from elsewhere are read whole.
    """

    n: int
    keys: Collection[fx.Node]
    numbers: Sequence[tuple[fx.Node, int, int | None]]
    slices: Mapping[tuple[fx.Node, fx.Node], RowSlice]
    of_inputs: Mapping[fx.Node, str]
    core: Core | None


class _RowRules(DimRules):
    """The dim of positions, which is never merged; of scores, that of the queries."""

    def of_view(self, node: fx.Node, source: fx.Node, place: int) -> int:
        require(shape_of(node)[place] == size_of(source, self.dims[source]))
        return place

    def of_product(self, node: fx.Node) -> int:
        rank = len(shape_of(node))
        require(self.dims.get(node.all_input_nodes[0]) == rank - 2)
        require(all(n in self.dims for n in node.all_input_nodes))
        return rank - 2

    def of_element(self, node: fx.Node, source: fx.Node, position: int) -> int:
        return position

    def of_cut(self, node: fx.Node, name: str, position: int) -> int:
        size = size_of(node.all_input_nodes[0], position)
        require(name == "slice" and slice_bounds(node, size) == (0, size))
        return position

    def of_attention(self, node: fx.Node) -> int:
        """Of PyTorch's function."""
        operands: Any = node.args[:3]
        require(all(self.dims.get(n) == 2 for n in operands))
        for other in node.all_input_nodes:
            self.broadcast(node, other, 2)
        return 2


def find_positions(
    order: Sequence[fx.Node],
    projections: Collection[fx.Node],
    attention: fx.Node,
    heads: Mapping[fx.Node, int],
) -> FoundPositions | None:
    """How an attention is cut by positions; None if an operator mixes them or is not known.

    Args:
        order: its operators, of which the last gives the output.
        attention: PyTorch's function, or the product with the values.
        heads: position of the dim of heads in each operator's value.
    """
    try:
        rules = _propagated(order, projections)
        keys = _computing_keys(order)
        require(attention not in keys)
        of_inputs = _of_inputs(order, projections, keys)
        core = find_core(attention, heads, rules.dims)
        is_causal = any(attention.args[5:6]) or attention.kwargs.get("is_causal")
        require(core is not None or attention.target is not ATTENTION or not is_causal)
    except NotCuttableError:
        return None
    slices = {
        pair: RowSlice(dim, with_input=pair[0] not in keys, with_own=True)
        for pair, dim in rules.slices.items()
    }
    for node in order[:-1]:
        for source in () if node in keys else node.all_input_nodes:
            if (source in keys and source not in _operands(node)) or (
                node in projections and of_inputs.get(source) == "keys"
            ):
                slices[node, source] = RowSlice(rules.dims.get(source, 1), True, False)
    n = size_of(order[-1], 1)
    return FoundPositions(n, keys, rules.numbers, slices, of_inputs, core)


def _propagated(order: Sequence[fx.Node], projections: Collection[fx.Node]) -> _RowRules:
    rules = _RowRules()
    for node in order[:-1]:
        if node in projections:
            require(len(shape_of(node)) == 3)
            rules.dims[node] = 1
        elif node.target is ATTENTION:
            rules.dims[node] = rules.of_attention(node)
        else:
            rules.dims[node] = rules.follow(node)
        size_of(node, rules.dims[node])
    require(rules.dims[order[-1].all_input_nodes[0]] == 1)
    return rules


def _operands(node: fx.Node) -> tuple[Any, ...]:
    """What a row of a product's result takes all positions of."""
    if node.target is ATTENTION:
        return node.args[1:3]
    return node.args[1:2] if operator_name(node) in PRODUCTS else ()


def _computing_keys(order: Sequence[fx.Node]) -> set[fx.Node]:
    found: set[fx.Node] = set()
    for node in order:
        operands = _operands(node)
        require(not operands or node.args[0] not in operands)
        found.update(operands)
    for node in reversed(order):
        if node in found:
            found.update(node.all_input_nodes)
    found.intersection_update(order)
    for node in order:  # a tuple is cut with all of its elements
        if operator_name(node) == "getitem" and node.args[0] in found:
            found.add(node)
    return found


def _of_inputs(
    order: Sequence[fx.Node], projections: Collection[fx.Node], keys: Collection[fx.Node]
) -> dict[fx.Node, str]:
    found: dict[fx.Node, str] = {}
    for node in filter(projections.__contains__, order):
        source = node.all_input_nodes[0]
        require(len(shape_of(source)) == 3)
        found[source] = "keys" if node in keys else found.get(source, "rows")
    for node in order:
        require(node in projections or found.keys().isdisjoint(node.all_input_nodes))
    return found
