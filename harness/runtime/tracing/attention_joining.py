"""Build the graph of an attention with its projections from the operators of a model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from harness.domain.partition import Interval
from harness.runtime.tracing.attention_region import AttentionRegion, RegionWeight, ScaledNumber
from harness.runtime.tracing.projections import transposed_linear

_SIZE = torch.ops.aten.sym_size.int
_SLICE = torch.ops.aten.slice.Tensor


def is_size(node: fx.Node) -> bool:
    """Whether a node is the number of samples of the model's input."""
    source = node.args[0] if node.args else None
    is_input = isinstance(source, fx.Node) and source.op == "placeholder"
    return node.target is _SIZE and is_input and node.args[1:] == (0,)


class JoinedGraph:
    """The graph of a region.

    Args:
        order: the operators, of which the last gives the output.
        projections: by operator, the intervals that are each divided among the groups: of its
            output, of the last one's input.
        slices: by operator and a value from elsewhere that it reads, that value's dim of heads.

    Attributes:
        inputs, held: nodes of the model's graph that are the region's arguments.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        order: Sequence[fx.Node],
        projections: Mapping[fx.Node, tuple[Interval, ...]],
        slices: Mapping[tuple[fx.Node, fx.Node], int],
    ) -> None:
        self._module, self._order, self._projections = module, order, projections
        self._slices, self._sliced = slices, list[str]()
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
            numbers=tuple(
                ScaledNumber(self._copies[node].name, position, index)
                for node, position, index in numbers
            ),
            slices=tuple(self._sliced),
            n_groups=n_groups,
            draws=draws,
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
            arguments = (self._copies[node.all_input_nodes[0]], dropout.p, dropout.training)
            self._copies[node] = self._graph.call_function(F.dropout, arguments)
            return
        if node not in self._projections:
            self._copies[node] = self._graph.node_copy(
                node, lambda n: size if is_size(n) else self._given(node, n)
            )
            return
        function: Any = transposed_linear if node.target is transposed_linear else F.linear
        source = self._copies[node.all_input_nodes[0]]
        self._copies[node] = self._graph.call_function(function, (source, *self._factors[node]))

    def _given(self, node: fx.Node, source: fx.Node) -> fx.Node:
        """The copy of an operator's argument, or its heads if it comes from elsewhere."""
        dim, given = self._slices.get((node, source)), self._copies[source]
        if dim is None:
            return given
        n_heads = source.meta["val"].shape[dim]
        sliced = self._graph.call_function(_SLICE, (given, dim, 0, n_heads))
        self._sliced.append(sliced.name)
        return sliced
