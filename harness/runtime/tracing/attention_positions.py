"""Find out how an attention with its projections is cut by positions, and what mixes its values.

Operators that lead to keys or values alone, or to these and queries, compute `keys`; a device does
so for all positions, or for its own. All others compute queries, scores and output of its own. The
core of an attention is read off its graph: queries, keys, values, mask and form.

q ------------------------------------+
k -> repeat for queries -> transpose -+- product -> scale -> add mask -> softmax -+- product
v -> repeat for queries ----------------------------------------------------------+
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, fx, nn

from harness.runtime.models.attention import AttentionForm
from harness.runtime.tracing.attention_region import RowSlice
from harness.runtime.tracing.constructs import argument_of
from harness.runtime.tracing.dim_rules import (
    ATTENTION,
    PRODUCTS,
    DimRules,
    NotCuttableError,
    SizeAt,
    natural,
    operator_name,
    require,
    shape_of,
    size_of,
    slice_bounds,
)

_REPEATS = (
    "unsqueeze", "slice", "expand", "view", "reshape", "_unsafe_view", "clone", "contiguous",
    "repeat_interleave",
)  # fmt: skip
_CASTS = ("to", "type_as", "contiguous", "clone", "alias")


class Core(NamedTuple):
    """Nodes of a model's graph.

    Attributes:
        scores, output: the operators that read queries and give mixed values.
        key, value: (samples, groups, positions, features), before they are repeated.
        mask: its reader, and itself; added to the scores, or true where they count.
        scores_all: there are scores of hidden positions, too.
    """

    scores: fx.Node
    key: fx.Node
    value: fx.Node
    mask: tuple[fx.Node, fx.Node] | None
    output: fx.Node
    n_groups: int
    scores_all: bool
    form: AttentionForm


class _Steps(NamedTuple):
    """What is between the products of an attention."""

    scores: fx.Node
    key: Any
    scale: float
    mask: tuple[fx.Node, fx.Node] | None
    dropout: float


def find_core(
    attention: fx.Node, heads: Mapping[fx.Node, int], rows: Mapping[fx.Node, int]
) -> Core | None:
    """The parts of an attention; None if it does more than scale and mask its scores.

    Args:
        attention: PyTorch's function, or the product with the values.
        heads, rows: positions of the dims of heads and of positions, by the attention's operators.
    """
    is_function = attention.target is ATTENTION
    steps = _of_function(attention) if is_function else _of_products(attention)
    if steps is None or (steps.mask is not None and steps.mask[1] in rows):
        return None
    value: Any = attention.args[2 if is_function else 1]
    key, value = map(_before_repeats, (steps.key, value))
    query: Any = steps.scores.args[0]
    for node in (query, key, value, attention):
        if len(shape_of(node)) != 4 or (heads.get(node), rows.get(node)) != (1, 2):
            return None
    n_heads, n_groups = shape_of(query)[1], shape_of(key)[1]
    widths = {shape_of(node)[3] for node in (query, key, value)}
    if len(widths) > 1 or n_heads % n_groups or shape_of(value)[1] != n_groups:
        return None
    is_causal = is_function and bool(argument_of(attention, 5, "is_causal"))
    hidden = "any" if steps.mask is None else _hidden(steps.mask[1])
    (head_dim,) = widths
    form = AttentionForm(
        head_dim=head_dim,
        queries_per_group=n_heads // n_groups,
        is_causal=is_causal or hidden == "later",
        scale=steps.scale,
        dropout=steps.dropout,
    )
    return Core(
        scores=steps.scores,
        key=key,
        value=value,
        mask=steps.mask if hidden == "any" else None,
        output=attention,
        n_groups=n_groups,
        scores_all=not is_causal,
        form=form,
    )


def _of_function(node: fx.Node) -> _Steps:
    mask, scale = argument_of(node, 3, "attn_mask"), argument_of(node, 6, "scale")
    return _Steps(
        scores=node,
        key=node.args[1],
        scale=scale or shape_of(node)[-1] ** -0.5,
        mask=None if mask is None else (node, mask),
        dropout=float(argument_of(node, 4, "dropout_p", default=0.0)),
    )


def _of_products(node: fx.Node) -> _Steps | None:
    scale, dropout, mask = 1.0, 0.0, None
    at: Any = node.args[0]
    while operator_name(at) != "softmax":
        if operator_name(at) == "dropout" and not dropout:
            _, probability, is_on = at.args
            dropout = float(probability) if is_on else 0.0
        elif operator_name(at) not in _CASTS:
            return None
        at = at.args[0]
    if natural(argument_of(at, 1), len(shape_of(at))) != len(shape_of(at)) - 1:
        return None
    accurate = [at]
    at = at.args[0]
    while operator_name(at) not in PRODUCTS:
        name, other = operator_name(at), at.args[1] if len(at.args) > 1 else None
        number = _number(other)
        if name == "add" and isinstance(other, fx.Node) and not (at.kwargs or mask):
            if scale != 1.0 or not other.meta["val"].is_floating_point():
                return None
            mask = at, other
        elif name in ("mul", "div") and number and not at.kwargs:
            scale = scale * number if name == "mul" else scale / number
        elif name not in _CASTS:
            return None
        accurate.append(at)
        at = at.args[0]
    if any(_is_narrower(each, at) for each in accurate):
        return None
    key = at.args[1]
    if operator_name(key) != "transpose":
        return None
    rank = len(shape_of(key))
    if {natural(dim, rank) for dim in key.args[1:3]} != {rank - 2, rank - 1}:
        return None
    return _Steps(at, key.args[0], scale, mask, dropout)


def _before_repeats(node: Any) -> fx.Node:
    """The value of which an operand has copies for the queries of a group."""
    while operator_name(node) in _REPEATS:
        node = node.args[0]
    assert isinstance(node, fx.Node)
    return node


def _number(value: Any) -> float | None:
    """A number, or the only element of a constant."""
    if isinstance(value, fx.Node):
        value = _constant(value)
        value = value.item() if value is not None and value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _constant(node: fx.Node) -> Tensor | None:
    if node.op != "get_attr" or node.graph.owning_module is None:
        return None
    found = attrgetter(str(node.target))(node.graph.owning_module)
    is_known = isinstance(found, Tensor) and not isinstance(found, nn.Parameter)
    return found if is_known and not found.is_meta else None


def _is_narrower(node: fx.Node, than: fx.Node) -> bool:
    """Whether a value is less accurate than another."""
    own, other = node.meta["val"].dtype, than.meta["val"].dtype
    return bool(torch.promote_types(own, other) != own)


def _hidden(node: fx.Node) -> Literal["nothing", "later", "any"]:
    """The positions that a mask hides, if it is a constant of all samples and heads."""
    mask = _constant(node)
    if mask is None or mask.dim() < 2 or mask.numel() != math.prod(mask.shape[-2:]):
        return "any"
    mask = mask.view(mask.shape[-2:])
    if mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill_(~mask, -torch.inf)
    hidden = mask.new_full(mask.shape, torch.finfo(mask.dtype).min).triu(1)
    if not bool(mask.any()):
        return "nothing"
    is_later = mask.shape[0] == mask.shape[1] and torch.equal(mask.clamp(min=hidden.min()), hidden)
    return "later" if is_later else "any"


@dataclass(frozen=True)
class FoundPositions:
    """How the nodes of an attention are cut by positions.

    Attributes:
        n: positions of the output.
        keys: nodes that compute keys.
        slices: by reader and value.
        of_inputs: by input of a projection, `keys` if a device wants all positions to compute keys,
            or `rows`; other values from elsewhere are read whole.
    """

    n: int
    keys: Collection[fx.Node]
    numbers: Sequence[SizeAt]
    slices: Mapping[tuple[fx.Node, fx.Node], RowSlice]
    of_inputs: Mapping[fx.Node, str]
    core: Core | None


class _RowRules(DimRules):
    """The dim of positions, which is never merged; of scores, that of the queries."""

    def start(self, projection: fx.Node) -> int:
        require(len(shape_of(projection)) == 3)
        return 1

    def of_view(self, node: fx.Node, source: fx.Node, place: int) -> int:
        require(shape_of(node)[place] == size_of(source, self.dims[source]))
        return place

    def of_product(self, node: fx.Node) -> int:
        rank = len(shape_of(node))
        require(self.dims.get(node.all_input_nodes[0]) == rank - 2)
        require(all(n in self.dims for n in node.all_input_nodes))
        return rank - 2

    def of_cut(self, node: fx.Node, name: str, position: int) -> int:
        size = size_of(node.all_input_nodes[0], position)
        require(name == "slice" and slice_bounds(node, size) == (0, size))
        return position

    def of_attention(self, operands: Sequence[fx.Node]) -> int:
        require(all(self.dims.get(n) == 2 for n in operands))
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
        is_causal = attention.target is ATTENTION and argument_of(attention, 5, "is_causal")
        require(core is not None or not is_causal)
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
    return FoundPositions(size_of(order[-1], 1), keys, rules.numbers, slices, of_inputs, core)


def _propagated(order: Sequence[fx.Node], projections: Collection[fx.Node]) -> _RowRules:
    rules = _RowRules()
    rules.propagate(order[:-1], projections)
    for node, dim in rules.dims.items():
        size_of(node, dim)
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
