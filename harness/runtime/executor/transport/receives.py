"""Receives of a step: posted in the order in which the others send, some exchanges ahead.

    segment waits for A | segment waits for B | segment waits for C, D
    while A is on its way, what is up to D and some more is posted

A message starts to travel when both ends are there, and needs a buffer from then on: the fewer are
posted, the longer a slow link stands idle until this device gets to wait. Posting takes the host's
time, which a wait has to spare and computing has not: all but the first are posted in waits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from harness.domain.schedule import RECEIVES_AHEAD, RECEIVES_AT_FIRST, Action
from harness.runtime.executor.program.program import Program
from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.transport.channels import Channels, Transfer
from harness.runtime.executor.transport.messages import Message, Place
from harness.runtime.executor.transport.moves import Carried, Moves

Slot = tuple[int, int, bool]  # microbatch, message, is_backward


class Receives:
    """What this device is sent in a step.

    Args:
        actions: of a step, whose microbatches are numbered from the step's first.
        at: a microbatch's program, and what goes in and out of it.
        n_microbatches: of a step.
        dtype: what a value of a dtype travels as.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        at: Callable[[int], tuple[Program, Moves]],
        n_microbatches: int,
        channels: Channels,
        phases: Phases,
        dtype: Callable[[torch.dtype], torch.dtype],
    ) -> None:
        self._channels, self._phases, self._dtype = channels, phases, dtype
        exchanging = [action for action in actions if action.kind != "weight"]
        self._slots: list[tuple[Slot, Message]] = [
            ((action.microbatch, message.number, action.kind == "backward"), message)
            for action in exchanging
            for message in _sent(action, at(action.microbatch)[1])
        ]
        position = {slot: k for k, (slot, _) in enumerate(self._slots)}
        exchanges = [
            slots for action in exchanging for slots in _exchanges(action, *at(action.microbatch))
        ]
        # How many must be posted for each exchange: the others' order need not be this device's.
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
        """Begin a step, whose first microbatch this is: post what is waited for first."""
        self._first, self._n_posted = first, 0
        self._post(self._at_first)

    def finish(self) -> None:
        """End a step, in which all that was sent has been taken."""
        assert not self._transfers, "every receive that was posted is waited for"
        assert self._n_posted == len(self._slots), "every receive is posted"

    def take(self, microbatch: int, carried: Carried, *, is_backward: bool) -> Tensor:
        """Wait for a message, unless it is here, and take one of its pieces; each once.

        Raises:
            PeerError: the other rank died or hangs.
        """
        slot = (microbatch - self._first, carried.message.number, is_backward)
        transfer = self._transfers[slot]
        if not transfer.is_here:
            message = carried.message
            self._phases.wait(
                lambda: self._wait(slot, transfer),
                name=message.words if len(message.operators) > 1 else "",
                n_bytes=transfer.buffer.nbytes,
                microbatch=microbatch % self._n_microbatches,
                pass_="backward" if is_backward else "forward",
                operator=message.operators[0],
                peer=transfer.source,
            )
        found = transfer.take(carried.entry)
        if not transfer.n_left:
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
                self._dtype(message.dtype),
                self._first + microbatch,
                is_backward=is_backward,
            )
        self._n_posted = max(self._n_posted, until)


def _sent(action: Action, moves: Moves) -> list[Message]:
    """What an action waits for, in the order in which the others send it."""
    return moves.received(action.stage, is_backward=action.kind == "backward")


def _exchanges(action: Action, program: Program, moves: Moves) -> Iterator[list[Slot]]:
    """By segment that is the first to wait for any, in the order of running, what it waits for."""
    is_backward = action.kind == "backward"
    known: set[Slot] = set()
    positions = range(len(program.stages[action.stage]))
    for position in reversed(positions) if is_backward else positions:
        slots = dict.fromkeys(
            (action.microbatch, carried.message.number, is_backward)
            for carried in _carried(moves, (action.stage, position), is_backward=is_backward)
        )
        new = [slot for slot in slots if slot not in known]
        known.update(new)
        if new:
            yield new


def _carried(moves: Moves, place: Place, *, is_backward: bool) -> Iterator[Carried]:
    if is_backward:
        yield from (one.carried for one in moves.collected[place])
        return
    for fetch in moves.fetches[place]:
        for placement in fetch.placements:
            if isinstance(placement.source, Carried):
                yield placement.source
