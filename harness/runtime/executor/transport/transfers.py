"""Send and receive messages by gloo and by NCCL.

gloo has tags: every transfer has a unique tag, so the order of posting is free. NCCL has none:
each pair of stages on a pair of devices has a process group for each direction, and both sides
post in the same order, which the order of the program guarantees.

Both work on tensors on the device `World.wire`.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch.distributed as dist
from torch import Tensor

from harness.runtime.executor.transport.groups import Groups
from harness.runtime.executor.transport.messages import End, Message
from harness.runtime.ranks.world import World

_WAYS = (False, True)  # forward, backward
_N_TAGS = 2**31 - 1


class Transfers(Protocol):
    """Sends and receives messages without blocking."""

    def send(self, tensor: Tensor, message: Message, microbatch: int, *, is_backward: bool) -> Any:
        """Start sending; the tensor must not change until `wait` returns."""
        ...

    def receive(
        self, buffer: Tensor, message: Message, microbatch: int, *, is_backward: bool
    ) -> Any:
        """Start receiving into a buffer."""
        ...

    def wait(self, work: Any) -> None:
        """Wait for a send, a receive or an all-reduce.

        Raises:
            RuntimeError: another rank is gone or did not answer in time.
        """
        ...


class TaggedTransfers:
    """Transfers by gloo; a wait blocks the host."""

    def __init__(self, messages: Iterable[Message], timeout_s: float) -> None:
        self._timeout = timedelta(seconds=timeout_s)
        self._n_messages = 1 + max((message.number for message in messages), default=0)

    def send(self, tensor: Tensor, message: Message, microbatch: int, *, is_backward: bool) -> Any:
        _, reader = message.ends(is_backward=is_backward)
        tag = self._tag(message, microbatch, is_backward)
        return dist.isend(tensor, reader.rank, tag=tag)

    def receive(
        self, buffer: Tensor, message: Message, microbatch: int, *, is_backward: bool
    ) -> Any:
        sender, _ = message.ends(is_backward=is_backward)
        tag = self._tag(message, microbatch, is_backward)
        return dist.irecv(buffer, sender.rank, tag=tag)

    def wait(self, work: Any) -> None:
        work.wait(self._timeout)

    def _tag(self, message: Message, microbatch: int, is_backward: bool) -> int:
        return ((microbatch * self._n_messages + message.number) * 2 + is_backward) % _N_TAGS


class PairedTransfers:
    """Transfers by NCCL; a wait blocks the stream. All ranks must construct it: it makes groups.

    If a peer dies or hangs, no error is raised: the watchdog of its group ends this process after
    the timeout.
    """

    def __init__(self, messages: Iterable[Message], groups: Groups) -> None:
        pairs = {
            _pair(message, is_backward)
            for message in messages
            for is_backward in _WAYS
            if message.carried(is_backward=is_backward)
        }
        self._groups = {
            pair: groups.for_transfers(pair.sender.rank, pair.reader.rank) for pair in sorted(pairs)
        }

    def send(self, tensor: Tensor, message: Message, microbatch: int, *, is_backward: bool) -> Any:
        pair = _pair(message, is_backward)
        return dist.isend(tensor, pair.reader.rank, group=self._groups[pair])

    def receive(
        self, buffer: Tensor, message: Message, microbatch: int, *, is_backward: bool
    ) -> Any:
        pair = _pair(message, is_backward)
        return dist.irecv(buffer, pair.sender.rank, group=self._groups[pair])

    def wait(self, work: Any) -> None:
        work.wait()  # without a timeout, which would block the host too


class _Pair(NamedTuple):
    """Two ends and a direction, whose messages share a process group."""

    sender: End
    reader: End
    is_backward: bool


def _pair(message: Message, is_backward: bool) -> _Pair:
    return _Pair(*message.ends(is_backward=is_backward), is_backward)


def transfers_of(world: World, messages: Iterable[Message], groups: Groups) -> Transfers:
    """Transfers for the backend; all ranks must call it."""
    if world.backend == "nccl":
        return PairedTransfers(messages, groups)
    return TaggedTransfers(messages, groups.timeout_s)
