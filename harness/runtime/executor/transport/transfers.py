"""Send and receive messages by gloo and by NCCL.

gloo has tags: every transfer has a unique tag, so the order of posting is free. NCCL has none:
each pair of stages on a pair of devices has a process group for each direction, and both sides
post in the same order, which the order of the program guarantees.

Both work on tensors on the device `World.wire`.

Process groups of one engine: all ranks make the same groups, and destroy them together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import StrategyError
from harness.runtime.executor.transport.messages import End, Message
from harness.runtime.ranks.world import World

# Streams in PyTorch's pool (kStreamsPerPool in c10/cuda/CUDAStream.cpp), assigned round-robin.
_N_STREAMS = 32


class Groups:
    """Makes process groups; all ranks must make the same groups in the same order.

    NCCL connects the ranks of a group at its first use and blocks the host until all ranks use it:
    a receive posted ahead could wait for a rank that waits for this rank. So every group is used
    once when it is made. Each group has a CUDA stream, which runs work in order; two groups with
    the same stream could deadlock.
    """

    def __init__(self, world: World, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._world, self._timeout = world, timedelta(seconds=timeout_s)
        self._is_nccl = world.backend == "nccl"
        self._made: list[Any] = []
        self._n_of: Counter[int] = Counter()  # by rank

    def for_sums(self, devices: tuple[int, ...]) -> Any:
        """A group for all-reduces over devices.

        Raises:
            StrategyError: under NCCL, a rank has too many groups.
        """
        group = self._make(devices)
        if self._is_nccl and self._world.rank in devices:
            dist.all_reduce(self._probe(), group=group)
        return group

    def for_gradients(self, devices: tuple[int, ...]) -> Any:
        """A group for gradients of replicated weights; torch's default group for all devices.

        Raises:
            StrategyError: under NCCL, a rank has too many groups.
        """
        # NCCL's default group was made before, and may share its stream with a new group.
        if len(devices) == self._world.size and not self._is_nccl:
            return dist.group.WORLD
        return self.for_sums(devices)

    def for_transfers(self, sender: int, reader: int) -> Any:
        """A group for messages from one rank to another.

        Raises:
            StrategyError: under NCCL, a rank has too many groups.
        """
        group = self._make((sender, reader))
        if self._is_nccl and self._world.rank == sender:
            dist.send(self._probe(), reader, group=group)
        elif self._is_nccl and self._world.rank == reader:
            dist.recv(self._probe(), sender, group=group)
        return group

    def close(self) -> None:
        """Destroy all groups, after every rank has finished their communication."""
        for group in self._made:
            dist.destroy_process_group(group)
        self._made.clear()

    def _make(self, devices: tuple[int, ...]) -> Any:
        self._n_of.update(devices)
        rank, n_groups = self._n_of.most_common(1)[0]
        if self._is_nccl and n_groups > _N_STREAMS:
            raise StrategyError(
                f"rank {rank} needs {n_groups} process groups or more to exchange what the "
                f"strategy cuts, and NCCL has streams for {_N_STREAMS}: let fewer devices exchange "
                "with each other, by cutting operators over fewer of them or by samples alone"
            )
        self._made.append(dist.new_group(list(devices), timeout=self._timeout))
        return self._made[-1]

    def _probe(self) -> torch.Tensor:
        return torch.zeros(1, device=self._world.wire)


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
