"""The program of one device: segments of tasks, with their graphs, inputs and outputs.

Split a device's tasks into segments, each of which runs without waiting for other devices.

fetches | tasks | sends     a task with inputs from other devices begins a segment,
        |       |           a task with outputs for other devices ends it

Where weights are freed between their uses, a task with weights of another unit begins one too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import fx

from harness.domain.partition import Block, Interval
from harness.domain.weight_units import starts_segment
from harness.runtime.executor.geometry.layout import Layout, Part, Piece, Want
from harness.runtime.executor.shards.forms import Forms
from harness.runtime.executor.shards.regions import Region


class PartKey(NamedTuple):
    """A value of one part; `value` is `loss` for the loss."""

    value: str
    operator: str
    part: int

    @classmethod
    def of(cls, value: str, part: Part) -> PartKey:
        return cls(value, part.operator, part.index)


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
class Route:
    """The way of a piece from the part that holds it to a want, and of its gradient back.

    Attributes:
        goes: whether the value travels; false if the reader has a copy.
        returns: whether the gradient comes back.
        held, in_want: its region in the tensors of the part and of the want.
    """

    want: Want
    piece: Piece
    goes: bool
    returns: bool
    held: Region
    in_want: Region
    shape: tuple[int, ...]

    @classmethod
    def of(cls, layout: Layout, want: Want, piece: Piece) -> Route:
        block = layout.region(layout.node(want.value), piece.part)
        return cls(
            want,
            piece,
            goes=piece in want.pieces,
            returns=piece in want.returns,
            held=Region.of(piece.region, block),
            in_want=Region.of(piece.region, want.block),
            shape=layout.sizes_of(want.value, piece.region),
        )

    @property
    def number(self) -> tuple[int, int]:
        """Numbers of the want and of the part, which no other route has."""
        return self.want.number, self.piece.part.index

    @property
    def source(self) -> PartKey:
        """The value that it is a region of."""
        return PartKey.of(self.want.value, self.piece.part)

    @property
    def is_local(self) -> bool:
        return self.piece.part.device == self.want.device

    @property
    def n_elements(self) -> int:
        return math.prod(self.shape)


class Recorded(NamedTuple):
    """Samples of the microbatch whose rows of a value a tensor holds."""

    value: str
    samples: Interval


@dataclass
class Draft:
    """A segment without its graph: tasks that run without waiting for other devices.

    Attributes:
        fetches: wants that must arrive before it, first used by this segment.
        sends: pieces of its outputs that other devices read, in order.
        waits: whether it waits for other devices: for fetches or within a collective task.
        units: numbers of the units of sharded weights that it uses.
        is_apart: whether its tasks are of `Captured.apart`.
        weight_bytes: bytes of the whole weights of its operators.
        recomputed: number of the segment that its stage runs again as a whole.
        is_last: whether it is of the last part that its stage runs again, so that it need not where
            its backward follows its forward at once.
    """

    parts: list[Part] = field(default_factory=list)
    fetches: list[Want] = field(default_factory=list)
    sends: list[Route] = field(default_factory=list)
    waits: bool = False
    units: frozenset[int] = frozenset()
    is_apart: bool = False
    weight_bytes: int = 0
    recomputed: int = 0
    is_last: bool = False


@dataclass(kw_only=True)
class Segment(Draft):
    """A draft with its graph.

    Attributes:
        module: the graph of the tasks.
        call: the module, or what it was compiled to: called with the inputs in order, it returns
            the outputs as a tuple.
        runs_always: other devices wait for its backward, within its task or for gradients of its
            weights, even if its output is unused.
        is_differentiable: whether a gradient flows back through it.
    """

    module: fx.GraphModule
    call: Callable[..., Any]
    inputs: tuple[InputKey, ...]
    outputs: tuple[PartKey, ...]
    runs_always: bool
    is_differentiable: bool


@dataclass(frozen=True)
class Program:
    """A device's segments by stage, for one size of microbatch.

    Attributes:
        differentiable: values that receive a gradient.
        counted: parts of the loss that this device reports, so that copies count once.
        recorded: tensors that hold rows of a value at a frozen boundary.
    """

    stages: dict[int, tuple[Segment, ...]]
    differentiable: frozenset[str]
    counted: frozenset[PartKey] = frozenset()
    recorded: Mapping[InputKey, Recorded] = field(default_factory=dict)

    def units(self, stage: int) -> list[frozenset[int]]:
        """Numbers of the units of sharded weights that each segment of a stage uses."""
        return [segment.units for segment in self.stages[stage]]

    def modules(self) -> Iterator[fx.GraphModule]:
        for segments in self.stages.values():
            yield from (segment.module for segment in segments)


def draft_segments(forms: Forms, device: int) -> dict[int, list[Draft]]:
    """A device's segments by stage, in the order in which they run."""
    layout = forms.layout
    outgoing: dict[Part, list[Route]] = defaultdict(list)
    for want in layout.wants:
        for piece in dict.fromkeys((*want.pieces, *want.returns)):
            if piece.part.device == device != want.device:
                outgoing[piece.part].append(Route.of(layout, want, piece))
    fetched: set[int] = set()
    by_stage: dict[int, list[Draft]] = {}
    for stage in range(len(layout.strategy.stages)):
        if drafts := _drafts(forms, device, stage, outgoing, fetched):
            by_stage[stage] = drafts
    return by_stage


def _drafts(
    forms: Forms, device: int, stage: int, outgoing: dict[Part, list[Route]], fetched: set[int]
) -> list[Draft]:
    layout = forms.layout
    drafts: list[Draft] = []
    draft, most_bytes = Draft(), forms.segment_bytes()
    plans, awaited = layout.strategy.operators, set[int]()
    last = max((n for op, n in forms.recomputed.items() if plans[op].stage == stage), default=0)
    for part in layout.tasks(device, stage):
        wants = [want for _, want in layout.reads(part)]
        missing = {w.number: w for w in wants if w.is_exchanged and w.number not in fetched}
        is_collective = forms.of[part.operator] == "collective"
        units = forms.units.get((part.operator, device), frozenset())
        is_next = starts_segment(units, draft.units)
        if not forms.freed:  # waited for where they are used first
            is_next = not (units <= awaited or layout.strategy.stages[stage].recompute)
            awaited |= units
        recomputed = forms.recomputed.get(part.operator, 0)
        is_next |= recomputed != draft.recomputed
        is_apart = part.operator in layout.captured.apart
        is_next |= is_apart != draft.is_apart or draft.weight_bytes >= most_bytes
        if draft.parts and (missing or is_collective or is_next):
            drafts.append(draft)
            draft = Draft()
        draft.is_apart, draft.recomputed = is_apart, recomputed
        draft.is_last = recomputed == last and not forms.freed
        draft.fetches = sorted((*draft.fetches, *missing.values()), key=lambda w: w.number)
        fetched.update(missing)  # in place, for later stages
        draft.parts.append(part)
        draft.units |= units
        draft.weight_bytes += layout.operators[part.operator].parameter_bytes
        draft.waits |= bool(missing) or is_collective
        if is_collective or part in outgoing:
            draft.sends = outgoing.get(part, [])
            drafts.append(draft)
            draft = Draft()
    return [*drafts, draft] if draft.parts else drafts
