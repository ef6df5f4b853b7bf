"""Transfer messages between devices: sends do not block, receives are posted ahead.

With gloo, tensors of a GPU are copied to the host before sending and from it after receiving.

gloo does not report when a send is done. But when a message of another rank arrives, that rank has
received all messages that its earlier actions waited for:

    this rank     F0 -------> F1 ------->            the output of F0 may be freed
    another rank      F0          B0 ---> this rank

While all ranks are muted, they neither send nor wait: a step then takes the time of its computing
alone, on arbitrary contents of the buffers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import PeerError
from harness.runtime.executor.run.timetable import Order
from harness.runtime.executor.transport.messages import Message, PlacedPiece
from harness.runtime.executor.transport.transfers import Groups, transfers_of
from harness.runtime.ranks.failures import gist
from harness.runtime.ranks.world import World


class _Done:
    """Work that needs no waiting."""

    def wait(self, *_: Any) -> None:
        return


_DONE = _Done()


class Transfer:
    """A receive, pending or complete; the message was sent in the source's action `sent_at`."""

    def __init__(
        self,
        work: Any,
        buffer: Tensor,
        source: int,
        label: Callable[[], str],
        entries: Sequence[PlacedPiece],
        sent_at: int,
    ) -> None:
        self.work, self.buffer, self.source, self.label = work, buffer, source, label
        self._entries, self.sent_at = entries, sent_at
        self.has_arrived = False
        self.n_left = len(entries)

    def take(self, entry: PlacedPiece) -> Tensor:
        """Take one piece; each can be taken once."""
        self.n_left -= 1
        if len(self._entries) == 1:
            return self.buffer
        flat = self.buffer.narrow(0, entry.offset, entry.n_elements)
        return flat.view(entry.shape)


class Buffers:
    """Tensors for receiving, by shape and dtype, reused after they are given back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        free = self._free[shape, dtype]
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=self.device)

    def give_back(self, buffer: Tensor) -> None:
        """Make a whole buffer available again; a piece of one is dropped."""
        if buffer.untyped_storage().nbytes() == buffer.nbytes:
            self._free[tuple(buffer.shape), buffer.dtype].append(buffer)


class _Sent(NamedTuple):
    """A pending send, read in the target's action `read_at`; keeps the tensor alive."""

    work: Any
    tensor: Tensor
    label: Callable[[], str]
    microbatch: int
    read_at: int


class Channels:
    """This rank's transfers with other ranks; all ranks must make it, because NCCL makes groups.

    Args:
        messages: messages of all layouts, equal on every rank.
        sums, norms: sets of devices that all-reduce partial sums, and statistics of batch norms;
            equal on every rank. Norms have groups apart from gradients, because devices start
            buckets at different times.
    """

    def __init__(
        self,
        world: World,
        messages: Sequence[Message],
        groups: Groups,
        order: Order,
        *,
        sums: Iterable[tuple[int, ...]] = (),
        norms: Iterable[tuple[int, ...]] = (),
    ) -> None:
        self._world, self._groups, self._order = world, groups, order
        self.buffers = Buffers(world.device)
        is_staged = world.wire != world.device
        self._arriving = Buffers(world.wire) if is_staged else self.buffers
        self._transfers = transfers_of(world, messages, groups)
        self._sending: dict[int, list[_Sent]] = defaultdict(list)
        self._sum_groups = self._make_groups(sums)
        self._norm_groups = self._make_groups(one for one in norms if len(one) > 1)
        self.is_muted = False

    def _make_groups(self, sets: Iterable[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
        return {devices: self._groups.for_sums(devices) for devices in sorted(set(sets))}

    def reduce_norm(self, tensor: Tensor, label: str, devices: tuple[int, ...]) -> None:
        """Sum statistics over devices, in place, and wait; each of the devices must call it.

        Raises:
            PeerError: as for `start_sum`.
        """
        if self.is_muted:
            return
        with self._summing(label, devices):
            dist.all_reduce(tensor, group=self._norm_groups[devices])

    def start_sum(self, tensor: Tensor, label: str, devices: tuple[int, ...]) -> Any:
        """Start an all-reduce over devices, in place; each of the devices must call it.

        Raises:
            PeerError: as for `wait`.
        """
        if self.is_muted:
            return _DONE
        with self._summing(label, devices):
            return dist.all_reduce(tensor, group=self._sum_groups[devices], async_op=True)

    def wait_for_sum(self, work: Any, label: str, devices: tuple[int, ...]) -> None:
        """Wait for an all-reduce.

        Raises:
            PeerError: as for `wait`.
        """
        with self._summing(label, devices):
            self._transfers.wait(work)

    @contextmanager
    def _summing(self, label: str, devices: tuple[int, ...]) -> Iterator[None]:
        """Convert the error of an all-reduce to a PeerError that names it."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"rank {self._world.rank} waited for the sum of {label} over ranks "
                f"{list(devices)}, one of which died or did not answer within "
                f"{self._groups.timeout_s:g} s ({gist(error)}): look at their logs, or raise "
                "the timeout",
                devices,
            ) from error

    def send(self, tensor: Tensor, message: Message, microbatch: int, *, is_backward: bool) -> None:
        """Start sending; the tensor must not change until the step ends.

        Raises:
            PeerError: as for `wait`.
        """
        tensor = tensor.contiguous()
        if self.is_muted:
            return
        _, reader = message.ends(is_backward=is_backward)
        tensor = tensor.to(self._world.wire)
        label = partial(_label, message, microbatch, is_backward)
        with self._exchanging(label, "to", reader.rank):
            work = self._transfers.send(tensor, message, microbatch, is_backward=is_backward)
        read_at = self._order(reader.stage, microbatch, is_backward)
        self._sending[reader.rank].append(_Sent(work, tensor, label, microbatch, read_at))

    def receive(
        self, message: Message, dtype: torch.dtype, microbatch: int, *, is_backward: bool
    ) -> Transfer:
        """Post a receive.

        Raises:
            PeerError: as for `wait`.
        """
        sender, _ = message.ends(is_backward=is_backward)
        buffer = self._arriving.take(message.shape(is_backward=is_backward), dtype)
        work: Any = _DONE
        label = partial(_label, message, microbatch, is_backward)
        if not self.is_muted:
            with self._exchanging(label, "from", sender.rank):
                work = self._transfers.receive(buffer, message, microbatch, is_backward=is_backward)
        elif not buffer.is_floating_point():
            buffer.zero_()  # because indices must be valid
        sent_at = self._order(sender.stage, microbatch, is_backward)
        entries = message.carried(is_backward=is_backward)
        return Transfer(work, buffer, sender.rank, label, entries, sent_at)

    def wait(self, transfer: Transfer) -> None:
        """Wait for a receive; the caller gives its pieces back to `buffers` after use.

        Raises:
            PeerError: the other rank died or took longer than the timeout. Under NCCL, its
                watchdog ends this process instead.
        """
        with self._exchanging(transfer.label, "from", transfer.source):
            self._transfers.wait(transfer.work)
        transfer.buffer = self._on_device(transfer.buffer)
        transfer.has_arrived = True
        self._finish_sends(transfer.source, lambda sent: sent.read_at < transfer.sent_at)

    def _on_device(self, buffer: Tensor) -> Tensor:
        """Move a received tensor to the device."""
        if self._arriving is self.buffers:
            return buffer
        found = self.buffers.take(tuple(buffer.shape), buffer.dtype)
        found.copy_(buffer)
        self._arriving.give_back(buffer)
        return found

    def finish_sends(self, before: float = math.inf) -> None:
        """Wait for all sends of microbatches before `before`.

        Raises:
            PeerError: as for `wait`.
        """
        for target in self._sending:
            self._finish_sends(target, lambda sent: sent.microbatch < before)

    def _finish_sends(self, target: int, is_read: Callable[[_Sent], bool]) -> None:
        """Wait for sends that a rank has read, and free their tensors."""
        left: list[_Sent] = []
        for sent in self._sending[target]:
            if is_read(sent):
                with self._exchanging(sent.label, "to", target):
                    self._transfers.wait(sent.work)
            else:
                left.append(sent)
        self._sending[target] = left

    @contextmanager
    def _exchanging(self, label: Callable[[], str], direction: str, peer: int) -> Iterator[None]:
        """Convert the error of a transfer to a PeerError that names it."""
        try:
            yield
        except RuntimeError as error:
            raise PeerError(
                f"rank {self._world.rank} waited for {label()} {direction} rank {peer}, which died "
                f"or did not answer within {self._groups.timeout_s:g} s ({gist(error)}): "
                f"look at rank {peer}'s log, or raise the timeout",
                [peer],
            ) from error


def _label(message: Message, microbatch: int, is_backward: bool) -> str:
    kind = "the gradient of" if is_backward else "the output of"
    return f"{kind} {message.label} (microbatch {microbatch})"
