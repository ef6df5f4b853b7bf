"""Receives of a step: posted in the order in which other devices send, some exchanges ahead.

    segment waits for A | segment waits for B | segment waits for C, D
    while this device waits for A, it posts the receives up to D and some more

A transfer starts when both ends have posted it, and needs a buffer from then on. With few posted
receives, a slow link idles until this device waits. Posting takes CPU time, which is free during a
wait but delays computing, so all but the first receives are posted during waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from harness.domain.schedule import RECEIVES_AHEAD, RECEIVES_AT_FIRST, Action
from harness.runtime.executor.program.program import Program, Route
from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.transport.channels import Channels, Transfer
from harness.runtime.executor.transport.messages import Message
from harness.runtime.executor.transport.moves import Moves

Slot = tuple[int, int, bool]  # microbatch, message, is_backward


class Receives:
    """The receives of one device in a step.

    Args:
        actions: actions of a step, whose first microbatch has number 0.
        at: returns the program and the moves of a microbatch.
        n_microbatches: microbatches per step.
        dtype: gives the dtype in which a message is sent.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        at: Callable[[int], tuple[Program, Moves]],
        n_microbatches: int,
        channels: Channels,
        phases: Phases,
        dtype: Callable[[Message], torch.dtype],
    ) -> None:
        self._at, self._channels, self._phases, self._dtype = at, channels, phases, dtype
        exchanging = [action for action in actions if action.kind != "weight"]
        self._slots: list[tuple[Slot, Message]] = [
            ((action.microbatch, message.number, action.kind == "backward"), message)
            for action in exchanging
            for message in at(action.microbatch)[1].received(
                action.stage, is_backward=action.kind == "backward"
            )
        ]
        position = {slot: k for k, (slot, _) in enumerate(self._slots)}
        exchanges = [
            slots for action in exchanging for slots in _exchanges(action, *at(action.microbatch))
        ]
        # Receives to post for each exchange; devices may exchange messages in different orders.
        lasts = (max(position[slot] for slot in slots) for slots in exchanges)
        ends = [0, *(last + 1 for last in accumulate(lasts, max))]
        self._at_first = ends[min(RECEIVES_AT_FIRST, len(exchanges))]
        self._until = {
            slot: ends[min(k + 1 + RECEIVES_AHEAD, len(exchanges))]
            for k, slots in enumerate(exchanges)
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
        """Wait for a message if necessary, and take one of its pieces; each can be taken once.

        Raises:
            PeerError: the other rank died or hangs.
        """
        message = self._at(microbatch)[1].message_of(route, is_backward=is_backward)
        slot = (microbatch - self._first, message.number, is_backward)
        transfer = self._transfers[slot]
        if transfer.pieces is None:
            self._phases.wait(
                lambda: self._wait(slot, transfer),
                name=message.label if len(message.operators) > 1 else "",
                n_bytes=transfer.buffer.nbytes,
                microbatch=microbatch % self._n_microbatches,
                pass_="backward" if is_backward else "forward",
                operator=message.operators[0],
                peer=transfer.source,
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
            microbatch, _, is_backward = slot
            self._transfers[slot] = self._channels.receive(
                message,
                self._dtype(message),
                self._first + microbatch,
                is_backward=is_backward,
            )
        self._n_posted = max(self._n_posted, until)


def _exchanges(action: Action, program: Program, moves: Moves) -> Iterator[list[Slot]]:
    """The receives by the segment that first waits for them, in the order of running."""
    is_backward = action.kind == "backward"
    known: set[Slot] = set()
    positions = range(len(program.stages[action.stage]))
    for position in reversed(positions) if is_backward else positions:
        slots = dict.fromkeys(
            (action.microbatch, message.number, is_backward)
            for message in moves.awaited((action.stage, position), is_backward=is_backward)
        )
        new = [slot for slot in slots if slot not in known]
        known.update(new)
        if new:
            yield new
