"""Pipelines balanced by the profile: training's `pipeline`, and a start of searches."""

from __future__ import annotations

from itertools import pairwise

from harness.domain.schedule import ScheduleName
from harness.domain.strategy import Strategy
from harness.plan import builders
from harness.plan.simulate.device_seconds import operator_seconds
from harness.plan.simulate.simulator import Simulator
from harness.plan.stages import balance, balance_in_turn

# Microbatches for each device that are tried where nobody names a number.
_MICROBATCHES_EACH = (1, 2, 4)


def balanced_pipeline(
    simulator: Simulator,
    batch: int,
    n_microbatches: int,
    *,
    n_stages: int = 0,
    schedule: ScheduleName = "1f1b",
    recompute: bool = False,
    name: str = "pipeline",
) -> Strategy:
    """Stages of about equal time at this size of microbatch, on the devices as they are.

    Args:
        n_stages: 0 is one for each device, or two under `interleaved`, which devices take in turn.
            Fewer have replicas.

    Raises:
        StrategyError: more stages than the model or the devices allow.
    """
    graph, n_devices = simulator.graph, simulator.cluster.n_devices
    names = [graph.operators[op].name for op in simulator.placed]
    seconds = operator_seconds(simulator, batch, n_microbatches).tolist()
    if schedule == "interleaved":
        stages = balance_in_turn(seconds, n_stages or 2 * n_devices)
    else:
        stages = balance(seconds, n_stages or min(n_devices, len(names)))
    return builders.pipeline(
        graph,
        batch,
        [names[a:b] for a, b in pairwise((0, *stages.ends))],
        stages.groups,
        n_microbatches=n_microbatches,
        schedule=schedule,
        recompute=recompute,
        name=name,
    )


def usual_microbatches(simulator: Simulator, batch: int) -> list[int]:
    """One, two and four for each device, as far as there are samples; one in all where an operator
    needs the whole batch."""
    if simulator.graph.mixing_operator() is not None:
        return [1]
    n = simulator.cluster.n_devices
    return [k * n for k in _MICROBATCHES_EACH if k * n <= batch]
