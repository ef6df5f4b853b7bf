"""Gather slices of weights from their holders' parts, by messages between the holders.

    rank 0   own rows of a b c --->  rank 1        optimizer, gradients: after the optimizer
    rank 1   own rows of a b c --->  rank 0        parameters: before each use, then freed

Freed slices are gathered in units, one unit ahead:

    unit 0   |gather|--- segment 0 ---|free
    unit 1           |gather|         |--- segment 1 ---|free
    unit 2                            |gather|          |--- segment 2 ---| kept for its backward

In an action (the forward or backward of one microbatch on one stage) a unit has memory from its
first to its last use. All holders of a unit plan the same visits from the schedule alone, so that
they gather in one order. A unit that is the last of one action and the first of the next stays.
"""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from harness.domain.checkpoints import is_full
from harness.domain.schedule import Action
from harness.domain.shard_state import shards_parameters
from harness.domain.strategy import Strategy
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.options import LARGEST_JOINED_BYTES
from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.sharded.owners import Group, Owners, SharedSlice, Sharing, flat
from harness.runtime.executor.state.weights import Holders
from harness.runtime.ranks.failures import blaming_peers
from harness.runtime.ranks.world import World

_log = logging.getLogger(__name__)

# Number of the action in the step, and of the segment in the order in which they run.
Moment = tuple[int, int]
# The units of each segment of a microbatch on a stage, in the order of forward.
Needs = Callable[[int, int], Sequence[frozenset[int]]]
# Updated units on their way at once, because each needs memory for what it receives.
_MOST_ON_THEIR_WAY = 2


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


def plan_units(
    holders: Holders,
    strategy: Strategy,
    sharing: Sharing,
    unit_bytes: int,
    segments: Mapping[int, int],
) -> list[UnitPlan]:
    """Cut the trained slices that several ranks share, in the order of their first use, into units
    of `unit_bytes` or more; each unit has one set of ranks.

    Args:
        segments: by position, of the operators in stages that run again in several segments.
    """
    if strategy.shard_state == "none":
        return []
    shared = [
        (piece, group)
        for piece, devices in holders.trained()
        for group in sharing(devices)
        if len(group) > 1
    ]
    is_freeing = shards_parameters(strategy.shard_state)
    # What all holders use in the same operators, so that they can gather it before each use.
    freed = {piece for piece, _ in shared if is_freeing and holders.is_used_alike(piece)}
    found: list[UnitPlan] = []
    open_units: dict[object, tuple[list[WeightSlice], Group, int, int | None]] = {}

    def close(key: object) -> None:
        pieces, devices, _, _ = open_units.pop(key)
        used = [holders.uses(piece) for piece in pieces]
        positions = [use.position for uses in used for use in uses]
        stages = {use.stage for uses in used for use in uses}
        found.append(
            UnitPlan(
                devices=devices,
                stages=tuple(sorted(stages)),
                pieces=tuple(pieces),
                first=min(positions),
                last=max(positions),
                is_freed=pieces[0] in freed,
            )
        )

    def first_use(item: tuple[WeightSlice, Group]) -> int:
        return min(use.position for use in holders.uses(item[0]))

    def kind(piece: WeightSlice, devices: Group) -> object:
        stages = frozenset(use.stage for use in holders.uses(piece))
        return devices, stages, piece in freed, holders.item_bytes(piece)

    totals = Counter[object]()
    for piece, devices in shared:
        totals[kind(piece, devices)] += holders.n_bytes(piece)
    for piece, devices in sorted(shared, key=first_use):
        key = kind(piece, devices)
        segment = segments.get(first_use((piece, devices))) if piece in freed else None
        pieces, _, n_bytes, last = open_units.get(key, ([], devices, 0, None))
        is_at_cut = segment is None or segment != last
        if pieces and is_full(n_bytes, unit_bytes, totals[key], is_at_cut=is_at_cut):
            close(key)
            pieces, n_bytes = [], 0
        open_units[key] = [*pieces, piece], devices, n_bytes + holders.n_bytes(piece), segment
    for left in list(open_units):
        close(left)
    return sorted(found, key=lambda unit: (unit.first, unit.devices, unit.is_freed))


def warn_if_unsharded(holders: Holders, strategy: Strategy, sharing: Sharing) -> None:
    """Log a warning if several ranks hold each weight, and none of them share its state."""
    held = [devices for _, devices in holders.trained() if len(devices) > 1]
    groups = [group for devices in held for group in sharing(devices)]
    if strategy.shard_state != "none" and groups and max(map(len, groups)) == 1:
        _log.warning(
            "shard_state %s divides no weight, because each host (or averaged replica) holds "
            "each weight on one rank: drop it, or its _in_node",
            strategy.shard_state,
        )


class WeightUnit:
    """One unit on a rank that holds it.

    Args:
        number: among all units, equal on all ranks.
        group: process group of its devices.

    Attributes:
        memory: of each slice, and its full size.
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
        self.memory = [
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
            for storage, n_bytes in self.memory:
                storage.resize_(n_bytes)
        self.is_live = True
        for one in self._slices:
            if self.plan.is_freed and one.own is not None:
                one.rows(self._here).copy_(flat(one.own.data))
        large = [one for one in self._slices if one.parameter.nbytes >= LARGEST_JOINED_BYTES]
        small = [one for one in self._slices if one.parameter.nbytes < LARGEST_JOINED_BYTES]
        outgoing = [one.rows(self._here) for one in large]
        if small:
            outgoing.append(torch.cat([one.rows(self._here) for one in small]))
        if is_muted:
            return
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
        """Wait until the slices are complete."""
        if self._works:
            name = f"weights of unit {self.number}"
            phases.wait(self._wait, name=name, n_bytes=self.n_bytes)
        for buffer, rows in self._received:
            for target, values in zip(rows, buffer.split([r.numel() for r in rows]), strict=True):
                target.copy_(values)
        self._works, self._received, self._sent = [], [], []

    def _wait(self) -> None:
        what = f"the weights of {self.plan.pieces[0].name} and {len(self._slices) - 1} others"
        devices = self.plan.devices
        with blaming_peers(f"{what} did not reach ranks {list(devices)}", devices):
            for work in self._works:
                work.wait()

    def free(self) -> None:
        """Free the slices' memory; the own parts stay."""
        if self.plan.is_freed:
            for storage, _ in self.memory:
                storage.resize_(0)
            self.is_live = False


class Visit(NamedTuple):
    """One stay of a unit in memory: the moments of its first and last use on this rank."""

    unit: int
    first: Moment
    last: Moment


def plan_visits(
    actions: Sequence[Action], units: Mapping[int, UnitPlan], needs: Needs
) -> dict[Group, list[Visit]]:
    """The visits of a step on one rank, for each set of devices in the order of all of them.

    Args:
        units: the freed units that this rank holds, by number.
    """

    def in_forward(number: int) -> tuple[int, int]:
        return units[number].first, number

    def in_backward(number: int) -> tuple[int, int]:
        return -units[number].last, -number

    found: dict[Group, list[Visit]] = defaultdict(list)
    for at, action in enumerate(actions):
        segments = list(needs(action.microbatch, action.stage))
        is_forward = action.kind == "forward"
        moments: dict[int, list[Moment]] = defaultdict(list)
        for k, used in enumerate(segments if is_forward else segments[::-1]):
            for number in used:
                moments[number].append((at, k))
        here = [number for number, plan in units.items() if action.stage in plan.stages]
        for number in sorted(here, key=in_forward if is_forward else in_backward):
            visits = found[units[number].devices]
            first, last = moments[number][0], moments[number][-1]
            if visits and visits[-1].unit == number:
                visits[-1] = visits[-1]._replace(last=last)
            else:
                visits.append(Visit(number, first, last))
    return dict(found)


class WeightGathers:
    """Gathers the sharded weights of one rank: freed ones around each use, the others after each
    update.

    Args:
        plans: all units, equal on all ranks.
        groups: process groups by their devices.

    Raises:
        PeerError: in `before` and `gather_updated`, another holder died or hangs; NCCL ends this
            process instead.
    """

    def __init__(
        self,
        plans: Sequence[UnitPlan],
        owners: Owners,
        groups: Mapping[Group, Any],
        needs: Needs,
        world: World,
        phases: Phases,
    ) -> None:
        slices = {one.piece: one for one in owners.shared}
        units = {
            number: WeightUnit(number, plan, slices, groups[plan.devices], world)
            for number, plan in enumerate(plans)
            if world.rank in plan.devices
        }
        self._freed = {number: unit for number, unit in units.items() if unit.plan.is_freed}
        self._kept = [unit for unit in units.values() if not unit.plan.is_freed]
        self._needs, self._phases = needs, phases
        self._planned: dict[tuple[Action, ...], dict[Group, list[Visit]]] = {}
        self._visits: dict[Group, list[Visit]] = {}
        self._n_started: dict[Group, int] = {}
        self._is_muted = False

    def start_step(self, actions: tuple[Action, ...], *, is_muted: bool) -> None:
        """Start to gather the first freed units.

        Args:
            is_muted: allocate memory without communication.
        """
        if not self._freed:
            return
        if actions not in self._planned:
            plans = {number: unit.plan for number, unit in self._freed.items()}
            self._planned[actions] = plan_visits(actions, plans, self._needs)
        self._visits, self._is_muted = self._planned[actions], is_muted
        self._n_started = dict.fromkeys(self._visits, 0)
        for devices in self._visits:
            self._start(devices, 1)

    def _start(self, devices: Group, until: int, *, is_ahead: bool = False) -> None:
        """Start to gather a group's units up to a number of visits."""
        visits = self._visits[devices]
        while self._n_started[devices] < min(until, len(visits)):
            unit = self._freed[visits[self._n_started[devices]].unit]
            if is_ahead and unit.is_live:
                return  # its earlier visit has not ended
            unit.start(is_muted=self._is_muted)
            self._n_started[devices] += 1

    def before(self, moment: Moment) -> None:
        """Wait for the units that a segment uses first, and start to gather the next ones."""
        for devices, visits in self._visits.items():
            for k, visit in enumerate(visits):
                if visit.first == moment:
                    self._start(devices, k + 1)
                    self._freed[visit.unit].finish(self._phases)
                    self._start(devices, k + 2, is_ahead=True)

    def kept(self, units: Iterable[int], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs of a segment with some units, copied where they are views of weights that
        will be freed."""
        freed = {one._cdata for number in units for one, _ in self._freed[number].memory}
        return tuple(x.clone() if x.untyped_storage()._cdata in freed else x for x in outputs)

    def after(self, moment: Moment) -> None:
        """Free the units that a segment used last."""
        for visits in self._visits.values():
            for visit in visits:
                if visit.last == moment:
                    self._freed[visit.unit].free()

    def gather_updated(self) -> None:
        """Gather the units that are not freed, after the optimizer; all holders must call it."""
        if not self._kept:
            return
        self._phases.begin("communication", name="weights")
        for k, unit in enumerate(self._kept):
            unit.start(is_muted=False)
            if k >= _MOST_ON_THEIR_WAY - 1:
                self._kept[k - _MOST_ON_THEIR_WAY + 1].finish(self._phases)
        for unit in self._kept[-_MOST_ON_THEIR_WAY + 1 :]:
            unit.finish(self._phases)
