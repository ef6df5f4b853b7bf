"""Build the graph of an attention with its projections from the operators of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from harness.domain.partition import Interval
from harness.runtime.tracing.attention_core import Core
from harness.runtime.tracing.attention_positions import FoundPositions
from harness.runtime.tracing.attention_region import (
    AttentionRegion,
    Mixing,
    RegionPositions,
    RegionWeight,
    ScaledNumber,
    SlicedRows,
)
from harness.runtime.tracing.dim_rules import is_size
from harness.runtime.tracing.projections import transposed_linear

_SIZE = torch.ops.aten.sym_size.int
_SLICE = torch.ops.aten.slice.Tensor


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
        module: fx.GraphModule,
        order: Sequence[fx.Node],
        projections: Mapping[fx.Node, tuple[Interval, ...]],
        slices: Mapping[tuple[fx.Node, fx.Node], int],
        positions: FoundPositions | None,
    ) -> None:
        self._module, self._order, self._projections = module, order, projections
        self._slices, self._sliced, self._positions = slices, list[str](), positions
        self._rows: list[SlicedRows] = []
        self._taken: dict[tuple[fx.Node, fx.Node], fx.Node] = {}
        self._graph = fx.Graph()
        self._copies: dict[fx.Node, fx.Node] = {}
        self._weights: list[RegionWeight] = []
        self._factors: dict[fx.Node, list[fx.Node | None]] = {}
        self.inputs: list[fx.Node] = []
        self.held: list[fx.Node] = []

    def region(
        self,
        numbers: Sequence[tuple[fx.Node, int, int | None]],
        n_groups: int,
        *,
        draws: bool,
    ) -> AttentionRegion:
        """Build it.

        Args:
            numbers: as `ScaledNumber`, by operators of the model's graph.
        """
        given = [n.all_input_nodes[0] for n in self._order[:-1] if n in self._projections]
        for source in dict.fromkeys((*given, *self._from_elsewhere())):
            self.inputs.append(source)
            self._copies[source] = self._graph.placeholder(f"input_{len(self.inputs)}")
        for node in self._order:  # all placeholders come first
            self._hold_weights(node)
        size = self._graph.call_function(_SIZE, (self._copies[self.inputs[0]], 0))
        for node in self._order:
            self._copy(node, size)
        self._graph.output(self._copies[self._order[-1]])
        if not size.users:
            self._graph.erase_node(size)
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

    def _named(
        self, numbers: Sequence[tuple[fx.Node, int, int | None]]
    ) -> tuple[ScaledNumber, ...]:
        return tuple(
            ScaledNumber(self._copies[node].name, position, index)
            for node, position, index in numbers
        )

    def _of_copies(self, found: FoundPositions) -> RegionPositions:
        return RegionPositions(
            n=found.n,
            reads=tuple(found.of_inputs.get(source, "whole") for source in self.inputs),
            keys=frozenset(self._copies[node].name for node in found.keys),
            numbers=self._named(found.numbers),
            slices=tuple(self._rows),
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
        sources = node.args[1:3] if is_transposed else self._of_module(str(node.target))
        self._factors[node] = [
            self._hold(source, rule) if isinstance(source, fx.Node) else None
            for source, rule in zip(sources, (weight, bias), strict=True)
        ]

    def _of_module(self, path: str) -> list[fx.Node | None]:
        part, graph = self._module.get_submodule(path), self._module.graph
        assert isinstance(part, nn.Linear)
        with graph.inserting_before(self._order[0]):
            weight = graph.create_node("get_attr", f"{path}.weight")
            bias = None if part.bias is None else graph.create_node("get_attr", f"{path}.bias")
        return [weight, bias]

    def _hold(self, source: fx.Node, rule: RegionWeight) -> fx.Node:
        self.held.append(source)
        self._weights.append(rule)
        return self._graph.placeholder(f"weight_{len(self.held)}")

    def _copy(self, node: fx.Node, size: fx.Node) -> None:
        if node not in self._projections and node.op == "call_module":
            dropout: Any = self._module.get_submodule(str(node.target))
            source = self._given(node, node.all_input_nodes[0])
            arguments = (source, dropout.p, dropout.training)
            self._copies[node] = self._graph.call_function(F.dropout, arguments)
            return
        if node not in self._projections:
            self._copies[node] = self._graph.node_copy(
                node, lambda n: size if is_size(n) else self._given(node, n)
            )
            return
        function: Any = transposed_linear if node.target is transposed_linear else F.linear
        source = self._given(node, node.all_input_nodes[0])
        self._copies[node] = self._graph.call_function(function, (source, *self._factors[node]))

    def _given(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """The copy of an operator's argument, or where that is cut, a slice of all of it."""
        if (node, source) in self._taken:
            return self._taken[node, source]
        found, dim = self._copies[source], self._slices.get((node, source))
        if dim is not None:
            n_heads = source.meta["val"].shape[dim]
            found = self._graph.call_function(_SLICE, (found, dim, 0, n_heads))
            self._sliced.append(found.name)
        rows = None if self._positions is None else self._positions.slices.get((node, source))
        if rows is not None:
            size = source.meta["val"].shape[rows.dim]
            found = self._graph.call_function(_SLICE, (found, rows.dim, 0, size))
            self._rows.append(SlicedRows(found.name, rows.with_input, rows.with_own))
        self._taken[node, source] = found
        return found
