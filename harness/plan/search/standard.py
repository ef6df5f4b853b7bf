"""The standard strategies of a request: starts of a search, which must not lose to them.

Pipelines balanced by the profile: training's `pipeline`, and a start of searches.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import msgspec

from harness.domain.schedule import ScheduleName
from harness.domain.strategy import ShardState, Strategy
from harness.plan import builders
from harness.plan.bottleneck import balance, balance_in_turn
from harness.plan.joint_cuts import experts_of
from harness.plan.search.space import proportional_shares
from harness.plan.simulate.sharded_state import useful_states
from harness.plan.simulate.simulator import Simulator, operator_seconds

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


def standard_strategies(
    simulator: Simulator, batch: int, shard_state: ShardState | None = None
) -> Iterator[Strategy]:
    """All that apply: single on the fastest device first, then ddp, tensor parallel, hybrids,
    balanced pipelines.

    Args:
        shard_state: of all of them; None shards nothing but what memory needs: if ddp does not
            fit, it comes with each state sharded too.
    """
    for strategy in _unsharded(simulator, batch):
        kept = shard_state or "none"
        yield msgspec.structs.replace(strategy, shard_state=kept)
        if shard_state is not None or strategy.name != "ddp":
            continue
        if not simulator.simulate(strategy).fits:
            for state in useful_states(simulator.cluster.n_devices, simulator.options):
                name = f"ddp, sharded {state}"
                yield msgspec.structs.replace(strategy, name=name, shard_state=state)


def _unsharded(simulator: Simulator, batch: int) -> Iterator[Strategy]:
    graph, cluster = simulator.graph, simulator.cluster
    seconds = operator_seconds(simulator, batch).sum(axis=1).tolist()
    fastest = seconds.index(min(seconds))
    yield builders.single(graph, batch, device=fastest)
    if cluster.n_devices == 1:
        return
    if batch >= cluster.n_devices:
        yield builders.ddp(graph, cluster, batch)
        shares = proportional_shares(seconds, batch)
        if shares is not None:
            yield builders.ddp(graph, cluster, batch, shares=shares)
    yield builders.tensor_parallel(graph, cluster, batch)
    if any(op.kind == "linear" for op in graph.operators) or experts_of(graph).inside:
        yield builders.hybrid(graph, cluster, batch)
    if any(op.kind == "embedding" for op in graph.operators):
        yield builders.tables_on_devices(graph, cluster, batch)
    yield from _pipelines(simulator, batch)


def _pipelines(simulator: Simulator, batch: int) -> Iterator[Strategy]:
    """One stage per device under 1F1B with 1 to 4 microbatches each, and two stages per device
    taken in turn, which shortens fill and drain."""
    n, n_ops = simulator.cluster.n_devices, len(simulator.placed)
    for m in usual_microbatches(simulator, batch):
        if n_ops >= n:
            name = f"pipeline of {n}, {m} microbatches"
            yield balanced_pipeline(simulator, batch, m, name=name)
        if n_ops >= 2 * n and m % n == 0:
            name = f"interleaved pipeline of 2 x {n}, {m} microbatches"
            yield balanced_pipeline(simulator, batch, m, schedule="interleaved", name=name)


def microbatch_counts(simulator: Simulator, batch: int) -> list[int]:
    """Powers of two and the usual multiples of the devices, up to four for each device, or eight,
    and to the samples of the batch; one where an operator needs the whole batch."""
    if simulator.graph.mixing_operator() is not None:
        return [1]
    most = max(8, 4 * simulator.cluster.n_devices)
    powers = [2**k for k in range(most.bit_length()) if 2**k <= min(most, batch)]
    return sorted({*powers, *usual_microbatches(simulator, batch)})
