"""An attention with its projections as one operator that can be cut by groups of heads."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from harness.domain.partition import Interval


class RegionWeight(NamedTuple):
    """How a tensor of the model is cut by groups.

    Attributes:
        dim: that is cut; None if every part reads the whole.
        sections: intervals of that dim, each of which is divided among the groups: one for
            queries, keys and values each where one product computes them all.
        is_last_bias: added once, by the part with the first group.
    """

    dim: int | None = None
    sections: tuple[Interval, ...] = ()
    is_last_bias: bool = False

    def intervals(self, groups: Interval, n_groups: int) -> list[Interval]:
        """The intervals of some groups, one per section."""
        first, last = groups
        return [
            (a + (b - a) * first // n_groups, a + (b - a) * last // n_groups)
            for a, b in self.sections
        ]


class ScaledNumber(NamedTuple):
    """A number among a node's arguments that is in proportion to the groups.

    Attributes:
        position: of the argument.
        place: in the argument, if that is a list.
    """

    node: str
    position: int
    place: int | None


@dataclass(frozen=True, eq=False)
class AttentionRegion:
    """Called with inputs, then weights. Copies of a graph share it.

    Attributes:
        graph: from placeholders of inputs and weights to the output.
        n_inputs: activations, of which the first has the samples and positions of the output.
        slices: nodes that slice all heads of a value.
        n_groups: parts into which it can be cut.
        draws: whether it draws random numbers.
    """

    graph: fx.Graph
    n_inputs: int
    weights: tuple[RegionWeight, ...]
    numbers: tuple[ScaledNumber, ...]
    slices: tuple[str, ...]
    n_groups: int
    draws: bool

    def __post_init__(self) -> None:
        whole = fx.GraphModule(nn.Module(), self.graph)
        object.__setattr__(self, "_whole", whole)
        object.__setattr__(self, "__name__", "attention_region")

    def __deepcopy__(self, memo: object) -> AttentionRegion:
        return self

    def __call__(self, *args: torch.Tensor) -> Any:
        return self._whole(*args)  # type: ignore[attr-defined]

    def part(self, groups: Interval) -> fx.GraphModule:
        """The computation of some groups, of slices of the weights."""
        n, graph = groups[1] - groups[0], copy.deepcopy(self.graph)
        nodes = {node.name: node for node in graph.nodes}
        for number in self.numbers:
            arguments = list(nodes[number.node].args)
            old = arguments[number.position]
            arguments[number.position] = _scaled(old, number.place, n, self.n_groups)
            nodes[number.node].args = tuple(arguments)
        for name in self.slices:
            value, dim, _, n_heads = nodes[name].args
            bounds = (n_heads * group // self.n_groups for group in groups)
            nodes[name].args = (value, dim, *bounds)
        return fx.GraphModule(nn.Module(), graph)


def _scaled(argument: Any, index: int | None, n: int, n_groups: int) -> Any:
    if index is None:
        return argument * n // n_groups
    values: Sequence[Any] = argument
    return [v * n // n_groups if k == index else v for k, v in enumerate(values)]
