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
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from harness.domain.routes import are_read_together, summing_devices
from harness.runtime.executor.geometry.layout import Layout, Want
from harness.runtime.executor.options import LARGEST_JOINED_BYTES
from harness.runtime.executor.program.program import Draft, Route, draft_segments
from harness.runtime.executor.shards.forms import Forms

Devices = tuple[int, ...]
Shape = tuple[int, ...]


class End(NamedTuple):
    """One end of a message: a stage on a device."""

    rank: int
    stage: int


@dataclass(frozen=True)
class Message:
    """Pieces from one device to another; in backward, their gradients in the other direction.

    Either direction may be empty, because the target has a copy of the value, or because another
    copy returns the gradient.

    Attributes:
        number: unique over all devices of a layout; equal on every rank.
        after: position of the segment in the sender's stage after which it is sent.
        last: position of the operator that computes the last of its pieces, including pieces of
            which only the gradient is sent.
        before: position of the segment in the receiver's stage that waits for it.
        first: position of the first operator of that segment.
        is_rounded: whether autocast sends its pieces in its own dtype.
        entries: pieces that are sent, in the order of their computation.
        returning: pieces whose gradients come back.
    """

    number: int
    source: End
    target: End
    after: int
    last: int
    before: int
    first: int
    dtype: torch.dtype
    is_rounded: bool
    entries: tuple[Route, ...]
    returning: tuple[Route, ...]

    def carried(self, *, is_backward: bool) -> tuple[Route, ...]:
        return self.returning if is_backward else self.entries

    def ends(self, *, is_backward: bool) -> tuple[End, End]:
        """Sender and reader."""
        return (self.target, self.source) if is_backward else (self.source, self.target)

    def shape(self, *, is_backward: bool) -> Shape:
        """Shape of the tensor that is sent: a single piece keeps its shape, several are flat."""
        carried = self.carried(is_backward=is_backward)
        return carried[0].shape if len(carried) == 1 else (sum(r.n_elements for r in carried),)

    def split(self, tensor: Tensor, *, is_backward: bool) -> dict[tuple[int, int], Tensor]:
        """The pieces of the tensor that was sent, by the numbers of their routes."""
        carried = self.carried(is_backward=is_backward)
        if len(carried) == 1:
            return {carried[0].number: tensor}
        parts = tensor.split([route.n_elements for route in carried])
        return {r.number: part.view(r.shape) for r, part in zip(carried, parts, strict=True)}

    @cached_property
    def operators(self) -> list[str]:
        """The operators whose outputs it carries, one for each piece."""
        return [route.piece.part.operator for route in self.entries or self.returning]

    @property
    def label(self) -> str:
        """A short text that names the operators."""
        first, *rest = self.operators
        return f"{first} and {len(rest)} more" if rest else first


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
    return [
        _message(forms.layout, number, pieces, waiting)
        for number, pieces in enumerate(groups.values())
    ]


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


def _message(
    layout: Layout, number: int, pieces: list[_Leaving], waiting: Mapping[int, tuple[Place, int]]
) -> Message:
    routes = [one.route for one in pieces]
    want, part = routes[0].want, routes[0].piece.part
    (stage, position), first_operator = waiting[want.number]
    return Message(
        number=number,
        source=End(part.device, part.stage),
        target=End(want.device, stage),
        after=pieces[-1].after,
        last=layout.position[routes[-1].piece.part.operator],
        before=position,
        first=first_operator,
        dtype=layout.tensor(want.value).dtype,
        is_rounded=layout.is_made_of_weights(want.value),
        entries=tuple(r for r in routes if r.goes),
        returning=tuple(r for r in routes if r.returns and r.want.value in layout.differentiable),
    )


class SharedSum(NamedTuple):
    """One all-reduce that serves the wants of all its devices.

    Attributes:
        goes: it sums values in forward; else each device has the whole value already.
        returns: it sums gradients in backward; else each device has the whole gradient already.
    """

    devices: Devices
    goes: bool
    returns: bool


def shared_sums(layout: Layout) -> dict[int, SharedSum]:
    """The all-reduces by the number of each want that they serve; none of two regions of one value
    on the same devices, which may want them in unlike orders."""
    by_region: dict[tuple[object, ...], list[Want]] = defaultdict(list)
    for want in layout.wants:
        by_region[want.value, want.block, want.copies].append(want)
    pairs = ((wants, _shared_sum(wants)) for wants in by_region.values())
    found = [(wants, one) for wants, one in pairs if one is not None]
    n_regions = Counter((wants[0].value, one.devices) for wants, one in found)
    return {
        want.number: one
        for wants, one in found
        if n_regions[wants[0].value, one.devices] == 1
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
