"""Move messages between devices: sends that never block, receives posted ahead, reused buffers.

On gloo every transfer has a tag of its own, so the order of posting is free. NCCL knows no tags:
there each pair of stages on a pair of devices has a process group for each direction, and both
sides post in the same order, which the program's order guarantees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import PeerError
from harness.runtime.executor.messages import Entry, Message
from harness.runtime.world import World

_WAYS = (False, True)  # forward, backward

_Pair = tuple[int, int, int, int, bool]


class Transfer:
    """A receive that is under way, then what it brought."""

    def __init__(self, work: Any, buffer: Tensor, source: int, what: str, entries: Sequence[Entry]):
        self.work, self.buffer, self.source, self.what = work, buffer, source, what
        self._entries = entries
        self.is_here = False
        self.n_left = len(entries)

    def take(self, entry: Entry) -> Tensor:
        """One piece; each may be taken once."""
        self.n_left -= 1
        if len(self._entries) == 1:
            return self.buffer
        flat = self.buffer.narrow(0, entry.offset, entry.n_elements)
        return flat.view(entry.shape)


class Buffers:
    """Tensors for receiving, by size and dtype, used again when they are given back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        free = self._free[shape, dtype]
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=self.device)

    def give_back(self, buffer: Tensor) -> None:
        """Let a whole buffer be used again; a piece of one is let go."""
        if buffer.untyped_storage().nbytes() == buffer.nbytes:
            self._free[tuple(buffer.shape), buffer.dtype].append(buffer)


class Channels:
    """This rank's transfers with all others; all ranks must make it, since NCCL makes groups.

    Args:
        messages: of all layouts, equal on every rank.
    """

    def __init__(self, world: World, messages: Iterable[Message], timeout_s: float) -> None:
        self._world, self._timeout = world, timedelta(seconds=timeout_s)
        self._timeout_s = timeout_s
        self.buffers = Buffers(world.device)
        self._sending: list[tuple[Any, Tensor, int, str]] = []
        self._groups: dict[_Pair, Any] = {}
        self._sum_groups: dict[tuple[int, ...], Any] = {}
        routes = list(messages)
        self._n_messages = 1 + max((message.number for message in routes), default=0)
        if world.backend == "nccl":
            for key in sorted({_pair(m, is_backward) for m in routes for is_backward in _WAYS}):
                self._groups[key] = dist.new_group([key[0], key[1]])

    @property
    def rank(self) -> int:
        return self._world.rank

    def make_groups_of_sums(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Let these sets of devices add up; all ranks must call it with the same sets."""
        for devices in sorted(set(sets)):
            self._sum_groups[devices] = dist.new_group(list(devices), timeout=self._timeout)

    def add_up(self, tensor: Tensor, devices: tuple[int, ...]) -> Any:
        """Start a sum over devices, in place; each of them calls it."""
        return dist.all_reduce(tensor, group=self._sum_groups[devices], async_op=True)

    def wait_for_sum(self, work: Any, what: str, devices: tuple[int, ...]) -> None:
        """Wait until a sum is there.

        Raises:
            PeerError: another rank died or took longer than the timeout.
        """
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self._world.rank} waited for the sum of {what} over ranks "
                f"{list(devices)}, one of which died or did not answer within "
                f"{self._timeout_s:g} s ({_first_line(error)}): look at their logs, or raise the "
                "timeout"
            ) from error

    def _route(self, message: Message, microbatch: int, *, is_backward: bool) -> dict[str, Any]:
        if self._groups:
            return {"group": self._groups[_pair(message, is_backward)]}
        tag = (microbatch * self._n_messages + message.number) * 2 + is_backward
        return {"tag": tag % (2**31 - 1)}

    def send(self, tensor: Tensor, message: Message, microbatch: int, *, is_backward: bool) -> None:
        """Start sending; the tensor must not change until `finish_sends`."""
        target = message.source if is_backward else message.target
        tensor = tensor.contiguous()
        route = self._route(message, microbatch, is_backward=is_backward)
        work = dist.isend(tensor, target, **route)
        self._sending.append((work, tensor, target, _words(message, microbatch, is_backward)))

    def receive(
        self, message: Message, dtype: torch.dtype, microbatch: int, *, is_backward: bool
    ) -> Transfer:
        """Post a receive."""
        source = message.target if is_backward else message.source
        entries = message.carried(is_backward=is_backward)
        n_elements = sum(entry.n_elements for entry in entries)
        shape = entries[0].shape if len(entries) == 1 else (n_elements,)
        buffer = self.buffers.take(shape, dtype)
        route = self._route(message, microbatch, is_backward=is_backward)
        work = dist.irecv(buffer, source, **route)
        what = _words(message, microbatch, is_backward)
        return Transfer(work, buffer, source, what, entries)

    def wait(self, transfer: Transfer) -> None:
        """Wait until what was sent is here; give pieces back to `buffers` when done with them.

        Raises:
            PeerError: the other rank died or took longer than the timeout.
        """
        self._wait(transfer.work, transfer.what, transfer.source, "from")
        transfer.is_here = True

    def finish_sends(self) -> None:
        """Wait until all that was sent has left.

        Raises:
            PeerError: as for `wait`.
        """
        for work, _, target, what in self._sending:
            self._wait(work, what, target, "to")
        self._sending.clear()

    def drop_finished_sends(self) -> None:
        """Let go of what has left already."""
        self._sending = [entry for entry in self._sending if not entry[0].is_completed()]

    def _wait(self, work: Any, what: str, peer: int, direction: str) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self._world.rank} waited for {what} {direction} rank {peer}, which died or "
                f"did not answer within {self._timeout_s:g} s ({_first_line(error)}): look at rank "
                f"{peer}'s log, or raise the timeout"
            ) from error


def _pair(message: Message, is_backward: bool) -> _Pair:
    stages = message.source_stage, message.target_stage
    return message.source, message.target, *stages, is_backward


def _words(message: Message, microbatch: int, is_backward: bool) -> str:
    kind = "the gradient of" if is_backward else "the output of"
    return f"{kind} {message.words} (microbatch {microbatch})"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
