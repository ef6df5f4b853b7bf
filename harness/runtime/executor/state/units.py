"""Slices that are gathered together from their holders' parts, by messages between the holders.

rank 0   own rows of a b c --->  rank 1        ZeRO 1 and 2: after the optimizer
rank 1   own rows of a b c --->  rank 0        ZeRO 3: before each use, then freed
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import PeerError
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.options import LARGEST_JOINED_BYTES
from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.state.owners import Group, SharedSlice, flat
from harness.runtime.executor.state.weights import Holders
from harness.runtime.ranks.failures import gist
from harness.runtime.ranks.world import World


@dataclass(frozen=True, kw_only=True)
class UnitPlan:
    """The slices of a unit; equal on all ranks.

    Attributes:
        stages: pipeline stages that use them.
        first, last: positions of the first and the last operator that uses one.
    """

    devices: Group
    stages: tuple[int, ...]
    pieces: tuple[WeightSlice, ...]
    first: int
    last: int
    is_freed: bool


def plan_units(holders: Holders, freed: frozenset[WeightSlice], unit_bytes: int) -> list[UnitPlan]:
    """Cut the trained slices with several holders, in the order of their first use, into units of
    about `unit_bytes`; each unit has one set of holders."""
    shared = [(piece, devices) for piece, devices in holders.trained() if len(devices) > 1]
    found: list[UnitPlan] = []
    open_units: dict[object, tuple[list[WeightSlice], int]] = {}

    def close(key: object) -> None:
        pieces, _ = open_units.pop(key)
        used = [holders.uses(piece) for piece in pieces]
        positions = [use.position for uses in used for use in uses]
        stages = {use.stage for uses in used for use in uses}
        found.append(
            UnitPlan(
                devices=holders.of(pieces[0]),
                stages=tuple(sorted(stages)),
                pieces=tuple(pieces),
                first=min(positions),
                last=max(positions),
                is_freed=pieces[0] in freed,
            )
        )

    def first_use(item: tuple[WeightSlice, Group]) -> int:
        return min(use.position for use in holders.uses(item[0]))

    for piece, devices in sorted(shared, key=first_use):
        stages = frozenset(use.stage for use in holders.uses(piece))
        key: object = devices, stages, piece in freed, holders.item_bytes(piece)
        pieces, n_bytes = open_units.get(key, ([], 0))
        open_units[key] = [*pieces, piece], n_bytes + holders.n_bytes(piece)
        if open_units[key][1] >= unit_bytes:
            close(key)
    for left in list(open_units):
        close(left)
    return sorted(found, key=lambda unit: (unit.first, unit.devices, unit.is_freed))


def freed_slices(holders: Holders) -> frozenset[WeightSlice]:
    """Trained slices that all of several holders use in the same stages, so that they can gather
    them together before each use."""
    found = set()
    for piece, devices in holders.trained():
        stages = {d: {u.stage for u in holders.uses(piece) if u.device == d} for d in devices}
        if len(devices) > 1 and all(one == stages[devices[0]] for one in stages.values()):
            found.add(piece)
    return frozenset(found)


class WeightUnit:
    """One unit on a rank that holds it.

    Args:
        number: among all units, equal on all ranks.
        group: process group of its devices.

    Attributes:
        is_live: whether its slices have memory, or will when `finish` returns.
    """

    def __init__(
        self,
        number: int,
        plan: UnitPlan,
        slices: Mapping[WeightSlice, SharedSlice],
        group: Any,
        world: World,
    ) -> None:
        self.number, self.plan = number, plan
        self._slices = [slices[piece] for piece in plan.pieces]
        self._group, self._world = group, world
        self._here = plan.devices.index(world.rank)
        self.n_bytes = sum(one.parameter.nbytes for one in self._slices)
        self._memory = [
            (one.parameter.untyped_storage(), one.parameter.nbytes) for one in self._slices
        ]
        self.is_live = not plan.is_freed
        self._works: list[Any] = []
        self._received: list[tuple[Tensor, list[Tensor]]] = []
        self._sent: list[Tensor] = []

    @torch.no_grad()
    def start(self, *, is_muted: bool) -> None:
        """Allocate the slices, and start to exchange their parts; all holders must call it in the
        same order of units.

        Args:
            is_muted: without communication.
        """
        if self.plan.is_freed:
            for storage, n_bytes in self._memory:
                storage.resize_(n_bytes)
        self.is_live = True
        for one in self._slices:
            if self.plan.is_freed and one.own is not None:
                one.rows(self._here).copy_(flat(one.own.data))
        if is_muted:
            return
        large = [one for one in self._slices if one.parameter.nbytes >= LARGEST_JOINED_BYTES]
        small = [one for one in self._slices if one.parameter.nbytes < LARGEST_JOINED_BYTES]
        outgoing = [one.rows(self._here) for one in large]
        if small:
            outgoing.append(torch.cat([one.rows(self._here) for one in small]))
        self._sent = [tensor.to(self._world.wire) for tensor in outgoing]
        operations = []
        for holder, rank in enumerate(self.plan.devices):
            if holder == self._here:
                continue
            incoming = [[one.rows(holder)] for one in large]
            incoming += [[one.rows(holder) for one in small]] if small else []
            for sent, rows in zip(self._sent, incoming, strict=True):
                if sent.numel():
                    operations.append(dist.P2POp(dist.isend, sent, rank, self._group, self.number))
                if n := sum(each.numel() for each in rows):
                    buffer = self._buffer(rows, n)
                    operations.append(
                        dist.P2POp(dist.irecv, buffer, rank, self._group, self.number)
                    )
        self._works = dist.batch_isend_irecv(operations) if operations else []

    def _buffer(self, rows: Sequence[Tensor], n: int) -> Tensor:
        """Memory to receive rows in: their own if possible."""
        if len(rows) == 1 and self._world.wire == self._world.device:
            return rows[0]
        buffer = torch.empty(n, dtype=rows[0].dtype, device=self._world.wire)
        self._received.append((buffer, list(rows)))
        return buffer

    @torch.no_grad()
    def finish(self, phases: Phases) -> None:
        """Wait until the slices are complete.

        Raises:
            PeerError: another holder died or hangs; NCCL ends this process instead.
        """
        if self._works:
            name = f"weights of unit {self.number}"
            phases.wait(self._wait, name=name, n_bytes=self.n_bytes)
        for buffer, rows in self._received:
            for target, values in zip(rows, buffer.split([r.numel() for r in rows]), strict=True):
                target.copy_(values)
        self._works, self._received, self._sent = [], [], []

    def _wait(self) -> None:
        try:
            for work in self._works:
                work.wait()
        except RuntimeError as error:
            devices = self.plan.devices
            raise PeerError(
                f"the weights of {self.plan.pieces[0].name} and {len(self._slices) - 1} others did "
                f"not reach ranks {list(devices)} ({gist(error)}): one of them died or hangs, look "
                "at their logs",
                devices,
            ) from error

    def free(self) -> None:
        """Free the slices' memory; the own parts stay."""
        if self.plan.is_freed:
            for storage, _ in self._memory:
                storage.resize_(0)
            self.is_live = False
