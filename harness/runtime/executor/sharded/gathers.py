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

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from harness.domain.schedule import Action
from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.sharded.owners import Group, Owners
from harness.runtime.executor.sharded.units import UnitPlan, WeightUnit
from harness.runtime.ranks.world import World

# Number of the action in the step, and of the segment in the order in which they run.
Moment = tuple[int, int]
# The units of each segment of a microbatch on a stage, in the order of forward.
Needs = Callable[[int, int], Sequence[frozenset[int]]]
# Updated units on their way at once, because each needs memory for what it receives.
_MOST_ON_THEIR_WAY = 2


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
