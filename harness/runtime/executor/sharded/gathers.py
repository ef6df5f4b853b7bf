"""Gather slices of weights from their holders' parts, by messages between the holders.

    rank 0   own rows of a b c --->  rank 1        optimizer, gradients: after the optimizer, beside
    rank 1   own rows of a b c --->  rank 0        the next forward; parameters: before each use,
                                                   then freed

Freed slices are gathered in units, one unit ahead:

    unit 0   |gather|--- segment 0 ---|free
    unit 1           |gather|         |--- segment 1 ---|free
    unit 2                            |gather|          |--- segment 2 ---| kept for its backward

In an action (the forward or backward of one microbatch on one stage) a unit has memory from its
first to its last use. All holders of a unit plan the same visits from the schedule alone, so that
they gather in one order. A unit that is the last of one action and the first of the next stays.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from torch import Tensor

from harness.domain.schedule import Action
from harness.domain.shard_state import Group
from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.sharded.owners import Owners
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
    update, from then on until their first use.

    Args:
        plans: all units, equal on all ranks.
        groups: process groups by their devices.

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
    ) -> None:
        self.is_ahead = is_ahead
        slices = {one.piece: one for one in owners.shared}
        units = {
            number: WeightUnit(number, plan, slices, groups[plan.devices], world)
            for number, plan in enumerate(plans)
            if world.rank in plan.devices
        }
        self._freed = {number: unit for number, unit in units.items() if unit.plan.is_freed}
        kept = (unit for unit in units.values() if not unit.plan.is_freed)
        self._kept = sorted(kept, key=lambda unit: unit.plan.is_alike)
        self._awaited = deque[WeightUnit]()  # updated ones that have not arrived
        self._has_gathered = False
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

    def before(self, moment: Moment, used: frozenset[int]) -> None:
        """Wait for the units that a segment uses first, and start to gather the next ones.

        Args:
            used: numbers of all units that it uses.
        """
        self._finish_updated(lambda unit: unit.number in used)
        for devices, visits in self._visits.items():
            for k, visit in enumerate(visits):
                if visit.first == moment:
                    self._start(devices, k + 1)
                    self._freed[visit.unit].finish(self._phases)
                    self._start(devices, k + 2, is_ahead=True)

    def kept(self, units: Iterable[int], outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The outputs of a segment with some units, copied where they are views of weights that
        will be freed."""
        mine = [self._freed[number] for number in units if number in self._freed]
        freed = {one._cdata for unit in mine for one, _ in unit.memory}
        return tuple(x.clone() if x.untyped_storage()._cdata in freed else x for x in outputs)

    def after(self, moment: Moment) -> None:
        """Free the units that a segment used last."""
        for visits in self._visits.values():
            for visit in visits:
                if visit.last == moment:
                    self._freed[visit.unit].free()

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
