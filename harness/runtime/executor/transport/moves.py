"""The transfers of each of a device's segments, computed once, and the receives of a step.

Receives are posted in the order in which other devices send, some exchanges ahead:

    segment waits for A | segment waits for B | segment waits for C, D
    while this device waits for A, it posts the receives up to D and some more

A transfer starts when both ends have posted it, and needs a buffer from then on. With few posted
receives, a slow link idles until this device waits. Posting takes CPU time, which is free during a
wait but delays computing, so all but the first receives are posted during waits. A message that
cannot have been sent yet, because its sender first needs one that this device has not sent, is not
received ahead:

    this device     F0  F1  wait for B0 (posts B0, B1, not B2)  B0  F2 -------> needed for B2

Partial sums that all their devices read whole are all-reduced, instead of exchanging messages:

    forward   parts on 0, 1, 2 --all_reduce--> the sum, on 0, 1, 2, for their next tasks
    backward  their gradients  --all_reduce--> the gradient of every part

An all-reduce starts after the segment that computes the last of its input, in topological order
(backward: reverse), so all devices of a group start its sums in the same order. Weight gradients
use other groups, because the time of their all-reduces depends on the device.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from harness.domain.schedule import AHEAD, Action
from harness.runtime.engines.phases import Phases
from harness.runtime.executor.geometry.layout import Layout, Want
from harness.runtime.executor.program.program import PartKey, Program, Route, WantKey
from harness.runtime.executor.shards.regions import Region
from harness.runtime.executor.shards.ring import Pass
from harness.runtime.executor.transport.channels import Channels, Moment, Transfer
from harness.runtime.executor.transport.messages import End, Message, Place, SharedSum, shared_sums

_AT_FIRST = 2  # exchanges whose receives are posted before the first action of a step
_BEFORE_ALL: Moment = (-1, 0)


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


class Moves:
    """The transfers of a device at one microbatch size, by segment.

    Attributes:
        fetches: wants to assemble before a segment.
        leaving: messages to send after it.
        collected: values that it sent whose gradients to wait for before its backward, in the order
            of sending.
        returning: messages with gradients of its fetches, to send after its backward.
        sums: the all-reduces, forward or backward, that each part contributes to, each with its
            region in the part's tensor.

    Args:
        messages: messages of the layout, of all devices.
    """

    def __init__(
        self, layout: Layout, program: Program, messages: list[Message], device: int
    ) -> None:
        self._layout, self._program, self._device = layout, program, device
        self._summed = shared_sums(layout)
        self._messages = [m for m in messages if device in (m.sender.rank, m.reader.rank)]
        self._message_of = {
            (route.number, message.is_backward): message
            for message in self._messages
            for route in message.routes
        }
        self.fetches: dict[Place, tuple[Fetch, ...]] = {}
        self.collected: dict[Place, list[Route]] = {}
        for stage, segments in program.stages.items():
            for position, segment in enumerate(segments):
                self.fetches[stage, position] = tuple(map(self._fetch, segment.fetches))
                sent = [r for r in segment.sends if (r.number, True) in self._message_of]
                self.collected[stage, position] = sorted(
                    sent, key=lambda route: self._message_of[route.number, True].order
                )
        self.sums: dict[PartKey, list[tuple[Fetch, Region]]] = defaultdict(list)
        for fetch in (fetch for each in self.fetches.values() for fetch in each):
            if fetch.sum.devices:
                both = dict.fromkeys((*fetch.want.pieces, *fetch.want.returns))
                for piece in (piece for piece in both if piece.part.device == device):
                    route = Route.of(layout, fetch.want, piece)
                    self.sums[route.source].append((fetch, route.held))
        self.leaving: dict[Place, list[Message]] = defaultdict(list)
        self.returning: dict[Place, list[Message]] = defaultdict(list)
        for message in self._messages:
            if message.sender.rank == device:
                sent_after = self.returning if message.is_backward else self.leaving
                sent_after[message.sender.stage, message.after].append(message)

    def received(self, stage: int, *, is_backward: bool) -> list[Message]:
        """The messages that a stage waits for, in the order in which they are sent."""
        wanted = End(self._device, stage), is_backward
        found = (m for m in self._messages if (m.reader, m.is_backward) == wanted)
        return sorted(found, key=lambda message: message.order)

    def sent(self, stage: int, *, is_backward: bool) -> list[Message]:
        sender = End(self._device, stage), is_backward
        return [m for m in self._messages if (m.sender, m.is_backward) == sender]

    def exchanges(self, stage: int, *, is_backward: bool) -> Iterator[list[Message]]:
        """The same messages by the segment that first takes a piece of them, in the order of
        running."""
        places = sorted(place for place in self.fetches if place[0] == stage)
        known: set[int] = set()
        for place in reversed(places) if is_backward else places:
            routes = self.collected[place]
            if not is_backward:
                routes = [route for fetch in self.fetches[place] for route in fetch.routes]
            remote = (route for route in routes if not route.is_local)
            awaited = (self.message_of(route, is_backward=is_backward) for route in remote)
            if new := {m.number: m for m in awaited if m.number not in known}:
                known.update(new)
                yield list(new.values())

    def message_of(self, route: Route, *, is_backward: bool) -> Message:
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


Slot = tuple[int, int]  # microbatch, message


class Receives:
    """The receives of one device in a step; raises as Channels do.

    Args:
        actions: actions of a step, whose first microbatch has number 0.
        at: returns the program and the moves of a microbatch.
        n_microbatches: microbatches per step.
        dtype: gives the dtype in which a message is sent.
        first: a number of the first microbatch.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        at: Callable[[int], tuple[Program, Moves]],
        n_microbatches: int,
        channels: Channels,
        phases: Phases,
        dtype: Callable[[Message], torch.dtype],
        first: int,
    ) -> None:
        self._at, self._channels, self._phases, self._dtype = at, channels, phases, dtype
        self._slots: list[tuple[Slot, Message]] = []
        exchanges: list[list[Slot]] = []
        begins: list[Moment] = []  # of the exchanges
        sent: dict[int, list[tuple[Moment, Moment]]] = defaultdict(list)  # read at, sent at
        for action in (action for action in actions if action.kind != "weight"):
            k, is_backward = action.microbatch, action.kind == "backward"
            _, moves = at(k)
            received = moves.received(action.stage, is_backward=is_backward)
            self._slots += [((k, message.number), message) for message in received]
            for messages in moves.exchanges(action.stage, is_backward=is_backward):
                exchanges.append([(k, message.number) for message in messages])
                begins.append(channels.read_at(messages[0], first + k))
            for message in moves.sent(action.stage, is_backward=is_backward):
                moments = (
                    channels.read_at(message, first + k),
                    channels.sent_at(message, first + k),
                )
                sent[message.reader.rank].append(moments)
        needed = {rank: _needed(own) for rank, own in sent.items()}
        due = [
            needed[message.sender.rank](channels.sent_at(message, first + k))
            if message.sender.rank in needed
            else _BEFORE_ALL
            for (k, _), message in self._slots
        ]
        dues = list(accumulate(due, max))
        position = {slot: place for place, (slot, _) in enumerate(self._slots)}
        # Receives to post for each exchange; devices may exchange messages in different orders.
        lasts = (max(position[slot] for slot in slots) for slots in exchanges)
        ends = [0, *(last + 1 for last in accumulate(lasts, max))]
        self._at_first = min(ends[min(_AT_FIRST, len(exchanges))], bisect_right(dues, _BEFORE_ALL))
        self._until = {
            slot: max(
                ends[k + 1],
                min(ends[min(k + 1 + AHEAD, len(exchanges))], bisect_left(dues, begin)),
            )
            for k, (begin, slots) in enumerate(zip(begins, exchanges, strict=True))
            for slot in slots
        }
        self._n_microbatches = n_microbatches
        self._first = self._n_posted = 0
        self._transfers: dict[Slot, Transfer] = {}

    def start(self, first: int) -> None:
        """Begin a step at microbatch `first`, and post the receives of its first exchanges."""
        self._first, self._n_posted = first, 0
        self._post(self._at_first)

    def finish(self) -> None:
        """End a step, in which all messages have been taken."""
        assert not self._transfers, "every receive that was posted is waited for"
        assert self._n_posted == len(self._slots), "every receive is posted"

    def take(self, microbatch: int, route: Route, *, is_backward: bool) -> Tensor:
        """Wait for a message if necessary, and take one of its pieces; each can be taken once."""
        message = self._at(microbatch)[1].message_of(route, is_backward=is_backward)
        slot = microbatch - self._first, message.number
        if slot not in self._transfers:
            self._post(self._until[slot])
        transfer = self._transfers[slot]
        if transfer.pieces is None:
            self._phases.wait(
                lambda: self._wait(slot, transfer),
                name=message.label if len(message.routes) > 1 else "",
                n_bytes=transfer.buffer.nbytes,
                microbatch=microbatch % self._n_microbatches,
                pass_="backward" if is_backward else "forward",
                operator=message.operator,
                peer=message.sender.rank,
            )
        assert transfer.pieces is not None, "it has arrived"
        found = transfer.pieces.pop(route.number)
        if not transfer.pieces:
            del self._transfers[slot]
        return found

    def _wait(self, slot: Slot, transfer: Transfer) -> None:
        self._post(self._until[slot])
        self._channels.wait(transfer)

    def _post(self, until: int) -> None:
        for slot, message in self._slots[self._n_posted : until]:
            microbatch = self._first + slot[0]
            self._transfers[slot] = self._channels.receive(
                message, self._dtype(message), microbatch
            )
        self._n_posted = max(self._n_posted, until)


def _needed(sent: list[tuple[Moment, Moment]]) -> Callable[[Moment], Moment]:
    """From the segment after which another device sends, when this device has sent all that the
    other one reads before.

    Args:
        sent: when the other device reads each message of this one, and when this one sends it.
    """
    read_at, sent_at = zip(*sorted(sent), strict=True)
    latest = [_BEFORE_ALL, *accumulate(sent_at, max)]
    return lambda moment: latest[bisect_right(read_at, moment)]


def norm_reducer(
    channels: Channels, phases: Phases, operator: str, devices: tuple[int, ...]
) -> Callable[[Tensor], Tensor]:
    """Make the function that sums a batch norm's statistics over devices, in place."""
    label = f"statistics of {operator}"
    name = f"sum of {label} over ranks {list(devices)}"

    def sum_over_devices(x: Tensor) -> Tensor:
        if len(devices) > 1:
            phases.wait(
                lambda: channels.start_sum(x, label, devices, is_collective=True)(),
                name=name,
                operator=operator,
            )
        return x

    return sum_over_devices


def key_passer(channels: Channels, phases: Phases, operator: str, devices: tuple[int, ...]) -> Pass:
    """Make the function that passes keys and values, or their gradients, on to the next device."""
    label = f"keys of {operator}"

    def pass_on(tensor: Tensor, shape: tuple[int, ...]) -> Callable[[], Tensor]:
        wait = channels.start_pass(tensor, shape, label, devices)
        name = f"{label} over ranks {list(devices)}"
        n_bytes = math.prod(shape) * tensor.element_size()
        return lambda: phases.wait(wait, name=name, n_bytes=n_bytes, operator=operator)

    return pass_on


class Sums:
    """The all-reduces of partial sums that this device takes part in; raises as Channels do."""

    def __init__(self, channels: Channels, phases: Phases, n_microbatches: int) -> None:
        self._channels, self._phases, self._n_microbatches = channels, phases, n_microbatches
        self._under_way: dict[tuple[int, int, bool], tuple[Tensor, Callable[[], None]]] = {}

    def start(self, tensor: Tensor, fetch: Fetch, microbatch: int, *, is_backward: bool) -> None:
        """Start an all-reduce in place; the caller must not use the tensor afterwards."""
        operator = fetch.want.pieces[0].part.operator
        label = f"gradient of {operator}" if is_backward else operator
        wait = self._channels.start_sum(tensor, label, fetch.sum.devices)
        self._under_way[microbatch, fetch.want.number, is_backward] = tensor, wait

    def take(self, fetch: Fetch, microbatch: int, *, is_backward: bool) -> Tensor:
        """Wait for an all-reduce and return its result."""
        tensor, wait = self._under_way.pop((microbatch, fetch.want.number, is_backward))
        operator = fetch.want.pieces[0].part.operator
        self._phases.wait(
            wait,
            name=f"sum of {operator} over ranks {list(fetch.sum.devices)}",
            n_bytes=tensor.nbytes,
            microbatch=microbatch % self._n_microbatches,
            pass_="backward" if is_backward else "forward",
            operator=operator,
        )
        return tensor
