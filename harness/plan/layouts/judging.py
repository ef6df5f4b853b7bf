"""The layouts with the best prices once more by the simulator, on clusters that suit it.

A price leaves out how transfers get out of step over a shared NIC, and knows 1F1B alone. So the
best flows of each of the best degrees are simulated with all their cuts, and the fastest of these
under other schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from harness.domain.schedule import SCHEDULES
from harness.domain.shard_state import shards_parameters
from harness.domain.strategy import Strategy
from harness.plan.layouts.pricing import Choice
from harness.plan.search.pipelines import schedules_for
from harness.plan.simulate.sharded_state import SHARDING_GAIN
from harness.plan.simulate.simulator import Simulator

FLOWS_EACH = 3  # of equal degrees
MOST_TIMES_BEST = 2.0  # the best price; prices err by less
MOST_DEVICES = 64
MOST_WORK = 5e7  # passes of operators on pairs of devices before the last simulation: some seconds


def judged(
    ranked: Sequence[Choice],
    simulator: Simulator,
    strategy_of: Callable[[Choice], Strategy],
    *,
    may_shard: bool,
) -> list[Choice]:
    """Choices with the step and the memory of their simulation, fastest first; then those that were
    not simulated, and last those that do not fit.

    Args:
        ranked: that fit by their price, cheapest first.
        may_shard: the optimizer's state of the fastest is also sharded, if that gains enough.
    """
    plain: list[Choice] = []
    sharded: list[Choice] = []
    excessive: list[Choice] = []
    simulated: set[Choice] = set()
    left = MOST_WORK

    def judge(choices: Sequence[Choice]) -> list[Choice]:
        nonlocal left
        fitting: list[Choice] = []
        for choice in choices:
            if left <= 0:
                break
            left -= len(simulator.placed) * choice.layout.n_devices**2 * choice.n_microbatches
            simulation = simulator.simulate(strategy_of(choice))
            memory = max(simulation.memory_bytes.values())
            found = replace(choice, step_s=simulation.step_s, memory_bytes=memory)
            (fitting if simulation.fits else excessive).append(found)
            simulated.add(choice)
        return fitting

    for flows in _promising(ranked):
        if plain and flows[0].step_s > MOST_TIMES_BEST * ranked[0].step_s:
            break
        fitting = judge(flows)
        fitting += judge([one for best in _fastest(fitting) for one in _scheduled(best)])
        plain += fitting
        for best in _fastest(fitting) if may_shard else ():
            if best.shard_state == "none" and best.layout.dp > 1:
                sharded += judge([replace(best, shard_state="optimizer")])
    others = [one for one in ranked if one not in simulated]
    while not plain and others and left > 0:
        plain = judge([others.pop(0)])
    if plain:
        most_s = min(one.step_s for one in plain) / SHARDING_GAIN
        plain += [one for one in sharded if one.step_s <= most_s]
    return [*sorted(plain, key=lambda one: (one.step_s, one.name)), *others, *excessive]


def _fastest(choices: Sequence[Choice]) -> list[Choice]:
    return sorted(choices, key=lambda one: one.step_s)[:1]


def _promising(ranked: Sequence[Choice]) -> Iterator[list[Choice]]:
    """By degrees: the best flows, each with all its cuts."""
    flows: dict[str, dict[str, list[Choice]]] = {}
    for choice in ranked:
        own = flows.setdefault(choice.layout.name, {})
        own.setdefault(choice.name, []).append(choice)
    for own in flows.values():
        yield [choice for flow in list(own.values())[:FLOWS_EACH] for choice in flow]


def _scheduled(choice: Choice) -> list[Choice]:
    """Under the other schedules."""
    if choice.layout.pp == 1:
        return []
    splits = not shards_parameters(choice.shard_state)
    return [
        replace(choice, schedule=schedule)
        for schedule in schedules_for(choice.n_microbatches)
        if schedule != choice.schedule and (splits or not SCHEDULES[schedule].splits_backward)
    ]
