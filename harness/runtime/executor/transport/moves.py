"""The transfers of each of a device's segments, computed once: regions, shapes and order."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from harness.runtime.executor.geometry.layout import Layout, Piece, Want
from harness.runtime.executor.program.program import PartKey, Program, Segment, WantKey
from harness.runtime.executor.shards.regions import Relative
from harness.runtime.executor.transport.messages import (
    Devices,
    End,
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


class LocalRegion(NamedTuple):
    """A region within a part of this device."""

    key: PartKey
    region: Relative


@dataclass(frozen=True)
class Placement:
    """A piece of a want: from a message or from a part of this device.

    Attributes:
        in_want: its region in the want.
        source: the message, or the part with the region in it.
    """

    in_want: Relative
    source: Carried | LocalRegion


class LocalPart(NamedTuple):
    """A region of a want that a part of this device holds."""

    in_want: Relative
    held: LocalRegion


@dataclass(frozen=True)
class Fetch:
    """A want to be assembled.

    Attributes:
        summed_over: devices of its all-reduce; empty if messages carry it.
        goes_summed, returns_summed: whether the all-reduce sums the value, or its gradient.
        placements: the pieces that it consists of; empty if it is all-reduced.
        is_whole: one placement covers it.
        local_parts: parts of this device that receive its gradient; empty if that is all-reduced.
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
    local_parts: tuple[LocalPart, ...]

    @cached_property
    def is_whole(self) -> bool:
        return len(self.placements) == 1 and self.placements[0].in_want.is_all

    @cached_property
    def is_borrowed(self) -> bool:
        """Whether it is the tensor of a part of this device, not a copy."""
        source = self.placements[0].source if self.is_whole else None
        return isinstance(source, LocalRegion) and source.region.is_all


@dataclass(frozen=True)
class Departure:
    """A message to send, with the tensor and the region of each of its pieces."""

    message: Message
    cuts: tuple[tuple[PartKey | WantKey, Relative], ...]


class Return(NamedTuple):
    """The gradient of a piece that comes back, with the part and region it belongs to."""

    key: PartKey
    region: Relative
    carried: Carried


class Moves:
    """The transfers of a device at one microbatch size, by segment.

    Attributes:
        fetches: wants to assemble before a segment.
        leaving: messages to send after it.
        collected: gradients to wait for before its backward, of values that it sent.
        returning: messages with gradients of its fetches, to send after its backward.
        sums: the all-reduces, forward or backward, that each part contributes to.

    Args:
        messages: messages of the layout, of all devices.
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
        self._messages = [m for m in messages if device in (m.source.rank, m.target.rank)]
        self._forward = _by_piece(self._messages, is_backward=False)
        self._backward = _by_piece(self._messages, is_backward=True)
        self.fetches: dict[Place, tuple[Fetch, ...]] = {}
        self.collected: dict[Place, tuple[Return, ...]] = {}
        for stage, segments in program.stages.items():
            for position, segment in enumerate(segments):
                self.fetches[stage, position] = tuple(map(self._fetch, segment.fetches))
                self.collected[stage, position] = self._collected(segment)
        self.sums: dict[PartKey, list[Fetch]] = defaultdict(list)
        for fetch in (fetch for each in self.fetches.values() for fetch in each):
            if fetch.summed_over:
                both = dict.fromkeys((*fetch.want.pieces, *fetch.want.returns))
                for piece in (one for one in both if one.part.device == device):
                    self.sums[self._key(fetch.want, piece)].append(fetch)
        self.leaving: dict[Place, list[Departure]] = defaultdict(list)
        self.returning: dict[Place, list[Departure]] = defaultdict(list)
        for message in self._messages:
            if message.source.rank == device and message.entries:
                place = message.source.stage, message.after
                self.leaving[place].append(self._leaving(message))
            elif message.target.rank == device and message.returning:
                place = message.target.stage, message.before
                self.returning[place].append(_returning(message))

    def received(self, stage: int, *, is_backward: bool) -> list[Message]:
        """The messages that a stage waits for, in the order in which they are sent."""
        here = End(self._device, stage)
        found = [m for m in self._messages if m.ends(is_backward=is_backward)[1] == here]
        if is_backward:
            return sorted((m for m in found if m.returning), key=_returns_before)
        return sorted((m for m in found if m.entries), key=lambda m: (m.last, m.after, m.number))

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
            local_parts=()
            if total.returns
            else tuple(
                LocalPart(Relative.of(piece.region, want.block), self._held(want, piece))
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

    def _held(self, want: Want, piece: Piece) -> LocalRegion:
        key = self._key(want, piece)
        return LocalRegion(key, Relative.of(piece.region, self._program.blocks[key]))

    @staticmethod
    def _key(want: Want, piece: Piece) -> PartKey:
        return PartKey(want.value, piece.part.operator, piece.part.index)

    def _leaving(self, message: Message) -> Departure:
        entries = message.entries
        return Departure(message, tuple(self._held(e.want, e.piece) for e in entries))

    def _collected(self, segment: Segment) -> tuple[Return, ...]:
        """Gradients of a segment's outputs from other devices, in the order of sending."""
        found: list[Return] = []
        for send in segment.sends:
            carried = self._backward.get((send.want.number, send.piece.part.index))
            if carried is not None:
                found.append(Return(*self._held(send.want, send.piece), carried))
        return tuple(sorted(found, key=lambda one: _returns_before(one.carried.message)))


def _returns_before(message: Message) -> tuple[int, int, int]:
    """Sort key for the order in which gradients are sent: those of the last segment first.

    Several tasks of one operator may each begin a segment, so its position alone is ambiguous.
    """
    return -message.first, -message.before, message.number


def _by_piece(messages: list[Message], *, is_backward: bool) -> dict[tuple[int, int], Carried]:
    return {
        entry.key: Carried(message, entry)
        for message in messages
        for entry in message.carried(is_backward=is_backward)
    }


def _returning(message: Message) -> Departure:
    cuts = tuple(
        (WantKey(want.number), Relative.of(piece.region, want.block))
        for want, piece, *_ in message.returning
    )
    return Departure(message, cuts)
