"""The program of one device: segments of tasks, with their graphs, inputs and outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import fx

from harness.domain.partition import Block, Interval
from harness.runtime.executor.geometry.layout import Piece, Want


class PartKey(NamedTuple):
    """A value of one of this device's parts; `value` is `loss` for the loss."""

    value: str
    operator: str
    part: int


class WantKey(NamedTuple):
    """A want that other devices contribute to, assembled before the segment."""

    number: int


class DataKey(NamedTuple):
    """A region of one of the model's inputs, in samples of the microbatch."""

    value: str
    block: Block


class TargetKey(NamedTuple):
    """The targets of some samples of the microbatch."""

    samples: Interval


class WeightKey(NamedTuple):
    """The factor of the microbatch's summed loss."""

    value: str = "weight"


InputKey = PartKey | WantKey | DataKey | TargetKey | WeightKey


@dataclass(frozen=True)
class Send:
    """A piece of one of this device's parts that another device reads.

    Attributes:
        goes: whether it is sent; false if the other device has a copy.
        returns: whether its gradient comes back.
    """

    want: Want
    piece: Piece
    goes: bool = True
    returns: bool = True

    @property
    def key(self) -> PartKey:
        return PartKey(self.want.value, self.piece.part.operator, self.piece.part.index)


@dataclass(frozen=True)
class Segment:
    """Tasks that run without waiting for other devices.

    Attributes:
        module: called with the inputs in order; returns the outputs as a tuple.
        fetches: wants that must arrive before it, first used by this segment.
        sends: pieces of its outputs that other devices read, in order.
        is_norm: it is a batch norm with global statistics, so other devices wait for it, forward
            and backward, even if its output is unused.
        is_differentiable: whether a gradient flows back through it.
    """

    module: fx.GraphModule
    inputs: tuple[InputKey, ...]
    outputs: tuple[PartKey, ...]
    fetches: tuple[Want, ...]
    sends: tuple[Send, ...]
    is_norm: bool
    is_differentiable: bool


@dataclass(frozen=True)
class Program:
    """A device's segments by stage, for one size of microbatch.

    Attributes:
        differentiable: values that receive a gradient.
        blocks: the region of each value that a part of this device holds.
        counted: parts of the loss that this device reports, so that copies count once.
    """

    stages: dict[int, tuple[Segment, ...]]
    differentiable: frozenset[str]
    blocks: dict[PartKey, Block] = field(default_factory=dict)
    counted: frozenset[PartKey] = frozenset()

    def modules(self) -> Iterator[fx.GraphModule]:
        """The modules of all segments."""
        for segments in self.stages.values():
            yield from (segment.module for segment in segments)

    def differentiable_modules(self) -> list[list[fx.GraphModule]]:
        """By stage, the modules of differentiable segments."""
        return [
            [segment.module for segment in segments if segment.is_differentiable]
            for segments in self.stages.values()
        ]
