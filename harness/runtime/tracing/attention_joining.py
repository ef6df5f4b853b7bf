"""Build the graph of an attention with its projections from the operators of a model."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any

import torch
from torch import fx

from harness.domain.partition import Interval
from harness.runtime.tracing.attention_positions import Core, FoundPositions
from harness.runtime.tracing.attention_region import (
    AttentionRegion,
    Mixing,
    RegionPositions,
    RegionWeight,
    RowSlice,
    ScaledNumber,
)
from harness.runtime.tracing.dim_rules import SizeAt, is_size
from harness.runtime.tracing.matrix_products import transposed_linear

_SIZE = torch.ops.aten.sym_size.int
_SLICE = torch.ops.aten.slice.Tensor
_VIEW = torch.ops.aten.reshape.default
_ONE = Fraction(1)


def share_of(size: fx.Node, source: fx.Node) -> Fraction | None:
    """A size as a multiple of a value's first one, such as of the number of all windows; None if
    there is no such number."""
    first = source.meta["val"].shape[0]
    if not isinstance(first, torch.SymInt):
        return None
    ratio = size.meta["val"].node.expr / first.node.expr
    return Fraction(int(ratio.p), int(ratio.q)) if ratio.is_Rational else None


def computed_bias(projection: fx.Node) -> fx.Node | None:
    """The bias of a linear layer if operators make it, such as by joining those of queries and
    values."""
    bias: Any = projection.args[2] if len(projection.args) > 2 else None
    return bias if isinstance(bias, fx.Node) and bias.op != "get_attr" else None


class JoinedGraph:
    """The graph of a region.

    Args:
        order: the operators, of which the last gives the output.
        projections: by operator, the intervals that are each divided among the groups: of its
            output, of the last one's input.
        slices: by operator and a value from elsewhere that it reads, that value's dim of heads.
        positions: how it is cut by positions; None if it is not.

    Attributes:
        inputs, held: nodes of the model's graph that are the region's arguments.
    """

    def __init__(
        self,
        order: Sequence[fx.Node],
        projections: Mapping[fx.Node, tuple[Interval, ...]],
        slices: Mapping[tuple[fx.Node, fx.Node], int],
        positions: FoundPositions | None,
    ) -> None:
        self._order, self._projections = order, projections
        self._slices, self._sliced, self._positions = slices, list[str](), positions
        self._rows: dict[str, RowSlice] = {}
        self._taken: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._weights: list[RegionWeight] = []
        self._sizes: dict[Fraction, fx.Node] = {}
        self.inputs: list[fx.Node] = []
        self.held: list[fx.Node] = []

    def region(self, numbers: Sequence[SizeAt], n_groups: int, *, draws: bool) -> AttentionRegion:
        given = [n.all_input_nodes[0] for n in self._order[:-1] if n in self._projections]
        for source in dict.fromkeys((*given, *self._from_elsewhere())):
            self.inputs.append(source)
            self._copies[source] = self._graph.placeholder(f"input_{len(self.inputs)}")
        for node in self._order:  # all placeholders come first
            self._hold_weights(node)
        for node in self._order:
            self._copies[node] = self._graph.node_copy(node, partial(self._given, node))
        self._graph.output(self._copies[self._order[-1]])
        return AttentionRegion(
            graph=self._graph,
            n_inputs=len(self.inputs),
            weights=tuple(self._weights),
            numbers=self._named(numbers),
            slices=tuple(self._sliced),
            n_groups=n_groups,
            draws=draws,
            positions=None if self._positions is None else self._of_copies(self._positions),
        )

    def _named(self, numbers: Sequence[SizeAt]) -> tuple[ScaledNumber, ...]:
        return tuple(ScaledNumber(self._copies[n].name, k, place) for n, k, place in numbers)

    def _of_copies(self, found: FoundPositions) -> RegionPositions:
        return RegionPositions(
            n=found.n,
            reads=tuple(found.of_inputs.get(source, "whole") for source in self.inputs),
            keys=frozenset(self._copies[node].name for node in found.keys),
            numbers=self._named(found.numbers),
            slices=self._rows,
            mixing=None if found.core is None else self._mixing(found.core),
        )

    def _mixing(self, core: Core) -> Mixing:
        query: Any = core.scores.args[0]
        return Mixing(
            query=self._taken[core.scores, query].name,
            key=self._copies[core.key].name,
            value=self._copies[core.value].name,
            mask=None if core.mask is None else self._taken[core.mask].name,
            output=self._copies[core.output].name,
            key_features=2 * core.n_groups * core.form.head_dim,
            scores_all=core.scores_all,
            form=core.form,
        )

    def _from_elsewhere(self) -> Iterator[fx.Node]:
        """Activations that are read beside the projections' inputs, such as masks."""
        inside = set(self._order)
        for node in self._order:
            if node in self._projections and (bias := computed_bias(node)) is not None:
                yield bias
            for source in node.all_input_nodes if node not in self._projections else ():
                if source not in inside and source.op != "get_attr" and not is_size(source):
                    yield source

    def _hold_weights(self, node: fx.Node) -> None:
        if node not in self._projections:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in self._copies:
                    self._copies[source] = self._hold(source, RegionWeight())
            return
        spans, is_last = self._projections[node], node is self._order[-1]
        is_transposed = node.target is transposed_linear
        weight = RegionWeight(dim=int(is_transposed != is_last), sections=spans)
        bias = RegionWeight(is_last_bias=True) if is_last else RegionWeight(dim=0, sections=spans)
        for tensor, rule in zip(node.args[1:], (weight, bias), strict=False):
            if isinstance(tensor, fx.Node) and tensor is not computed_bias(node):
                self._taken[node, tensor] = self._hold(tensor, rule)

    def _hold(self, source: fx.Node, rule: RegionWeight) -> fx.Node:
        self.held.append(source)
        self._weights.append(rule)
        return self._graph.placeholder(f"weight_{len(self.held)}")

    def _sliced_bias(self, projection: fx.Node, bias: fx.Node) -> fx.Node:
        """The bias of a projection that operators make, of which each section is sliced."""
        call, spans = self._graph.call_function, self._projections[projection]
        size = spans[0][1] - spans[0][0]
        apart = call(_VIEW, (self._copies[bias], [len(spans), size]))
        sliced = call(_SLICE, (apart, 1, 0, size))
        self._sliced.append(sliced.name)
        return call(_VIEW, (sliced, [-1]))

    def _size(self, size: fx.Node) -> fx.Node:
        """A number that depends on the number of samples, of the first input's."""
        share = share_of(size, self.inputs[0])
        assert share is not None
        if share not in self._sizes:
            call = self._graph.call_function
            made = self._sizes.get(_ONE) or call(_SIZE, (self._copies[self.inputs[0]], 0))
            self._sizes[_ONE] = made
            made = made if share.numerator == 1 else call(operator.mul, (made, share.numerator))
            whole = share.denominator == 1
            self._sizes[share] = (
                made if whole else call(operator.floordiv, (made, share.denominator))
            )
        return self._sizes[share]

    def _given(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """The copy of an operator's argument, or where that is cut, a slice of all of it."""
        if is_size(source):
            return self._size(source)
        if (node, source) in self._taken:
            return self._taken[node, source]
        if node in self._projections and source is computed_bias(node):
            return self._sliced_bias(node, source)
        found, dim = self._copies[source], self._slices.get((node, source))
        if dim is not None:
            n_heads = source.meta["val"].shape[dim]
            found = self._graph.call_function(_SLICE, (found, dim, 0, n_heads))
            self._sliced.append(found.name)
        rows = None if self._positions is None else self._positions.slices.get((node, source))
        if rows is not None:
            size = source.meta["val"].shape[rows.dim]
            found = self._graph.call_function(_SLICE, (found, rows.dim, 0, size))
            self._rows[found.name] = rows
        self._taken[node, source] = found
        return found
