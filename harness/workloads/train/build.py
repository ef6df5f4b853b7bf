"""Build a well-known strategy for a training run, or load a strategy's file."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import fingerprint
from harness.domain.graph import Graph
from harness.domain.strategy import Strategy, check_fresh, validate
from harness.plan import builders
from harness.plan.layout import parse_layout, profiled_layout
from harness.plan.pipelines import balanced_pipeline, usual_microbatches
from harness.plan.simulate.simulator import Simulator
from harness.plan.simulate.unflushed import simulate_unflushed
from harness.workloads.train.check import load_for
from harness.workloads.train.config import TrainCase, is_layout


def load_strategy(case: TrainCase, graph: Graph, cluster: Cluster) -> Strategy:
    """Load the strategy's file of a run and check that it fits the run.

    Raises:
        StrategyError: the file is missing, malformed, stale, or for another model, batch or
            cluster.
    """
    strategy = load_for(case)
    check_fresh(strategy, graph, cluster)
    validate(strategy, graph, cluster)
    return strategy


def build_strategy(case: TrainCase, simulator: Simulator, shares: Sequence[int]) -> Strategy:
    """Build the well-known strategy of a run for these devices.

    Args:
        shares: samples of each rank under `ddp`.

    Raises:
        StrategyError: the flags do not fit the model or the ranks.
    """
    graph, cluster, batch = simulator.graph, simulator.cluster, case.batch
    if case.strategy == "single":
        strategy = builders.single(graph, batch)
    elif case.strategy == "ddp":
        is_even = max(shares) - min(shares) <= 1
        strategy = builders.ddp(graph, cluster, batch, shares=None if is_even else shares)
    elif case.strategy == "tensor":
        strategy = builders.tensor_parallel(graph, cluster, batch)
    elif case.strategy == "hybrid":
        strategy = builders.hybrid(graph, cluster, batch)
    else:
        strategy = _fastest(case, simulator)
    validate(strategy, graph, cluster)
    made_for = fingerprint(graph, cluster, simulator.profile)
    return msgspec.structs.replace(strategy, made_for=made_for)


def _fastest(case: TrainCase, simulator: Simulator) -> Strategy:
    """Build `pipeline`, or the strategy of given degrees, with the number of microbatches that the
    simulator predicts is fastest."""
    build = _by_degrees if is_layout(case.strategy) else _pipeline
    found = [build(case, simulator, n) for n in _microbatches(case, simulator)]
    for strategy in found:
        validate(strategy, simulator.graph, simulator.cluster)
    if len(found) == 1:
        return found[0]
    if case.is_asynchronous:
        return min(found, key=lambda strategy: simulate_unflushed(simulator, strategy).step_s)
    return min(found, key=simulator.step_s)


def _microbatches(case: TrainCase, simulator: Simulator) -> list[int]:
    if case.microbatches:
        return [case.microbatches]
    n_replicas = 1
    if is_layout(case.strategy):
        layout = parse_layout(case.strategy)
        n_replicas = layout.dp
        if layout.pp == 1:
            return [1]
    usual = usual_microbatches(simulator, case.batch)
    return [n for n in usual if case.batch // n >= n_replicas] or [case.batch // n_replicas]


def _pipeline(case: TrainCase, simulator: Simulator, n_microbatches: int) -> Strategy:
    return balanced_pipeline(
        simulator,
        case.batch,
        n_microbatches,
        n_stages=case.stages or 0,
        schedule=case.schedule,
        recompute=case.recompute,
    )


def _by_degrees(case: TrainCase, simulator: Simulator, n_microbatches: int) -> Strategy:
    return profiled_layout(
        parse_layout(case.strategy),
        simulator,
        case.batch,
        n_microbatches=n_microbatches,
        schedule=case.schedule,
        recompute=case.recompute,
    )
