"""Move messages between devices: sends that never block, receives posted ahead, reused buffers.

On gloo every transfer has a tag of its own, so the order of posting is free. NCCL knows no tags:
there each pair of stages on a pair of devices has a process group for each direction, and both
sides post in the same order, which the program's order guarantees.

gloo does not say when a send is done. But what another rank sends in an action tells that it has
read all that earlier actions of its own waited for:

    this rank     F0 -------> F1 ------->          the output of F0 may be forgotten
    another rank      F0          B0 ---> here

Muted, all ranks alike, nothing travels and nothing is waited for: a step then takes what its
computing takes by itself, on whatever the buffers hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import PeerError
from harness.runtime.executor.messages import Entry, Message
from harness.runtime.executor.timetable import Order
from harness.runtime.world import World

_WAYS = (False, True)  # forward, backward

_Pair = tuple[int, int, int, int, bool]


class _Done:
    """Work that needs no waiting."""

    def wait(self, *_: Any) -> None:
        return


_DONE = _Done()


class Transfer:
    """A receive that is under way, then what it brought; sent in the source's action `sent_at`."""

    def __init__(
        self,
        work: Any,
        buffer: Tensor,
        source: int,
        what: str,
        entries: Sequence[Entry],
        sent_at: int,
    ) -> None:
        self.work, self.buffer, self.source, self.what = work, buffer, source, what
        self._entries, self.sent_at = entries, sent_at
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


class _Sent(NamedTuple):
    """A send that is under way, read in the target's action `read_at`; keeps the tensor alive."""

    work: Any
    tensor: Tensor
    what: str
    read_at: int


class Channels:
    """This rank's transfers with all others; all ranks must make it, since NCCL makes groups.

    Args:
        messages: of all layouts, equal on every rank.
    """

    def __init__(
        self, world: World, messages: Iterable[Message], timeout_s: float, order: Order
    ) -> None:
        self._world, self._timeout = world, timedelta(seconds=timeout_s)
        self._timeout_s, self._order = timeout_s, order
        self.buffers = Buffers(world.device)
        self._sending: dict[int, list[_Sent]] = defaultdict(list)
        self._groups: dict[_Pair, Any] = {}
        self._sum_groups: dict[tuple[int, ...], Any] = {}
        self._norm_groups: dict[tuple[int, ...], Any] = {}
        self.is_muted = False
        routes = list(messages)
        self._n_messages = 1 + max((message.number for message in routes), default=0)
        if world.backend == "nccl":
            for key in sorted({_pair(m, is_backward) for m in routes for is_backward in _WAYS}):
                self._groups[key] = dist.new_group([key[0], key[1]], timeout=self._timeout)

    def make_groups_of_sums(self, sets: Iterable[tuple[int, ...]]) -> None:
        """Let these sets of devices add up; all ranks must call it with the same sets."""
        self._sum_groups = self._make_groups(sets)

    def make_groups_of_norms(self, sets: Iterable[tuple[int, ...]]) -> None:
        """The same for the statistics of batch norms; a device by itself needs no group.

        In groups of gradients they would meet buckets, which start when each device gets to them.
        """
        self._norm_groups = self._make_groups(one for one in sets if len(one) > 1)

    def _make_groups(self, sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
        return {
            devices: dist.new_group(list(devices), timeout=self._timeout)
            for devices in sorted(set(sets))
        }

    def add_up_norm(self, tensor: Tensor, devices: tuple[int, ...]) -> None:
        """Sum statistics over devices, in place, and wait for them; each of them calls it.

        Raises:
            PeerError: as for `wait_for_sum`.
        """
        if self.is_muted:
            return
        try:
            dist.all_reduce(tensor, group=self._norm_groups[devices])
        except RuntimeError as error:
            raise self._no_sum("batch norm statistics", devices, error) from error

    def add_up(self, tensor: Tensor, devices: tuple[int, ...]) -> Any:
        """Start a sum over devices, in place; each of them calls it."""
        if self.is_muted:
            return _DONE
        return dist.all_reduce(tensor, group=self._sum_groups[devices], async_op=True)

    def wait_for_sum(self, work: Any, what: str, devices: tuple[int, ...]) -> None:
        """Wait until a sum is there.

        Raises:
            PeerError: another rank died or took longer than the timeout.
        """
        try:
            self._wait_for(work)
        except RuntimeError as error:
            raise self._no_sum(what, devices, error) from error

    def _wait_for(self, work: Any) -> None:
        """The stream waits under NCCL, the host under gloo: told a timeout, NCCL would block the
        host too; its watchdog knows the group's."""
        if self._world.backend == "nccl":
            work.wait()
        else:
            work.wait(self._timeout)

    def _no_sum(self, what: str, devices: tuple[int, ...], error: Exception) -> PeerError:
        return PeerError(
            f"rank {self._world.rank} waited for the sum of {what} over ranks "
            f"{list(devices)}, one of which died or did not answer within "
            f"{self._timeout_s:g} s ({first_line(error)}): look at their logs, or raise the "
            "timeout",
            devices,
        )

    def _route(self, message: Message, microbatch: int, *, is_backward: bool) -> dict[str, Any]:
        if self._groups:
            return {"group": self._groups[_pair(message, is_backward)]}
        tag = (microbatch * self._n_messages + message.number) * 2 + is_backward
        return {"tag": tag % (2**31 - 1)}

    def send(self, tensor: Tensor, message: Message, microbatch: int, *, is_backward: bool) -> None:
        """Start sending; the tensor must not change until the step ends."""
        _, reader = _ends(message, is_backward=is_backward)
        tensor = tensor.contiguous()
        if self.is_muted:
            return
        route = self._route(message, microbatch, is_backward=is_backward)
        work = dist.isend(tensor, reader.rank, **route)
        what = _words(message, microbatch, is_backward)
        read_at = self._order(reader.stage, microbatch, is_backward)
        self._sending[reader.rank].append(_Sent(work, tensor, what, read_at))

    def receive(
        self, message: Message, dtype: torch.dtype, microbatch: int, *, is_backward: bool
    ) -> Transfer:
        """Post a receive."""
        sender, _ = _ends(message, is_backward=is_backward)
        entries = message.carried(is_backward=is_backward)
        n_elements = sum(entry.n_elements for entry in entries)
        shape = entries[0].shape if len(entries) == 1 else (n_elements,)
        buffer = self.buffers.take(shape, dtype)
        work: Any = _DONE
        if not self.is_muted:
            route = self._route(message, microbatch, is_backward=is_backward)
            work = dist.irecv(buffer, sender.rank, **route)
        elif not buffer.is_floating_point():
            buffer.zero_()  # indices must be some that exist
        what = _words(message, microbatch, is_backward)
        sent_at = self._order(sender.stage, microbatch, is_backward)
        return Transfer(work, buffer, sender.rank, what, entries, sent_at)

    def wait(self, transfer: Transfer) -> None:
        """Wait until what was sent is here; give pieces back to `buffers` when done with them.

        Raises:
            PeerError: the other rank died or took longer than the timeout.
        """
        self._wait(transfer.work, transfer.what, transfer.source, "from")
        transfer.is_here = True
        self._finish_sends(transfer.source, before=transfer.sent_at)

    def finish_sends(self) -> None:
        """Wait until all that was sent has left.

        Raises:
            PeerError: as for `wait`.
        """
        for target in self._sending:
            self._finish_sends(target)

    @property
    def n_sending(self) -> int:
        """Sends whose tensors are kept."""
        return sum(map(len, self._sending.values()))

    def _finish_sends(self, target: int, before: int | None = None) -> None:
        """Wait for what a rank has read before an action of its own, or for all; let go of it."""
        left: list[_Sent] = []
        for sent in self._sending[target]:
            if before is None or sent.read_at < before:
                self._wait(sent.work, sent.what, target, "to")
            else:
                left.append(sent)
        self._sending[target] = left

    def _wait(self, work: Any, what: str, peer: int, direction: str) -> None:
        try:
            self._wait_for(work)
        except RuntimeError as error:
            raise PeerError(
                f"rank {self._world.rank} waited for {what} {direction} rank {peer}, which died or "
                f"did not answer within {self._timeout_s:g} s ({first_line(error)}): look at rank "
                f"{peer}'s log, or raise the timeout",
                [peer],
            ) from error


class _End(NamedTuple):
    rank: int
    stage: int


def _ends(message: Message, *, is_backward: bool) -> tuple[_End, _End]:
    """Who sends and who reads."""
    source = _End(message.source, message.source_stage)
    target = _End(message.target, message.target_stage)
    return (target, source) if is_backward else (source, target)


def _pair(message: Message, is_backward: bool) -> _Pair:
    stages = message.source_stage, message.target_stage
    return message.source, message.target, *stages, is_backward


def _words(message: Message, microbatch: int, is_backward: bool) -> str:
    kind = "the gradient of" if is_backward else "the output of"
    return f"{kind} {message.words} (microbatch {microbatch})"


def first_line(error: Exception) -> str:
    """What an error says, in short; its type where it says nothing."""
    return (str(error).splitlines() or [type(error).__name__])[0]
