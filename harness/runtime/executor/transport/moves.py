"""What goes in and out of each of a device's segments, worked out once: regions, shapes, order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from harness.runtime.executor.geometry.layout import Layout, Piece, Want
from harness.runtime.executor.program.program import PartKey, Program, Segment, WantKey
from harness.runtime.executor.shards.assemble import Relative
from harness.runtime.executor.transport.messages import (
    Devices,
    Entry,
    Message,
    Place,
    SharedSum,
    shared_sums,
)


class Carried(NamedTuple):
    """A piece of a message."""

    message: Message
    entry: Entry


class Held(NamedTuple):
    """A region of what a part of this device holds."""

    key: PartKey
    region: Relative


@dataclass(frozen=True)
class Placement:
    """A piece of a want: brought by a message, or held by a part of this device.

    Attributes:
        in_want: where it lies in the want.
        source: the message that brings it; or the part that holds it, and where it lies there.
    """

    in_want: Relative
    source: Carried | Held


class Placed(NamedTuple):
    """A part of this device, and which region of a want is its."""

    in_want: Relative
    held: Held


@dataclass(frozen=True)
class Fetch:
    """A want to be assembled.

    Attributes:
        summed_over: devices whose all_reduce brings it, or takes its gradient; empty where
            messages do.
        goes_summed, returns_summed: which of both.
        placements: what it is put together from; none where it is summed.
        is_whole: one placement is all of it.
        kept: the parts of this device that its gradient goes to; none where that is summed.
    """

    want: Want
    key: WantKey
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_differentiable: bool
    summed_over: Devices
    goes_summed: bool
    returns_summed: bool
    placements: tuple[Placement, ...]
    kept: tuple[Placed, ...]

    @cached_property
    def is_whole(self) -> bool:
        return len(self.placements) == 1 and self.placements[0].in_want.is_all

    @cached_property
    def is_borrowed(self) -> bool:
        """Whether it is what a part of this device holds, and not a copy."""
        source = self.placements[0].source if self.is_whole else None
        return isinstance(source, Held) and source.region.is_all


@dataclass(frozen=True)
class Departure:
    """A message to be sent, and what each of its pieces is cut from."""

    message: Message
    cuts: tuple[tuple[PartKey | WantKey, Relative], ...]


class Return(NamedTuple):
    """The gradient that comes back of a piece, and where it belongs."""

    key: PartKey
    region: Relative
    carried: Carried


class Moves:
    """All that a device sends and receives at one size of microbatch, by the segments' places.

    Attributes:
        fetches: assembled before a segment.
        leaving: sent after it.
        collected: gradients of what it sent, waited for before its backward.
        returning: gradients of what it fetched, sent after its backward.
        sums: by part that has a piece in an all_reduce, forward or backward, whose.

    Args:
        messages: of the layout, all devices'.
    """

    def __init__(
        self,
        layout: Layout,
        program: Program,
        messages: list[Message],
        device: int,
    ) -> None:
        self._layout, self._program, self._device = layout, program, device
        self._summed = shared_sums(layout)
        self._messages = [m for m in messages if device in (m.source, m.target)]
        self._forward = _by_piece(self._messages, is_backward=False)
        self._backward = _by_piece(self._messages, is_backward=True)
        self.fetches: dict[Place, tuple[Fetch, ...]] = {}
        self.collected: dict[Place, tuple[Return, ...]] = {}
        for stage, segments in program.stages.items():
            for position, segment in enumerate(segments):
                self.fetches[stage, position] = tuple(map(self._fetch, segment.fetches))
                self.collected[stage, position] = self._collected(segment)
        self.sums: dict[PartKey, list[Fetch]] = defaultdict(list)
        for fetch in (fetch for own in self.fetches.values() for fetch in own):
            if fetch.summed_over:
                both = dict.fromkeys((*fetch.want.pieces, *fetch.want.returns))
                for piece in (one for one in both if one.part.device == device):
                    self.sums[self._key(fetch.want, piece)].append(fetch)
        self.leaving: dict[Place, list[Departure]] = defaultdict(list)
        self.returning: dict[Place, list[Departure]] = defaultdict(list)
        for message in self._messages:
            if message.source == device and message.entries:
                place = message.source_stage, message.after
                self.leaving[place].append(self._leaving(message))
            elif message.target == device and message.returning:
                place = message.target_stage, message.before
                self.returning[place].append(_returning(message))

    def received(self, stage: int, *, is_backward: bool) -> list[Message]:
        """What a stage waits for, in the order in which the others send it."""
        if is_backward:
            mine = [m for m in self._messages if (m.source, m.source_stage) == self._at(stage)]
            return sorted((m for m in mine if m.returning), key=_returns_before)
        mine = [m for m in self._messages if (m.target, m.target_stage) == self._at(stage)]
        return sorted((m for m in mine if m.entries), key=lambda m: (m.last, m.after, m.number))

    def _at(self, stage: int) -> tuple[int, int]:
        return self._device, stage

    def _fetch(self, want: Want) -> Fetch:
        total = self._summed.get(want.number, SharedSum((), goes=False, returns=False))
        returns = [p for p in want.returns if p.part.device == self._device]
        return Fetch(
            want=want,
            key=WantKey(want.number),
            shape=self._layout.sizes_of(want.value, want.block),
            dtype=self._layout.tensor(want.value).dtype,
            is_differentiable=want.value in self._program.differentiable,
            summed_over=total.devices,
            goes_summed=total.goes,
            returns_summed=total.returns,
            placements=() if total.goes else tuple(self._placements(want)),
            kept=()
            if total.returns
            else tuple(
                Placed(Relative.of(piece.region, want.block), self._held(want, piece))
                for piece in returns
            ),
        )

    def _placements(self, want: Want) -> list[Placement]:
        found: list[Placement] = []
        for piece in want.pieces:
            in_want = Relative.of(piece.region, want.block)
            if piece.part.device != self._device:
                carried = self._forward[want.number, piece.part.index]
                found.append(Placement(in_want, carried))
            else:
                found.append(Placement(in_want, self._held(want, piece)))
        return found

    def _held(self, want: Want, piece: Piece) -> Held:
        key = self._key(want, piece)
        return Held(key, Relative.of(piece.region, self._program.blocks[key]))

    @staticmethod
    def _key(want: Want, piece: Piece) -> PartKey:
        return PartKey(want.value, piece.part.operator, piece.part.index)

    def _leaving(self, message: Message) -> Departure:
        entries = message.entries
        return Departure(message, tuple(self._held(e.want, e.piece) for e in entries))

    def _collected(self, segment: Segment) -> tuple[Return, ...]:
        """Gradients of a segment's outputs, first those that are sent first."""
        found: list[Return] = []
        for send in segment.sends:
            carried = self._backward.get((send.want.number, send.piece.part.index))
            if carried is not None:
                found.append(Return(*self._held(send.want, send.piece), carried))
        return tuple(sorted(found, key=lambda one: _returns_before(one.carried.message)))


def _returns_before(message: Message) -> tuple[int, int, int]:
    """What orders messages whose gradients come back: the segments that return them, last to first.

    Several of one operator's tasks may each begin a segment.
    """
    return -message.first, -message.before, message.number


def _by_piece(messages: list[Message], *, is_backward: bool) -> dict[tuple[int, int], Carried]:
    return {
        (entry.want.number, entry.piece.part.index): Carried(message, entry)
        for message in messages
        for entry in message.carried(is_backward=is_backward)
    }


def _returning(message: Message) -> Departure:
    cuts = tuple(
        (WantKey(want.number), Relative.of(piece.region, want.block))
        for want, piece, *_ in message.returning
    )
    return Departure(message, cuts)
