"""The transfers of each of a device's segments, computed once: regions, shapes and order."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from harness.runtime.executor.geometry.layout import Layout, Want
from harness.runtime.executor.program.program import PartKey, Program, Route, Segment, WantKey
from harness.runtime.executor.transport.messages import (
    End,
    Message,
    Place,
    SharedSum,
    shared_sums,
)


@dataclass(frozen=True)
class Fetch:
    """A want to be assembled.

    Attributes:
        is_rounded: whether autocast sends it in its own dtype.
        sum: its all-reduce; without devices if messages carry it.
        routes: of the pieces that it consists of; empty if it is all-reduced.
        local: routes to parts of this device that receive its gradient; empty if that is
            all-reduced.
    """

    want: Want
    shape: tuple[int, ...]
    dtype: torch.dtype
    is_differentiable: bool
    is_rounded: bool
    sum: SharedSum
    routes: tuple[Route, ...]
    local: tuple[Route, ...]

    @property
    def key(self) -> WantKey:
        return WantKey(self.want.number)

    @cached_property
    def whole(self) -> Route | None:
        """The route of the one piece that covers it; None if there are several."""
        is_whole = len(self.routes) == 1 and self.routes[0].in_want.is_all
        return self.routes[0] if is_whole else None

    @cached_property
    def is_borrowed(self) -> bool:
        """Whether it is the tensor of a part of this device, not a copy."""
        return self.whole is not None and self.whole.is_local and self.whole.held.is_all


class Moves:
    """The transfers of a device at one microbatch size, by segment.

    Attributes:
        fetches: wants to assemble before a segment.
        leaving: messages to send after it.
        collected: values that it sent whose gradients to wait for before its backward, in the order
            of sending.
        returning: messages with gradients of its fetches, to send after its backward.
        sums: the all-reduces, forward or backward, that each part contributes to.

    Args:
        messages: messages of the layout, of all devices.
    """

    def __init__(
        self, layout: Layout, program: Program, messages: list[Message], device: int
    ) -> None:
        self._layout, self._program, self._device = layout, program, device
        self._summed = shared_sums(layout)
        self._messages = [m for m in messages if device in (m.source.rank, m.target.rank)]
        self._message_of = {
            (route.number, is_backward): message
            for message in self._messages
            for is_backward in (False, True)
            for route in message.carried(is_backward=is_backward)
        }
        self.fetches: dict[Place, tuple[Fetch, ...]] = {}
        self.collected: dict[Place, list[Route]] = {}
        for stage, segments in program.stages.items():
            for position, segment in enumerate(segments):
                self.fetches[stage, position] = tuple(map(self._fetch, segment.fetches))
                self.collected[stage, position] = self._collected(segment)
        self.sums: dict[PartKey, list[Fetch]] = defaultdict(list)
        for fetch in (fetch for each in self.fetches.values() for fetch in each):
            if fetch.sum.devices:
                both = dict.fromkeys((*fetch.want.pieces, *fetch.want.returns))
                for part in (piece.part for piece in both if piece.part.device == device):
                    self.sums[PartKey.of(fetch.want.value, part)].append(fetch)
        self.leaving: dict[Place, list[Message]] = defaultdict(list)
        self.returning: dict[Place, list[Message]] = defaultdict(list)
        for message in self._messages:
            if message.source.rank == device and message.entries:
                self.leaving[message.source.stage, message.after].append(message)
            elif message.target.rank == device and message.returning:
                self.returning[message.target.stage, message.before].append(message)

    def received(self, stage: int, *, is_backward: bool) -> list[Message]:
        """The messages that a stage waits for, in the order in which they are sent."""
        here = End(self._device, stage)
        found = [m for m in self._messages if m.ends(is_backward=is_backward)[1] == here]
        if is_backward:
            return sorted((m for m in found if m.returning), key=_returns_before)
        return sorted((m for m in found if m.entries), key=lambda m: (m.last, m.after, m.number))

    def awaited(self, place: Place, *, is_backward: bool) -> Iterator[Message]:
        """The messages that a segment takes pieces of."""
        routes = self.collected[place]
        if not is_backward:
            routes = [route for fetch in self.fetches[place] for route in fetch.routes]
        for route in routes:
            if not route.is_local:
                yield self.message_of(route, is_backward=is_backward)

    def message_of(self, route: Route, *, is_backward: bool) -> Message:
        """The message that carries a piece."""
        return self._message_of[route.number, is_backward]

    def _fetch(self, want: Want) -> Fetch:
        total = self._summed.get(want.number, SharedSum((), goes=False, returns=False))
        taken = () if total.goes else want.pieces
        returned = () if total.returns else want.returns
        local = (piece for piece in returned if piece.part.device == self._device)
        return Fetch(
            want=want,
            shape=self._layout.sizes_of(want.value, want.block),
            dtype=self._layout.tensor(want.value).dtype,
            is_differentiable=want.value in self._program.differentiable,
            is_rounded=self._layout.is_made_of_weights(want.value),
            sum=total,
            routes=tuple(Route.of(self._layout, want, piece) for piece in taken),
            local=tuple(Route.of(self._layout, want, piece) for piece in local),
        )

    def _collected(self, segment: Segment) -> list[Route]:
        sent = [route for route in segment.sends if (route.number, True) in self._message_of]
        return sorted(sent, key=lambda one: _returns_before(self._message_of[one.number, True]))


def _returns_before(message: Message) -> tuple[int, int, int]:
    """Sort key for the order in which gradients are sent: those of the last segment first.

    Several tasks of one operator may each begin a segment, so its position alone is ambiguous.
    """
    return -message.first, -message.before, message.number
