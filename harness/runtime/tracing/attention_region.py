"""An attention with its projections as one operator that can be cut by heads and positions."""

from __future__ import annotations

import copy
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from harness.domain.partition import Interval
from harness.runtime.models.attention import AttentionForm


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


class RowSlice(NamedTuple):
    """A slice of a value's positions.

    Attributes:
        with_input, with_own: whether it is cut where a device computes keys of all positions, and
            where it computes those of its own.
    """

    dim: int
    with_input: bool
    with_own: bool


class Mixing(NamedTuple):
    """The nodes of an attention whose scores are scaled and masked alone.

    Attributes:
        key, value: (samples, groups, positions, features of a head).
        mask: added to the scores, or true where they count.
        key_features: of the keys and values of a position.
        scores_all: the whole attention has scores of hidden positions too.
    """

    query: str
    key: str
    value: str
    mask: str | None
    output: str
    key_features: int
    scores_all: bool
    form: AttentionForm


class RegionPositions(NamedTuple):
    """How an attention is cut by positions.

    Attributes:
        n: positions of the output.
        reads: of each input, by `domain.sharding.input_block`.
        keys: nodes that compute keys or values.
        numbers: in proportion to a node's positions.
        slices: by the node that slices.
    """

    n: int
    reads: tuple[str, ...]
    keys: frozenset[str]
    numbers: tuple[ScaledNumber, ...]
    slices: Mapping[str, RowSlice]
    mixing: Mixing | None


class OwnPositions(NamedTuple):
    """A device's positions of an attention, and whether it computes keys of these alone."""

    interval: Interval
    has_own_keys: bool


@dataclass(frozen=True, eq=False)
class AttentionRegion:
    """Called with inputs, then weights; copies of a model's graph share it.

    Attributes:
        graph: from placeholders of inputs and weights to the output.
        n_inputs: activations, of which the first has the samples and positions of the output.
        slices: nodes that slice all heads of a value.
        n_groups: parts into which it can be cut.
        draws: whether it draws random numbers.
        positions: None if it cannot be cut by them.
    """

    graph: fx.Graph
    n_inputs: int
    weights: tuple[RegionWeight, ...]
    numbers: tuple[ScaledNumber, ...]
    slices: tuple[str, ...]
    n_groups: int
    draws: bool
    positions: RegionPositions | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_whole", fx.GraphModule(nn.Module(), self.graph))
        object.__setattr__(self, "__name__", "attention_region")

    def __deepcopy__(self, memo: object) -> AttentionRegion:
        return self

    def __call__(self, *args: torch.Tensor) -> Any:
        return self._whole(*args)  # type: ignore[attr-defined]

    def part(self, groups: Interval, rows: OwnPositions | None = None) -> fx.GraphModule:
        """The computation of some groups, of slices of the weights; for some positions it is called
        with a function, too, that mixes the values of `positions.mixing`."""
        graph = copy.deepcopy(self.graph)
        nodes = {node.name: node for node in graph.nodes}
        for number in self.numbers:
            _scale(nodes, number, groups[1] - groups[0], self.n_groups)
        for name in self.slices:
            value, dim, _, n_heads = nodes[name].args
            bounds = (n_heads * group // self.n_groups for group in groups)
            nodes[name].args = (value, dim, *bounds)
        if rows is not None and self.positions is not None:
            _cut_rows(graph, nodes, self.positions, rows)
        return fx.GraphModule(nn.Module(), graph)


def _scale(nodes: Mapping[str, fx.Node], number: ScaledNumber, n: int, of: int) -> None:
    """Scale a number in a node's arguments."""
    arguments = list(nodes[number.node].args)
    old: Any = arguments[number.position]
    if number.place is None:
        arguments[number.position] = old * n // of
    else:
        arguments[number.position] = [
            v * n // of if k == number.place else v for k, v in enumerate(old)
        ]
    nodes[number.node].args = tuple(arguments)


def _cut_rows(
    graph: fx.Graph, nodes: Mapping[str, fx.Node], positions: RegionPositions, rows: OwnPositions
) -> None:
    (start, stop), has_own_keys = rows
    for number in positions.numbers:
        if has_own_keys or number.node not in positions.keys:
            _scale(nodes, number, stop - start, positions.n)
    for name, sliced in positions.slices.items():
        if sliced.with_own if has_own_keys else sliced.with_input:
            nodes[name].args = (*nodes[name].args[:2], start, stop)
    last = next(node for node in reversed(graph.nodes) if node.op == "placeholder")
    with graph.inserting_after(last):
        mix = graph.placeholder("mix")
    found = positions.mixing
    if found is None:
        return
    output, mask = nodes[found.output], None if found.mask is None else nodes[found.mask]
    operands = (nodes[name] for name in (found.query, found.key, found.value))
    with graph.inserting_before(output):
        output.replace_all_uses_with(graph.call_function(operator.call, (mix, *operands, mask)))
    for node in reversed(graph.nodes):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
