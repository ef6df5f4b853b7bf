"""The layouts with the best prices once more by the simulator, on clusters that suit it.

A price leaves out how transfers get out of step over a shared NIC, and knows 1F1B alone. So the
best flows of each of the best degrees are simulated under several schedules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from harness.domain.schedule import SCHEDULES
from harness.domain.shard_state import ShardState, shards_parameters
from harness.domain.strategy import Strategy
from harness.plan.layouts.pricing import Choice
from harness.plan.search.pipelines import schedules_for
from harness.plan.simulate.sharded_state import SHARDING_GAIN
from harness.plan.simulate.simulator import Simulator

FLOWS_EACH = 3  # of equal degrees
MOST_TIMES_BEST = 2.0  # the best price; prices err by less
MOST_WORK = 3e7  # passes of operators on devices in all simulations: some seconds


def judged(
    ranked: Sequence[Choice],
    simulator: Simulator,
    strategy_of: Callable[[Choice], Strategy],
    state: ShardState | None,
) -> list[Choice]:
    """Choices that fit, with the step and the memory of their simulation.

    Args:
        ranked: that fit by their price, cheapest first.
        state: that is also tried in place of none, and kept if it gains enough.
    """
    found: list[Choice] = []
    left = MOST_WORK
    for choice in _promising(ranked, state):
        left -= len(simulator.placed) * choice.layout.n_devices * choice.n_microbatches
        if left < 0:
            break
        simulation = simulator.simulate(strategy_of(choice))
        if simulation.fits:
            memory = max(simulation.memory_bytes.values())
            found.append(replace(choice, step_s=simulation.step_s, memory_bytes=memory))
    plain_s = [one.step_s for one in found if one.shard_state == "none"]
    most_s = min(plain_s, default=float("inf")) / SHARDING_GAIN
    return [one for one in found if one.shard_state != state or one.step_s <= most_s]


def _promising(ranked: Sequence[Choice], state: ShardState | None) -> Iterator[Choice]:
    n_flows: dict[str, int] = {}
    for choice in ranked:
        name = choice.layout.name
        n_flows[name] = n_flows.get(name, 0) + 1
        if choice.step_s > MOST_TIMES_BEST * ranked[0].step_s:
            return
        if n_flows[name] > FLOWS_EACH:
            continue
        states = [choice.shard_state]
        if state and choice.shard_state == "none" and choice.layout.dp > 1:
            states.append(state)
        schedules = schedules_for(choice.n_microbatches) if choice.layout.pp > 1 else ["1f1b"]
        for one in states:
            for schedule in schedules if not choice.segments else ["1f1b"]:
                if not (shards_parameters(one) and SCHEDULES[schedule].splits_backward):
                    yield replace(choice, shard_state=one, schedule=schedule)
