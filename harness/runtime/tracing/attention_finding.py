"""Find attentions between projections in an exported graph, and join each into one operator.

    x -> linear -> view -> transpose --+
    x -> linear -> view -> rotary  ----+-- attention -> transpose -> view -> linear ->
    x -> linear -> view -> repeat  ----+

An attention is PyTorch's function, or a softmax between two products. The dim of the heads is
propagated from the projections through every operator in between. A value from elsewhere (a mask,
relative positions) has no such dim, or its heads are sliced. Where an operator is not known, the
graph stays as it is.
"""

from __future__ import annotations

import itertools
import math
import sys
from typing import Any

import torch
from torch import Tensor, fx, nn

from harness.domain.partition import Interval
from harness.runtime.capture.operators import draws_random, function_name
from harness.runtime.executor.shards.base import has_plain_weights
from harness.runtime.tracing.attention_joining import JoinedGraph, is_size
from harness.runtime.tracing.constructs import AUTOCAST, CALLS, HOOKS, NO_GRAD
from harness.runtime.tracing.projections import transposed_linear

_ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
_PRODUCTS = ("matmul", "bmm")
_VIEWS = ("view", "reshape", "_unsafe_view", "reshape_as", "flatten")
_POINTWISE = (
    "mul", "add", "sub", "div", "neg", "to", "contiguous", "clone", "pow", "rsqrt", "mean", "alias",
    "softmax", "dropout", "masked_fill", "where", "tanh", "type_as", "gather",
)  # fmt: skip
_AFTER_SOFTMAX = ("dropout", "to", "type_as", "contiguous", "clone")
_SAME_RANK = ("cat", "slice", "split", "split_with_sizes", "chunk", "expand", "repeat_interleave")
_MOVES = ("transpose", "permute", "unsqueeze", "select", "unbind", "stack")
_PASSED = {*_VIEWS, *_POINTWISE, *_SAME_RANK, *_MOVES, *_PRODUCTS, "getitem"}


def join_attentions(module: fx.GraphModule) -> None:
    """Join every attention that can be cut by heads."""
    for node in list(filter(_is_attention, module.graph.nodes)):
        for is_stacked in (False, True):
            try:
                found = _Region(module, node, is_stacked=is_stacked)
                found.propagate()
            except _NotCuttableError:
                continue
            found.join()
            break
    module.graph.lint()
    module.recompile()


def _is_attention(node: fx.Node) -> bool:
    """Whether a node is PyTorch's function, or the product of a softmax with the values."""
    if node.target is _ATTENTION:
        return True
    source: Any = node.args[0] if operator_name(node) in _PRODUCTS else None
    while isinstance(source, fx.Node) and operator_name(source) in _AFTER_SOFTMAX:
        source = source.args[0]
    return isinstance(source, fx.Node) and operator_name(source) == "softmax"


def is_softmax(node: fx.Node) -> bool:
    """Whether a node is a softmax, or PyTorch's function of an attention."""
    if node.op == "call_module":
        return isinstance(_module_of(node), nn.Softmax)
    return function_name(node.target) in ("softmax", "scaled_dot_product_attention")


def operator_name(node: fx.Node) -> str:
    """The name of a node's function, without the underscore of in-place functions; `dropout` for
    a module of it, empty for others."""
    if node.op == "call_module":
        return "dropout" if type(_module_of(node)) is nn.Dropout else ""
    return function_name(node.target).removesuffix("_") if node.op in CALLS else ""


def _module_of(node: fx.Node) -> nn.Module:
    owner = node.graph.owning_module
    assert owner is not None
    return owner.get_submodule(str(node.target))


class _NotCuttableError(Exception):
    """The attention cannot be cut by heads, or it is not known that it can."""


def _require(condition: object) -> None:
    if not condition:
        raise _NotCuttableError


class _Region:
    """The operators from an attention's projections to the one of its output.

    Args:
        is_stacked: a view of a projection stacks queries, keys and values before the heads.

    Attributes:
        heads: position of the dim of heads of each node's value.
        sections: of the output of each projection, where operators divide it.
        slices: operators that read values from elsewhere, those values, and their dim of heads.
    """

    def __init__(
        self, module: fx.GraphModule, attention: fx.Node, *, is_stacked: bool = False
    ) -> None:
        self._module, self._attention, self._is_stacked = module, attention, is_stacked
        self._last = self._find_last()
        self._projections: set[fx.Node] = set()
        self._leads: dict[fx.Node, bool] = {}
        self._inside = self._find_inside()
        self._order = [n for n in module.graph.nodes if n in self._inside]
        marks = {(n.meta.get(NO_GRAD), str(n.meta.get(AUTOCAST))) for n in self._order}
        _require(len(marks) == 1 and not any(n.meta.get(HOOKS) for n in self._order))
        outside = (u for n in self._order if n is not self._last for u in n.users)
        _require(self._inside.issuperset(outside))
        self.heads: dict[fx.Node, int] = {}
        self.sections: dict[fx.Node, set[Interval]] = {}
        self._spans: dict[fx.Node, tuple[fx.Node, Interval]] = {}
        self._numbers: list[tuple[fx.Node, int, int | None]] = []
        self.slices: dict[tuple[fx.Node, fx.Node], int] = {}
        self._extents: set[int] = set()

    # Finding

    def _find_last(self) -> fx.Node:
        node = self._attention
        while True:
            _require(len(node.users) == 1)
            (node,) = node.users
            if self._is_projection(node):
                return node
            _require(function_name(node.target) in (*_VIEWS, *_MOVES, "contiguous", "clone"))

    def _find_inside(self) -> set[fx.Node]:
        given = self._attention.args[: 3 if self._attention.target is _ATTENTION else 2]
        _require(all(isinstance(n, fx.Node) and self._find_leading(n) for n in given))
        inside = {node for node, leads in self._leads.items() if leads}
        node = self._last
        while node is not self._attention:
            inside.add(node)
            node = node.all_input_nodes[0]
        return {*inside, self._attention}

    def _find_leading(self, node: fx.Node) -> bool:
        """Whether known operators lead from a projection to a value; remember all on the way."""
        if node in self._leads:
            return self._leads[node]
        if self._is_projection(node):
            self._projections.add(node)
            self._leads[node] = True
        elif is_size(node) or operator_name(node) not in _PASSED:
            is_tensor = node.op == "get_attr" or isinstance(node.meta.get("val"), Tensor)
            _require(is_tensor or is_size(node))
            self._leads[node] = False
        else:
            self._leads[node] = any(list(map(self._find_leading, node.all_input_nodes)))
        return self._leads[node]

    def _is_projection(self, node: fx.Node) -> bool:
        if node.op == "call_module":
            part = _module_of(node)
            return type(part) is nn.Linear and has_plain_weights(part)
        return node.target is transposed_linear

    # Propagating

    def propagate(self) -> None:
        """Find the dim of heads of every value.

        Raises:
            _NotCuttableError: an operator mixes heads, or they cannot be divided.
        """
        for node in self._order:
            if node in self._projections:
                position = len(_shape(node)) - 1
                self._spans[node] = node, (0, _size(node, -1))
            elif node is self._last:
                source = node.all_input_nodes[0]
                _require(self.heads[source] == len(_shape(source)) - 1)
                continue
            elif node.target is _ATTENTION:
                position = self._of_attention()
            else:
                position = self._of(node, operator_name(node))
            self.heads[node] = position
            if function_name(node.target) not in ("split", "split_with_sizes", "chunk"):
                self._extents.add(_size(node, position))
        _require(len(_shape(self._last)) == 3 and self.n_groups > 1)
        edges = {edge for spans in self.sections.values() for span in spans for edge in span}
        _require(all(edge % self.n_groups == 0 for edge in edges))
        for projection in self._projections:
            self._spans_of(projection)

    @property
    def n_groups(self) -> int:
        return math.gcd(*self._extents)

    def _of_attention(self) -> int:
        queries: Any = self._attention.args[:3]
        _require(all(self.heads.get(n) == 1 for n in queries))
        _require(len(_shape(self._attention)) == 4 and not self._attention.kwargs.get("enable_gqa"))
        mask = self._attention.kwargs.get("attn_mask")
        mask = self._attention.args[3] if len(self._attention.args) > 3 else mask
        if isinstance(mask, fx.Node):
            self._broadcast(self._attention, mask, 3)
        return 1

    def _broadcast(self, node: fx.Node, other: fx.Node, from_last: int) -> None:
        """Slice the heads of a value from elsewhere, if it has any."""
        shape = _shape(other)
        if other in self.heads or len(shape) < from_last or shape[-from_last] == 1:
            return
        _require(_size(other, -from_last) == _size(node, -from_last))
        self.slices[node, other] = len(shape) - from_last

    def _of(self, node: fx.Node, name: str) -> int:
        source = node.all_input_nodes[0]
        if name in _VIEWS:
            return self._of_view(node, source)
        if name in _PRODUCTS:
            return self._of_product(node)
        if name in _POINTWISE or name == "cat":
            return self._of_aligned(node, name)
        _require(source in self.heads)
        position = self.heads[source]
        if name == "getitem":
            return self._of_element(node, source, position)
        rank = len(_shape(source))
        if name == "transpose":
            a, b = (_natural(x, rank) for x in node.args[1:3])
            return {a: b, b: a}.get(position, position)
        if name == "permute":
            return [_natural(x, rank) for x in node.args[1]].index(position)  # type: ignore[union-attr]
        if name in ("select", "unbind"):
            dim = _natural(node.args[1] if len(node.args) > 1 else 0, rank)
            _require(dim != position)
            return position - (dim < position)
        if name in ("unsqueeze", "stack"):
            _require(all(self.heads.get(n) == position for n in node.all_input_nodes))
            new = node.args[1] if len(node.args) > 1 else 0
            return position + (_natural(new, rank + 1) <= position)
        if name == "expand":
            position += len(_shape(node)) - rank
            self._scale(node, 1, position)
            return position
        return self._of_cut(node, name, position, rank)

    def _of_view(self, node: fx.Node, source: fx.Node) -> int:
        _require(source in self.heads)
        given, made, position = _shape(source), _shape(node), self.heads[source]
        before = _volume(given[:position])
        places = [k for k, size in enumerate(made) if _volume(made[:k]) == before and size != 1]
        _require(places)
        place = places[0]
        if self._is_stacked and source in self._projections:
            size, n_stacked, place = _size(source, -1), _size(node, place), place + 1
            edges = [size * k // n_stacked for k in range(n_stacked + 1)]
            self.sections[source] = {*itertools.pairwise(edges)}
        _require(place < len(made))
        if operator_name(node) == "reshape_as":
            _require(node.args[1] in self.heads)
        elif operator_name(node) != "flatten":
            self._scale(node, 1, place)
        return place

    def _of_product(self, node: fx.Node) -> int:
        """A product of matrices, whose batch dims include the heads."""
        places = {(len(_shape(n)), self.heads.get(n)) for n in node.all_input_nodes}
        _require(len(places) == 1)
        ((rank, position),) = places
        _require(position is not None and position < rank - 2)
        assert position is not None
        return position

    def _of_aligned(self, node: fx.Node, name: str) -> int:
        """Elementwise with broadcasting, over other dims (softmax, mean), or a concatenation."""
        tensors = [n for n in node.all_input_nodes if not is_size(n)]
        from_last = {len(_shape(n)) - self.heads[n] for n in tensors if n in self.heads}
        _require(len(from_last) == 1)
        (offset,) = from_last
        _require(function_name(node.target) == name or node.args[0] in self.heads)
        for other in tensors:
            self._broadcast(node, other, offset)
        rank = len(_shape(node))
        has_dims = name in ("cat", "mean", "softmax", "gather")
        dims: Any = node.args[1] if has_dims and len(node.args) > 1 else ()
        dims = [dims] if isinstance(dims, int) else dims
        _require(name not in ("mean", "softmax") or dims)
        if name == "mean":
            _require(len(node.args) > 2 and node.args[2] is True)
        if name == "cat":
            _require(all(n in self.heads for n in tensors))
            dims = dims or [node.kwargs.get("dim", 0)]
        _require(all(_natural(dim, rank) != rank - offset for dim in dims))
        return rank - offset

    def _of_element(self, node: fx.Node, source: fx.Node, position: int) -> int:
        if operator_name(source) == "unbind":
            return position
        _require(function_name(source.target) in ("split", "split_with_sizes", "chunk"))
        whole = source.all_input_nodes[0]
        if whole in self._spans and _shape(node)[position] != _shape(whole)[position]:
            sizes = [value.shape[position] for value in source.meta["val"]]
            start = sum(sizes[: _natural(node.args[1], len(sizes))])
            self._divide(whole, node, (start, start + _size(node, position)))
        return position

    def _of_cut(self, node: fx.Node, name: str, position: int, rank: int) -> int:
        """A slice, a split or a repetition."""
        place = {"slice": 1}.get(name, 2)
        dim = node.args[place] if len(node.args) > place else node.kwargs.get("dim", 0)
        if name == "repeat_interleave" or _natural(dim, rank) != position or name == "chunk":
            _require(name != "repeat_interleave" or isinstance(node.args[1], int))
            return position
        source = node.all_input_nodes[0]
        _require(source in self._spans)
        if name == "slice":
            bounds: list[Any] = [*node.args[2:4], sys.maxsize][:2]
            size = _size(source, position)
            _require(all(isinstance(x, int) and x >= 0 for x in bounds) and len(node.args) < 5)
            start, stop = (min(x, size) for x in bounds)
            for k, value in enumerate(node.args[2:4], start=2):
                if value != sys.maxsize:
                    self._numbers.append((node, k, None))
            self._divide(source, node, (start, stop))
        else:
            sizes = node.args[1]
            indices = [None] if isinstance(sizes, int) else range(len(sizes))  # type: ignore[arg-type]
            self._numbers += [(node, 1, index) for index in indices]
        return position

    def _divide(self, whole: fx.Node, part: fx.Node, span: Interval) -> None:
        projection, (start, _) = self._spans[whole]
        span = span[0] + start, span[1] + start
        self._spans[part] = projection, span
        self.sections.setdefault(projection, set()).add(span)

    def _scale(self, node: fx.Node, argument: int, index: int) -> None:
        sizes: Any = node.args[argument] if isinstance(node.args[argument], list | tuple) else None
        _require(sizes is not None)
        size = sizes[index]
        _require(isinstance(size, int))
        if size > 0:
            self._numbers.append((node, argument, index))

    # Joining

    def join(self) -> None:
        """Replace the operators by one."""
        projections = {node: self._spans_of(node) for node in self._projections}
        projections[self._last] = ((0, _size(self._last.all_input_nodes[0], -1)),)
        joined = JoinedGraph(self._module, self._order, projections, self.slices)
        draws = any(draws_random(node, self._module) for node in self._order)
        region = joined.region(self._numbers, self.n_groups, draws=draws)
        with self._module.graph.inserting_before(self._last):
            call = self._module.graph.call_function(region, (*joined.inputs, *joined.held))
        call.meta = {**self._last.meta}
        self._last.replace_all_uses_with(call)
        for node in reversed(self._order):
            self._module.graph.erase_node(node)

    def _spans_of(self, projection: fx.Node) -> tuple[Interval, ...]:
        size = _size(projection, -1)
        spans = tuple(sorted(self.sections.get(projection, {(0, size)})))
        ends = [0, *(stop for _, stop in spans)]
        _require([start for start, _ in spans] == ends[:-1] and ends[-1] == size)
        return spans


def _shape(node: fx.Node) -> list[Any]:
    """Sizes of a node's (first) value; the number of samples is a symbol."""
    value = node.meta.get("val")
    value = value[0] if isinstance(value, tuple | list) else value
    _require(isinstance(value, Tensor))
    assert isinstance(value, Tensor)
    return [size if isinstance(size, int) else str(size) for size in value.shape]


def _size(node: fx.Node, position: int) -> int:
    size = _shape(node)[position]
    _require(isinstance(size, int))
    return int(size)


def _volume(sizes: list[Any]) -> tuple[int, list[str]]:
    numbers = [size for size in sizes if isinstance(size, int)]
    return math.prod(numbers), sorted(size for size in sizes if isinstance(size, str))


def _natural(dim: Any, rank: int) -> int:
    _require(isinstance(dim, int))
    return int(dim) % rank
