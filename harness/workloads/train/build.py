"""Build a well-known strategy for a training run, or load a strategy's file."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import fingerprint
from harness.domain.graph import Graph
from harness.domain.strategy import Strategy, check_fresh, validate
from harness.plan import builders
from harness.plan.pipelines import balanced_pipeline, usual_microbatches
from harness.plan.simulate.simulator import Simulator
from harness.plan.simulate.unflushed import simulate_unflushed
from harness.workloads.train.check import load_for
from harness.workloads.train.config import TrainCase


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
        strategy = _pipeline(case, simulator)
    validate(strategy, graph, cluster)
    made_for = fingerprint(graph, cluster, simulator.profile)
    return msgspec.structs.replace(strategy, made_for=made_for)


def _pipeline(case: TrainCase, simulator: Simulator) -> Strategy:
    """Build a pipeline with the number of microbatches that the simulator predicts is fastest."""
    found = [_with_microbatches(case, simulator, n) for n in _microbatches(case, simulator)]
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
    return usual_microbatches(simulator, case.batch) or [case.batch]


def _with_microbatches(case: TrainCase, simulator: Simulator, n_microbatches: int) -> Strategy:
    return balanced_pipeline(
        simulator,
        case.batch,
        n_microbatches,
        n_stages=case.stages or 0,
        schedule=case.schedule,
        recompute=case.recompute,
    )
