"""Follow one dim of values, such as the heads or positions of an attention, through operators."""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from harness.runtime.tracing.constructs import argument_of, function_name

ATTENTION = torch.ops.aten.scaled_dot_product_attention.default
LINEAR = torch.ops.aten.linear.default
PRODUCTS = ("matmul", "bmm")
VIEWS = ("view", "reshape", "_unsafe_view", "reshape_as", "flatten")
MOVES = ("transpose", "permute", "unsqueeze", "select", "unbind", "stack")
_POINTWISE = (
    "mul", "add", "sub", "div", "neg", "to", "contiguous", "clone", "pow", "rsqrt", "alias", "exp",
    "softmax", "dropout", "masked_fill", "where", "tanh", "type_as", "gather", "clamp_min", "relu",
    "elu", "sigmoid", "expand_as",
)  # fmt: skip
# Position of the dims over which an operator reduces; the flag that keeps them comes after it.
_REDUCTIONS = {"mean": 1, "sum": 1, "amax": 1, "max": 1, "linalg_vector_norm": 2, "norm": 2}
NORMS = ("layer_norm", "rms_norm")
_SAME_RANK = ("cat", "slice", "split", "split_with_sizes", "chunk", "expand", "repeat_interleave")
SPLITS = ("split", "split_with_sizes", "chunk")
PASSED = {
    *VIEWS, *_POINTWISE, *_REDUCTIONS, *NORMS, *_SAME_RANK, *MOVES, *PRODUCTS, "getitem",
}  # fmt: skip


class NotCuttableError(Exception):
    """The attention cannot be cut along a dim, or it is not known that it can."""


def require(condition: object) -> None:
    """Refuse a cut unless a condition holds.

    Raises:
        NotCuttableError: it does not.
    """
    if not condition:
        raise NotCuttableError


# A size among a node's arguments that is in proportion to a dim: node, argument, and place in that
# if it is a list.
SizeAt = tuple[fx.Node, int, int | None]


class DimRules(ABC):
    """The rules of one dim; each kind of dim has its own for views, products and divisions.

    Attributes:
        dims: position of the dim in each node's value, of nodes so far.
        slices: operators that read values from elsewhere, those values, and their position of the
            dim.
    """

    def __init__(self) -> None:
        self.dims: dict[fx.Node, int] = {}
        self.numbers: list[SizeAt] = []
        self.slices: dict[tuple[fx.Node, fx.Node], int] = {}

    @abstractmethod
    def start(self, projection: fx.Node) -> int:
        """The position in the value of a projection."""

    @abstractmethod
    def of_view(self, node: fx.Node, source: fx.Node, place: int) -> int:
        """The position after a view that keeps what is before the dim, found at a place."""

    def of_product(self, node: fx.Node) -> int:
        """The position in a product of matrices, by default as in `of_attention`."""
        return self.of_attention(node.all_input_nodes)

    @abstractmethod
    def of_attention(self, operands: Sequence[fx.Node]) -> int:
        """The position in PyTorch's function of queries, keys and values."""

    def of_element(self, node: fx.Node, source: fx.Node, position: int) -> int:
        """The position in an element of a division, by default that in the whole."""
        return position

    @abstractmethod
    def of_cut(self, node: fx.Node, name: str, position: int) -> int:
        """The position in a part along the dim, or in a repetition."""

    def propagate(self, order: Sequence[fx.Node], projections: Collection[fx.Node]) -> None:
        """Find the position in the values of operators.

        Raises:
            NotCuttableError: one mixes what is along the dim, or is not known.
        """
        for node in order:
            is_projection = node in projections
            self.dims[node] = self.start(node) if is_projection else self._follow(node)

    def _follow(self, node: fx.Node) -> int:
        name, source = operator_name(node), node.all_input_nodes[0]
        if node.target is ATTENTION:
            return self._of_attention(node)
        if name in VIEWS:
            return self._of_view(node, source)
        if name in PRODUCTS:
            return self.of_product(node)
        if name in (*_POINTWISE, *NORMS, "cat"):
            return self._of_aligned(node, name)
        require(source in self.dims)
        position = self.dims[source]
        if name == "getitem":
            is_division = function_name(source.target) in SPLITS
            require(is_division or operator_name(source) in ("unbind", "max"))
            return self.of_element(node, source, position) if is_division else position
        rank = len(shape_of(source))
        if name in _REDUCTIONS:
            return _after_reduction(node, position, rank, _REDUCTIONS[name])
        if name == "transpose":
            a, b = (natural(x, rank) for x in node.args[1:3])
            return {a: b, b: a}.get(position, position)
        if name == "permute":
            return [natural(x, rank) for x in node.args[1]].index(position)  # type: ignore[union-attr]
        if name in ("select", "unbind"):
            dim = natural(argument_of(node, 1, default=0), rank)
            require(dim != position)
            return position - (dim < position)
        if name in ("unsqueeze", "stack"):
            require(all(self.dims.get(n) == position for n in node.all_input_nodes))
            return position + (natural(argument_of(node, 1, default=0), rank + 1) <= position)
        if name == "expand":
            position += len(shape_of(node)) - rank
            self._scale(node, position)
            return position
        return self._of_part(node, name, position, rank)

    def _of_attention(self, node: fx.Node) -> int:
        operands: Any = node.args[:3]
        position = self.of_attention(operands)
        for other in node.all_input_nodes:  # a mask
            self._broadcast(node, other, len(shape_of(node)) - position)
        return position

    def _of_view(self, node: fx.Node, source: fx.Node) -> int:
        require(source in self.dims)
        made, before = shape_of(node), volume(shape_of(source)[: self.dims[source]])
        places = [k for k, size in enumerate(made) if volume(made[:k]) == before and size != 1]
        require(places)
        place = self.of_view(node, source, places[0])
        require(place < len(made))
        if operator_name(node) == "reshape_as":
            require(node.args[1] in self.dims)
        elif operator_name(node) != "flatten":
            self._scale(node, place)
        return place

    def _of_aligned(self, node: fx.Node, name: str) -> int:
        """Elementwise with broadcasting, over other dims (softmax, mean), or a concatenation."""
        tensors = [n for n in node.all_input_nodes if not is_size(n)]
        from_last = {len(shape_of(n)) - self.dims[n] for n in tensors if n in self.dims}
        require(len(from_last) == 1)
        (offset,) = from_last
        require(function_name(node.target) == name or node.args[0] in self.dims)
        for other in tensors:
            self._broadcast(node, other, offset)
        rank = len(shape_of(node))
        dims: Any = node.args[1] if name in ("cat", "gather") and len(node.args) > 1 else ()
        dims = [dims] if isinstance(dims, int) else dims
        if name == "softmax":
            dims = [argument_of(node, 1)]
        if name in NORMS:
            sizes: Any = node.args[1]
            dims = range(rank - len(sizes), rank)
        if name == "cat":
            require(all(n in self.dims or (node, n) in self.slices for n in tensors))
            dims = dims or [node.kwargs.get("dim", 0)]
        require(all(natural(dim, rank) != rank - offset for dim in dims))
        return rank - offset

    def _broadcast(self, node: fx.Node, other: fx.Node, from_last: int) -> None:
        """Slice the dim of a value from elsewhere, if it has it."""
        shape = shape_of(other)
        if other in self.dims or len(shape) < from_last or shape[-from_last] == 1:
            return
        require(size_of(other, -from_last) == size_of(node, -from_last))
        self.slices[node, other] = len(shape) - from_last

    def _of_part(self, node: fx.Node, name: str, position: int, rank: int) -> int:
        """A slice, a split or a repetition."""
        place = {"slice": 1}.get(name, 2)
        dim = argument_of(node, place, "dim", default=0)
        require(name != "repeat_interleave" or isinstance(node.args[1], int))
        return position if natural(dim, rank) != position else self.of_cut(node, name, position)

    def _scale(self, node: fx.Node, index: int) -> None:
        sizes: Any = node.args[1] if isinstance(node.args[1], list | tuple) else None
        require(sizes is not None)
        size = sizes[index]
        require(isinstance(size, int))
        if size > 0:
            self.numbers.append((node, 1, index))


def slice_bounds(node: fx.Node, size: int) -> tuple[int, int]:
    """The interval that a slice without a step takes of a dim."""
    bounds: list[Any] = [*node.args[2:4], sys.maxsize][:2]
    require(all(isinstance(x, int) and x >= 0 for x in bounds) and len(node.args) < 5)
    return min(bounds[0], size), min(bounds[1], size)


def _after_reduction(node: fx.Node, position: int, rank: int, place: int) -> int:
    given: list[Any] = [*node.args[place : place + 2], False]
    require(len(given) > 1 and isinstance(given[0], list | tuple | int))
    dims = [given[0]] if isinstance(given[0], int) else given[0]
    reduced = {natural(dim, rank) for dim in dims}
    require(reduced and position not in reduced)
    return position if given[1] else position - sum(dim < position for dim in reduced)


def operator_name(node: fx.Node) -> str:
    """The name of a node's function, without the underscore of in-place functions; empty for
    modules."""
    is_function = node.op in ("call_function", "call_method")
    return function_name(node.target).removesuffix("_") if is_function else ""


def is_size(node: fx.Node) -> bool:
    """Whether a node is a number that depends on the number of samples."""
    return isinstance(node.meta.get("val"), torch.SymInt)


def shape_of(node: fx.Node) -> list[Any]:
    """Sizes of a node's (first) value; those that depend on the number of samples are text."""
    value = node.meta.get("val")
    value = value[0] if isinstance(value, tuple | list) else value
    require(isinstance(value, Tensor))
    assert isinstance(value, Tensor)
    return [size if isinstance(size, int) else str(size) for size in value.shape]


def size_of(node: fx.Node, position: int) -> int:
    """A size that is a number."""
    size = shape_of(node)[position]
    require(isinstance(size, int))
    return int(size)


def volume(sizes: list[Any]) -> tuple[int, list[str]]:
    """The product of sizes: of the numbers, and all symbols."""
    factors = [factor for size in sizes for factor in str(size).split("*")]
    numbers = [int(factor) for factor in factors if factor.isdigit()]
    return math.prod(numbers), sorted(factor for factor in factors if not factor.isdigit())


def natural(dim: Any, rank: int) -> int:
    """A dim as a number that is not negative."""
    require(isinstance(dim, int))
    return int(dim) % rank
