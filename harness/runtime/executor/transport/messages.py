"""Group the pieces between devices into messages, and find partial sums for an all-reduce.

    device 0  | table 0 | table 1 | table 2 |--- one message --->  device 1, before the interaction

A message has an overhead on both ends. Therefore small pieces for one segment of the receiver share
a message, sent when the last of them is computed, if the sender does not wait for other devices
between the first and the last (else two devices could wait for each other). The receiver's segment
computes all their gradients together, which also share a message.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from harness.domain.routes import are_read_together, summing_devices
from harness.runtime.executor.geometry.layout import Layout, Want
from harness.runtime.executor.options import LARGEST_JOINED_BYTES
from harness.runtime.executor.program.program import Draft, Route, draft_segments
from harness.runtime.executor.shards.forms import Forms


class End(NamedTuple):
    """One end of a message: a stage on a device."""

    rank: int
    stage: int


@dataclass(frozen=True, kw_only=True)
class Message:
    """Pieces that one stage sends to another, or gradients of pieces that come back.

    Attributes:
        number: unique over all devices of a layout; equal on every rank.
        after: position of the segment in the sender's stage after which it is sent.
        before: position of the segment in the reader's stage that waits for it.
        order: sorts the messages of a direction in the order in which a stage sends them.
        is_rounded: whether autocast sends its pieces in its own dtype.
        routes: of its pieces, in the order of their computation in forward.
    """

    number: int
    is_backward: bool
    sender: End
    reader: End
    after: int
    before: int
    order: tuple[int, int, int]
    dtype: torch.dtype
    is_rounded: bool
    routes: tuple[Route, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor that is sent: a single piece keeps its shape, several are flat."""
        first, *rest = self.routes
        return (sum(r.n_elements for r in self.routes),) if rest else first.shape

    def split(self, tensor: Tensor) -> dict[tuple[int, int], Tensor]:
        """The pieces of the tensor that was sent, by the numbers of their routes."""
        if len(self.routes) == 1:
            return {self.routes[0].number: tensor}
        parts = tensor.split([route.n_elements for route in self.routes])
        return {r.number: part.view(r.shape) for r, part in zip(self.routes, parts, strict=True)}

    @property
    def operator(self) -> str:
        """The operator whose output its first piece is of."""
        return self.routes[0].piece.part.operator

    @property
    def label(self) -> str:
        """A short text that names the operators."""
        n_others = len(self.routes) - 1
        return f"{self.operator} and {n_others} more" if n_others else self.operator


Place = tuple[int, int]  # stage, position of a segment


def find_messages(forms: Forms, n_devices: int) -> list[Message]:
    """The messages of a layout; equal on every rank."""
    drafts = {device: draft_segments(forms, device) for device in range(n_devices)}
    # The segment that waits for each want, and the position of its first operator.
    waiting = {
        want.number: ((stage, position), forms.layout.position[draft.parts[0].operator])
        for by_stage in drafts.values()
        for stage, segments in by_stage.items()
        for position, draft in enumerate(segments)
        for want in draft.fetches
    }
    summed = shared_sums(forms.layout)
    groups: dict[tuple[object, ...], list[_Leaving]] = defaultdict(list)
    for by_stage in drafts.values():
        for segments in by_stage.values():
            for leaving in _leaving(forms.layout, segments, summed):
                groups[(*leaving.key, *waiting[leaving.route.want.number][0])].append(leaving)
    messages: list[Message] = []
    for pieces in groups.values():
        messages += _messages(forms.layout, len(messages), pieces, waiting)
    return messages


class _Leaving(NamedTuple):
    """A piece to send; pieces with equal keys share a message if one segment waits for them."""

    route: Route
    after: int
    key: tuple[object, ...]


def _leaving(
    layout: Layout, segments: list[Draft], summed: Mapping[int, SharedSum]
) -> Iterator[_Leaving]:
    """The pieces that one stage of one device sends, without those that an all-reduce sums."""
    n_waits = 0
    for position, draft in enumerate(segments):
        n_waits += draft.waits
        for route in draft.sends:
            want, part = route.want, route.piece.part
            if want.number in summed:
                continue
            dtype = layout.tensor(want.value).dtype
            is_separate = route.n_elements * dtype.itemsize > LARGEST_JOINED_BYTES
            separate = route.number if is_separate else ()
            is_rounded = layout.is_made_of_weights(want.value)
            key = part.device, part.stage, n_waits, want.device, dtype, is_rounded, separate
            yield _Leaving(route, position, key)


def _messages(
    layout: Layout, number: int, pieces: list[_Leaving], waiting: Mapping[int, tuple[Place, int]]
) -> Iterator[Message]:
    """The message with pieces and the one with their gradients; either may be missing, because the
    target has a copy of the value, or because another copy returns the gradient."""
    routes = [leaving.route for leaving in pieces]
    want, part = routes[0].want, routes[0].piece.part
    (stage, waits_at), first_operator = waiting[want.number]
    source, target = End(part.device, part.stage), End(want.device, stage)
    sent_at = pieces[-1].after
    last_operator = layout.position[routes[-1].piece.part.operator]
    make = partial(
        Message,
        dtype=layout.tensor(want.value).dtype,
        is_rounded=layout.is_made_of_weights(want.value),
    )
    if going := tuple(route for route in routes if route.goes):
        yield make(
            number=number, is_backward=False, sender=source, reader=target, after=sent_at,
            before=waits_at, order=(last_operator, sent_at, number), routes=going,
        )  # fmt: skip
    if returning := tuple(r for r in routes if r.returns and r.want.value in layout.differentiable):
        # Those of the last segment first. Several tasks of one operator may each begin a segment.
        number += bool(going)
        yield make(
            number=number, is_backward=True, sender=target, reader=source, after=waits_at,
            before=sent_at, order=(-first_operator, -waits_at, number), routes=returning,
        )  # fmt: skip


class SharedSum(NamedTuple):
    """One all-reduce that serves the wants of all its devices.

    Attributes:
        goes: it sums values in forward; else each device has the whole value already.
        returns: it sums gradients in backward; else each device has the whole gradient already.
    """

    devices: tuple[int, ...]
    goes: bool
    returns: bool


def shared_sums(layout: Layout) -> dict[int, SharedSum]:
    """The all-reduces by the number of each want that they serve; none of two regions of one value
    on the same devices, which may want them in unlike orders."""
    by_region: dict[tuple[object, ...], list[Want]] = defaultdict(list)
    for want in layout.wants:
        by_region[want.value, want.block, want.copies, want.served].append(want)
    pairs = ((wants, _shared_sum(wants)) for wants in by_region.values())
    summed = [(wants, shared_sum) for wants, shared_sum in pairs if shared_sum is not None]
    n_regions = Counter((wants[0].value, shared_sum.devices) for wants, shared_sum in summed)
    return {
        want.number: shared_sum
        for wants, shared_sum in summed
        if n_regions[wants[0].value, shared_sum.devices] == 1
        for want in wants
    }


def _shared_sum(wants: list[Want]) -> SharedSum | None:
    """The all-reduce for wants; None unless each device holds one part and reads the whole."""
    parts = {piece.part: piece.region for want in wants for piece in (*want.pieces, *want.returns)}
    is_whole = all(region == wants[0].block for region in parts.values())
    devices = summing_devices([part.device for part in parts], is_whole=is_whole)
    stages = {want.stage for want in wants} | {part.stage for part in parts}
    first = {want.device: want.first_consumer for want in wants}
    if devices is None or len(stages) > 1 or not are_read_together(devices, first):
        return None
    n_pieces = {len(want.pieces) for want in wants}
    n_returns = {len(want.returns) for want in wants}
    each, one = {len(devices)}, {1}
    if n_pieces not in (each, one) or n_returns not in (each, one) or n_pieces == n_returns == one:
        return None
    return SharedSum(devices, n_pieces == each, n_returns == each)
