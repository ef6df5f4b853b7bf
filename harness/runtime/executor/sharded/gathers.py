"""Gather slices of weights from their holders' parts, by messages between the holders.

    rank 0   own rows of a b c --->  rank 1        optimizer, gradients: after the optimizer, beside
    rank 1   own rows of a b c --->  rank 0        the next forward; parameters: before each use,
                                                   then freed

Freed slices are gathered in units, one unit ahead (`domain.weight_units`). All holders of a unit
plan the same visits from the schedule alone, so that they gather in one order.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import Tensor

from harness.domain.schedule import Action
from harness.domain.shard_state import Group
from harness.domain.weight_units import Unit, plan_visits
from harness.runtime.engines.phases import Phases
from harness.runtime.executor.sharded.owners import Owners
from harness.runtime.executor.sharded.units import UnitPlan, WeightUnit
from harness.runtime.ranks.world import World

# Number of the action in the step, and of the segment in the order in which they run.
Moment = tuple[int, int]
# The units of each segment of a microbatch on a stage, in the order of forward.
Needs = Callable[[int, int], Sequence[frozenset[int]]]
# Updated units on their way at once, because each needs memory for what it receives.
_MOST_ON_THEIR_WAY = 2


class GatherPlan(NamedTuple):
    """The gathers of freed units in a step on one rank.

    Attributes:
        order: units in the order of their visits, by their devices.
        first_used: devices and number of each visit that begins at a moment.
        last_used: units whose visits end at a moment.
    """

    order: dict[Group, list[int]]
    first_used: dict[Moment, list[tuple[Group, int]]]
    last_used: dict[Moment, list[int]]


def plan_gathers(actions: Sequence[Action], units: Mapping[int, Unit], needs: Needs) -> GatherPlan:
    """Plan the gathers of a step on one rank.

    Args:
        units: the freed units that this rank holds, by number.
    """

    def uses(at: int, unit: int) -> list[Moment]:
        segments = list(needs(actions[at].microbatch, actions[at].stage))
        in_order = segments if actions[at].kind == "forward" else segments[::-1]
        return [(at, k) for k, used in enumerate(in_order) if unit in used]

    by_devices: dict[Group, dict[int, Unit]] = defaultdict(dict)
    for number, unit in units.items():
        by_devices[unit.devices][number] = unit
    plan = GatherPlan({}, defaultdict(list), defaultdict(list))
    for devices, of_devices in by_devices.items():
        visits = plan_visits(actions, of_devices)
        plan.order[devices] = [visit.unit for visit in visits]
        for number, visit in enumerate(visits):
            plan.first_used[uses(visit.first, visit.unit)[0]].append((devices, number))
            plan.last_used[uses(visit.last, visit.unit)[-1]].append(visit.unit)
    return plan


class WeightGathers:
    """Gathers the sharded weights of one rank: freed ones around each use, the others after each
    update, from then on until their first use.

    Args:
        plans: all units, equal on all ranks.
        groups: process groups by their devices.
        rounded: dtype of autocast; None without it.

    Attributes:
        is_ahead: updated units are gathered beside the next forward, equally on all ranks.

    Raises:
        PeerError: where it waits, another holder died or hangs; NCCL ends this process instead.
    """

    def __init__(
        self,
        plans: Sequence[UnitPlan],
        owners: Owners,
        groups: Mapping[Group, Any],
        needs: Needs,
        world: World,
        phases: Phases,
        *,
        is_ahead: bool,
        rounded: torch.dtype | None,
    ) -> None:
        self.is_ahead = is_ahead
        slices = {one.piece: one for one in owners.shared}
        units = {
            number: WeightUnit(number, plan, slices, groups[plan.unit.devices], world, rounded)
            for number, plan in enumerate(plans)
            if world.rank in plan.unit.devices
        }
        self._freed = {number: unit for number, unit in units.items() if unit.plan.is_freed}
        kept = (unit for unit in units.values() if not unit.plan.is_freed)
        self._kept = sorted(kept, key=lambda unit: unit.plan.is_alike)
        self._awaited = deque[WeightUnit]()  # updated ones that have not arrived
        self._has_gathered = False
        self._needs, self._phases = needs, phases
        self._plans: dict[tuple[Action, ...], GatherPlan] = {}
        self._plan = GatherPlan({}, {}, {})
        self._n_started: dict[Group, int] = {}
        self._is_muted = False

    def start_step(self, actions: tuple[Action, ...], *, is_muted: bool) -> None:
        """Start to gather the first freed units.

        Args:
            is_muted: allocate memory without communication.
        """
        if not self._freed:
            return
        if actions not in self._plans:
            units = {number: unit.plan for number, unit in self._freed.items()}
            self._plans[actions] = plan_gathers(actions, units, self._needs)
        self._plan, self._is_muted = self._plans[actions], is_muted
        self._n_started = dict.fromkeys(self._plan.order, 0)
        for devices in self._plan.order:
            self._start(devices, 1)

    def _start(self, devices: Group, until: int, *, is_ahead: bool = False) -> None:
        """Start to gather a group's units up to a number of visits."""
        for number in self._plan.order[devices][self._n_started[devices] : until]:
            unit = self._freed[number]
            if is_ahead and unit.is_live:
                return  # its earlier visit has not ended
            unit.start(is_muted=self._is_muted)
            self._n_started[devices] += 1

    def before(self, moment: Moment, used: frozenset[int]) -> None:
        """Wait for the units that a segment uses first, and start to gather the next ones.

        Args:
            used: numbers of all units that it uses.
        """
        self._finish_updated(lambda unit: unit.number in used)
        for devices, number in self._plan.first_used.get(moment, ()):
            self._start(devices, number + 1)
            self._freed[self._plan.order[devices][number]].finish(self._phases)
            self._start(devices, number + 2, is_ahead=True)

    def kept(self, units: Iterable[int], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs of a segment with some units, copied where they are views of weights that
        will be freed."""
        mine = [self._freed[number] for number in units if number in self._freed]
        freed = {one._cdata for unit in mine for one, _ in unit.memory}
        return tuple(x.clone() if x.untyped_storage()._cdata in freed else x for x in outputs)

    def after(self, moment: Moment) -> None:
        """Free the units that a segment used last."""
        for number in self._plan.last_used.get(moment, ()):
            self._freed[number].free()

    def gather_updated(self) -> None:
        """Start to gather the units that are not freed, after the optimizer; all holders must call
        it. Waits for those that holders use in unlike operators, and the first time for all,
        because kernels that are loaded then would wait for other ranks' messages."""
        self._awaited.extend(self._kept)
        for unit in islice(self._awaited, _MOST_ON_THEIR_WAY):
            unit.start(is_muted=False)
        is_ahead, self._has_gathered = self.is_ahead and self._has_gathered, True
        self._finish_updated(lambda unit: not (is_ahead and unit.plan.is_alike))

    def finish_updated(self) -> None:
        """Wait for all updated units; all holders must call it."""
        self._finish_updated(lambda _: True)

    def _finish_updated(self, is_wanted: Callable[[WeightUnit], bool]) -> None:
        """Wait for updated units, in the order in which all holders start them."""
        while any(map(is_wanted, self._awaited)):
            self._awaited.popleft().finish(self._phases)
            for unit in islice(self._awaited, _MOST_ON_THEIR_WAY - 1, _MOST_ON_THEIR_WAY):
                unit.start(is_muted=False)
