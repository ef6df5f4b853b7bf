"""Transfer messages between devices: sends do not block, receives are posted ahead.

gloo has tags: every transfer has a unique tag, so the order of posting is free. NCCL has none:
each pair of stages on a pair of devices has a process group for each direction, of two stages one
for each pass too. Both sides post in the same order, which the order of the program guarantees. If
a peer dies or hangs under NCCL, no error is raised: the watchdog of its group ends this process
after the timeout.

With gloo, tensors of a GPU are copied to the host before sending and from it after receiving.
gloo does not report when a send is done. But when a message of another rank arrives, that rank has
received all messages that the segments up to the one that sent it waited for:

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
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import PeerError
from harness.runtime.executor.run.timetable import Order
from harness.runtime.executor.transport.groups import Groups
from harness.runtime.executor.transport.messages import End, Message
from harness.runtime.ranks.failures import gist
from harness.runtime.ranks.messages import start_messages
from harness.runtime.ranks.world import World

Label = Callable[[], str]
_N_TAGS = 2**31 - 2  # the two largest are those of sums of gradients

# Two ends, and whether backward is apart: messages that share a process group under NCCL.
_Pair = tuple[End, End, bool]
# Position of an action of a rank, and of a segment in the order in which the action runs it.
Moment = tuple[int, int]


@dataclass
class Transfer:
    """A receive; the source sent the message after its segment at `sent_at`.

    Attributes:
        pieces: those that have not been taken, by the numbers of their routes; None until the
            message arrives.
    """

    work: Any
    buffer: Tensor
    message: Message
    label: Label
    sent_at: Moment
    pieces: dict[tuple[int, int], Tensor] | None = None


class _Sent(NamedTuple):
    """A pending send, read before the target's segment at `read_at`; keeps the tensor alive."""

    work: Any
    tensor: Tensor
    label: Label
    microbatch: int
    read_at: Moment


class Channels:
    """This rank's transfers with other ranks; all ranks must make it, because NCCL makes groups.

    Args:
        messages: messages of all layouts, equal on every rank.
        sums, collectives: sets of devices that all-reduce partial sums, and that communicate
            within collective tasks; equal on every rank. The latter have groups apart from
            gradients, because devices start buckets at different times.

    Raises:
        PeerError: in each method, another rank died or took longer than the timeout. Under NCCL,
            its watchdog ends this process instead.
    """

    def __init__(
        self,
        world: World,
        messages: Sequence[Message],
        groups: Groups,
        order: Order,
        *,
        sums: Iterable[tuple[int, ...]] = (),
        collectives: Iterable[tuple[int, ...]] = (),
    ) -> None:
        self._world, self._groups, self._order = world, groups, order
        self.device = world.device
        self._is_nccl, self._timeout = world.backend == "nccl", timedelta(seconds=groups.timeout_s)
        self._n_messages = 1 + max((message.number for message in messages), default=0)
        pairs = sorted(set(map(_pair_of, messages))) if self._is_nccl else []
        self._pairs: dict[_Pair, Any] = {
            (sender, reader, is_backward): groups.for_transfers(sender.rank, reader.rank)
            for sender, reader, is_backward in pairs
        }
        self._sending: dict[int, list[_Sent]] = defaultdict(list)
        self._sum_groups = {one: groups.for_sums(one) for one in sorted(set(sums))}
        inner = sorted({one for one in collectives if len(one) > 1})
        self._inner_groups = {one: groups.for_exchanges(one) for one in inner}
        self.is_muted = False

    def _route(self, message: Message, microbatch: int) -> dict[str, Any]:
        """The group or the tag of a message."""
        if self._is_nccl:
            return {"group": self._pairs[_pair_of(message)]}
        return {"tag": (microbatch * self._n_messages + message.number) % _N_TAGS}

    def _wait(self, work: Any) -> None:
        """Wait for a send, a receive or an all-reduce: on the host, under NCCL on the stream."""
        if work is None:
            return  # nothing was started while this rank was muted
        if self._is_nccl:
            work.wait()  # without a timeout, which would block the host too
        else:
            work.wait(self._timeout)

    def start_sum(
        self, tensor: Tensor, label: str, devices: tuple[int, ...], *, is_collective: bool = False
    ) -> Callable[[], None]:
        """Start an all-reduce over devices, in place; each of the devices must call it.

        Returns:
            A function that waits for it.
        """
        work: Any = None

        def name() -> str:
            return f"the sum of {label} over ranks {list(devices)}"

        if not self.is_muted:
            groups = self._inner_groups if is_collective else self._sum_groups
            with self._waiting(name, *devices):
                work = dist.all_reduce(tensor, group=groups[devices], async_op=True)

        def wait() -> None:
            with self._waiting(name, *devices):
                self._wait(work)

        return wait

    def start_pass(
        self, tensor: Tensor, shape: tuple[int, ...], label: str, devices: tuple[int, ...]
    ) -> Callable[[], Tensor]:
        """Start sending a tensor to the next of some devices, and receiving one of another shape
        from the one before; each of the devices must call it.

        Returns:
            A function that waits for both, and returns the received tensor.
        """
        at = devices.index(self._world.rank)
        target, source = devices[(at + 1) % len(devices)], devices[at - 1]
        sent = tensor.contiguous().to(self._world.wire)
        received = torch.empty(shape, dtype=sent.dtype, device=sent.device)
        works: list[Any] = []

        def name() -> str:
            return f"{label} from rank {source}"

        if not self.is_muted:
            group = self._inner_groups[tuple(sorted(devices))]
            with self._waiting(name, source, target):
                works = start_messages([
                    dist.P2POp(dist.isend, sent, target, group),
                    dist.P2POp(dist.irecv, received, source, group),
                ])  # fmt: skip

        def wait() -> Tensor:
            with self._waiting(name, source, target):
                for work in works:
                    self._wait(work)
            return received.to(tensor.device)

        return wait

    @contextmanager
    def _waiting(self, label: Label, *peers: int) -> Iterator[None]:
        """Convert the error of a collective or a transfer to a PeerError that names it."""
        try:
            yield
        except RuntimeError as error:
            who = f"rank {peers[0]}" if len(peers) == 1 else "one of them"
            raise PeerError(
                f"rank {self._world.rank} waited for {label()}, and {who} died or did not answer "
                f"within {self._groups.timeout_s:g} s ({gist(error)}): look at its log, or raise "
                "the timeout",
                peers,
            ) from error

    def sent_at(self, message: Message, microbatch: int) -> Moment:
        """The segment after which a message is sent, among those of its sender."""
        return self._moment(message, message.sender.stage, microbatch, message.after)

    def read_at(self, message: Message, microbatch: int) -> Moment:
        """The segment that waits for a message, among those of its reader."""
        return self._moment(message, message.reader.stage, microbatch, message.before)

    def _moment(self, message: Message, stage: int, microbatch: int, position: int) -> Moment:
        order = self._order(stage, microbatch, message.is_backward)
        return order, -position if message.is_backward else position

    def send(self, tensor: Tensor, message: Message, microbatch: int) -> None:
        """Start sending; the tensor must not change until the step ends."""
        # The memory of a conjugate or of a negated view is that of its source.
        tensor = tensor.resolve_conj().resolve_neg().contiguous()
        if self.is_muted:
            return
        reader, tensor = message.reader, tensor.to(self._world.wire)
        label = partial(_label, message, microbatch, f"to rank {reader.rank}")
        with self._waiting(label, reader.rank):
            work = dist.isend(tensor, reader.rank, **self._route(message, microbatch))
        read_at = self.read_at(message, microbatch)
        self._sending[reader.rank].append(_Sent(work, tensor, label, microbatch, read_at))

    def receive(self, message: Message, dtype: torch.dtype, microbatch: int) -> Transfer:
        sender = message.sender
        buffer = torch.empty(message.shape, dtype=dtype, device=self._world.wire)
        work: Any = None
        label = partial(_label, message, microbatch, f"from rank {sender.rank}")
        if not self.is_muted:
            with self._waiting(label, sender.rank):
                work = dist.irecv(buffer, sender.rank, **self._route(message, microbatch))
        elif not buffer.is_floating_point():
            buffer.zero_()  # because indices must be valid
        return Transfer(work, buffer, message, label, self.sent_at(message, microbatch))

    def wait(self, transfer: Transfer) -> None:
        """Wait for a receive, which has its pieces then."""
        source = transfer.message.sender.rank
        with self._waiting(transfer.label, source):
            self._wait(transfer.work)
        transfer.buffer = transfer.buffer.to(self.device)
        transfer.pieces = transfer.message.split(transfer.buffer)
        self._finish_sends(source, lambda sent: sent.read_at <= transfer.sent_at)

    def finish_sends(self, before: float = math.inf) -> None:
        """Wait for all sends of microbatches before `before`."""
        for target in self._sending:
            self._finish_sends(target, lambda sent: sent.microbatch < before)

    def _finish_sends(self, target: int, is_read: Callable[[_Sent], bool]) -> None:
        """Wait for sends that a rank has read, and free their tensors."""
        left: list[_Sent] = []
        for sent in self._sending[target]:
            if is_read(sent):
                with self._waiting(sent.label, target):
                    self._wait(sent.work)
            else:
                left.append(sent)
        self._sending[target] = left


def _pair_of(message: Message) -> _Pair:
    # Devices of one stage run its passes in one order, so both share a group.
    is_apart = message.is_backward and message.sender.stage != message.reader.stage
    return message.sender, message.reader, is_apart


def _label(message: Message, microbatch: int, whither: str) -> str:
    kind = "the gradient of" if message.is_backward else "the output of"
    return f"{kind} {message.label} (microbatch {microbatch}) {whither}"
