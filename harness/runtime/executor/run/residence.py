"""Gather freed weights before the segments that use them, one unit ahead, and free them after.

    unit 0   |gather|--- segment 0 ---|free
    unit 1           |gather|         |--- segment 1 ---|free
    unit 2                            |gather|          |--- segment 2 ---| kept for its backward

In an action (the forward or backward of one microbatch on one stage) a unit has memory from its
first to its last use. All holders of a unit plan the same visits from the schedule alone, so that
they gather in one order. A unit that is the last of one action and the first of the next stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.domain.schedule import Action
from harness.runtime.executor.run.phases import Phases
from harness.runtime.executor.state.owners import Group
from harness.runtime.executor.state.units import UnitPlan, WeightUnit

# Number of the action in the step, and of the segment in the order in which they run.
Moment = tuple[int, int]
# The units of each segment of a microbatch on a stage, in the order of forward.
Needs = Callable[[int, int], Sequence[frozenset[int]]]


@dataclass
class Visit:
    """One stay of a unit in memory.

    Attributes:
        first, last: moments of its first and last use on this rank.
    """

    unit: int
    first: Moment
    last: Moment


def plan_visits(
    actions: Sequence[Action], plans: Sequence[UnitPlan], own: Sequence[int], needs: Needs
) -> dict[Group, list[Visit]]:
    """The visits of a step on one rank, for each set of devices in the order of all of them.

    Args:
        own: numbers of the units that this rank holds, which are freed.
        needs: of a microbatch and a stage.
    """
    found: dict[Group, list[Visit]] = defaultdict(list)
    for at, action in enumerate(actions):
        segments = list(needs(action.microbatch, action.stage))
        is_forward = action.kind == "forward"
        uses = segments if is_forward else segments[::-1]
        moments: dict[int, list[Moment]] = defaultdict(list)
        for k, units in enumerate(uses):
            for unit in units:
                moments[unit].append((at, k))
        here = [unit for unit in own if action.stage in plans[unit].stages]
        here.sort(key=lambda unit: (plans[unit].first, unit))
        if not is_forward:
            here.sort(key=lambda unit: (-plans[unit].last, -unit))
        for unit in here:
            visits = found[plans[unit].devices]
            first, last = moments[unit][0], moments[unit][-1]
            if visits and visits[-1].unit == unit:
                visits[-1].last = last
            else:
                visits.append(Visit(unit, first, last))
    return dict(found)


class Residence:
    """Which units have memory during a step.

    Args:
        units: this rank's freed units by number.
    """

    def __init__(
        self, plans: Sequence[UnitPlan], units: dict[int, WeightUnit], needs: Needs, phases: Phases
    ) -> None:
        self._plans, self._units, self._needs, self._phases = plans, units, needs, phases
        self._planned: dict[tuple[Action, ...], dict[Group, list[Visit]]] = {}
        self._visits: dict[Group, list[Visit]] = {}
        self._n_started: dict[Group, int] = {}
        self._is_muted = False

    def start_step(self, actions: tuple[Action, ...], *, is_muted: bool) -> None:
        """Start to gather the first units.

        Args:
            is_muted: allocate memory without communication.
        """
        if not self._units:
            return
        if actions not in self._planned:
            own = sorted(self._units)
            self._planned[actions] = plan_visits(actions, self._plans, own, self._needs)
        self._visits, self._is_muted = self._planned[actions], is_muted
        self._n_started = dict.fromkeys(self._visits, 0)
        for devices in self._visits:
            self._start(devices, 1)

    def _start(self, devices: Group, until: int, *, is_ahead: bool = False) -> None:
        """Start to gather a group's units up to a number of visits."""
        visits = self._visits[devices]
        while self._n_started[devices] < min(until, len(visits)):
            unit = self._units[visits[self._n_started[devices]].unit]
            if is_ahead and unit.is_live:
                return  # its earlier visit has not ended
            unit.start(is_muted=self._is_muted)
            self._n_started[devices] += 1

    def before(self, moment: Moment) -> None:
        """Wait for the units that a segment uses first, and start to gather the next ones.

        Raises:
            PeerError: another holder died or hangs.
        """
        for devices, visits in self._visits.items():
            for k, visit in enumerate(visits):
                if visit.first == moment:
                    self._start(devices, k + 1)
                    self._units[visit.unit].finish(self._phases)
                    self._start(devices, k + 2, is_ahead=True)

    def after(self, moment: Moment) -> None:
        """Free the units that a segment used last."""
        for visits in self._visits.values():
            for visit in visits:
                if visit.last == moment:
                    self._units[visit.unit].free()
