"""Move pieces between devices: sends that never block, receives posted ahead into reused buffers.

On gloo every transfer has a tag of its own, so the order of posting is free. NCCL knows no tags:
there each pair of stages on a pair of devices has a process group for each direction, and both
sides post in the same order, which the program's order guarantees.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import PeerError
from harness.runtime.executor.layout import Piece, Want
from harness.runtime.world import World


class Route(NamedTuple):
    """One piece of one want, forward or (its gradient) backward."""

    want: int
    part: int
    is_backward: bool


class Transfer(NamedTuple):
    """A receive that is under way."""

    work: Any
    buffer: Tensor
    source: int
    what: str


class Buffers:
    """Tensors for receiving, by size and dtype, used again when they are given back."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._free: dict[tuple[tuple[int, ...], torch.dtype], list[Tensor]] = defaultdict(list)

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        free = self._free[shape, dtype]
        return free.pop() if free else torch.empty(shape, dtype=dtype, device=self.device)

    def give_back(self, buffer: Tensor) -> None:
        self._free[tuple(buffer.shape), buffer.dtype].append(buffer)


class Channels:
    """This rank's transfers with all others; all ranks must make it, since NCCL makes groups.

    Args:
        wants: of all layouts, equal on every rank.
    """

    def __init__(self, world: World, wants: Iterable[Want], timeout_s: float) -> None:
        self._world, self._timeout = world, timedelta(seconds=timeout_s)
        self._timeout_s = timeout_s
        self.buffers = Buffers(world.device)
        self._sending: list[tuple[Any, Tensor, int, str]] = []
        self._groups: dict[tuple[int, int, int, int, bool], Any] = {}
        self._sum_groups: dict[tuple[int, ...], Any] = {}
        routes = list(wants)
        self._n_parts = 1 + max((p.part.index for w in routes for p in w.pieces), default=0)
        self._n_wants = 1 + max((w.number for w in routes), default=0)
        if world.backend == "nccl":
            self._make_groups(routes)

    def _make_groups(self, wants: list[Want]) -> None:
        keys = {
            self._group_key(want, piece, is_backward)
            for want in wants
            for piece in want.remote
            for is_backward in (False, True)
        }
        for key in sorted(keys):
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

    def _group_key(
        self, want: Want, piece: Piece, is_backward: bool
    ) -> tuple[int, int, int, int, bool]:
        return piece.part.device, want.device, piece.part.stage, want.stage, is_backward

    def _tag(self, want: Want, piece: Piece, microbatch: int, is_backward: bool) -> int:
        route = (want.number * self._n_parts + piece.part.index) * 2 + is_backward
        return (microbatch * self._n_wants * self._n_parts * 2 + route) % (2**31 - 1)

    def send(
        self, tensor: Tensor, want: Want, piece: Piece, microbatch: int, *, is_backward: bool
    ) -> None:
        """Start sending; the tensor must not change until `finish_sends`."""
        target = piece.part.device if is_backward else want.device
        group = self._groups.get(self._group_key(want, piece, is_backward))
        tag = 0 if group is not None else self._tag(want, piece, microbatch, is_backward)
        tensor = tensor.contiguous()
        work = dist.isend(tensor, target, group=group, tag=tag)
        self._sending.append((work, tensor, target, _words(want, piece, microbatch, is_backward)))

    def receive(
        self,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        want: Want,
        piece: Piece,
        microbatch: int,
        *,
        is_backward: bool,
    ) -> Transfer:
        """Post a receive."""
        source = want.device if is_backward else piece.part.device
        group = self._groups.get(self._group_key(want, piece, is_backward))
        tag = 0 if group is not None else self._tag(want, piece, microbatch, is_backward)
        buffer = self.buffers.take(shape, dtype)
        work = dist.irecv(buffer, source, group=group, tag=tag)
        return Transfer(work, buffer, source, _words(want, piece, microbatch, is_backward))

    def wait(self, transfer: Transfer) -> Tensor:
        """The received tensor; give it back to `buffers` when it is done with.

        Raises:
            PeerError: the other rank died or took longer than the timeout.
        """
        self._wait(transfer.work, transfer.what, transfer.source, "from")
        return transfer.buffer

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


def _words(want: Want, piece: Piece, microbatch: int, is_backward: bool) -> str:
    kind = "the gradient of" if is_backward else "the output of"
    return f"{kind} {piece.part.operator} (microbatch {microbatch})"


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
