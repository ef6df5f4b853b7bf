"""Simulate a strategy's step and make the Prediction that is written into a run."""

from __future__ import annotations

from harness.domain.prediction import Prediction
from harness.domain.strategy import Strategy
from harness.plan.fit import OperatorTimes
from harness.plan.simulate.report import contention_seconds, sent_bytes, spans
from harness.plan.simulate.simulator import Simulator
from harness.plan.simulate.unflushed import simulate_unflushed


def predict(
    simulator: Simulator, strategy: Strategy, *, method: str, search_s: float | None = None
) -> Prediction:
    """Simulate one step of a strategy.

    Args:
        method: how the strategy was found, such as `search` or `builder`.

    Raises:
        StrategyError: the strategy does not fit the graph or the cluster.
    """
    simulation = simulator.simulate(strategy)
    return Prediction(
        strategy=strategy.name,
        method=method,
        step_s=simulation.step_s,
        memory_bytes=simulation.memory_bytes,
        spans={str(rank): by_rank for rank, by_rank in spans(simulation).items()},
        contention_s={str(rank): s for rank, s in enumerate(contention_seconds(simulation))},
        sent_bytes={str(rank): round(n) for rank, n in enumerate(sent_bytes(simulation))},
        profile_fit_error=largest_fit_error(simulator, strategy),
        search_s=search_s,
        calibrations=_calibrations(simulator),
    )


def predict_asynchronous(simulator: Simulator, strategy: Strategy, *, method: str) -> Prediction:
    """Simulate one step of asynchronous training; see `predict`.

    Raises:
        StrategyError: the strategy does not fit the graph or the cluster.
    """
    found = simulate_unflushed(simulator, strategy)
    return Prediction(
        strategy=strategy.name,
        method=method,
        step_s=found.step_s,
        memory_bytes=found.memory_bytes,
        spans={str(rank): by_rank for rank, by_rank in found.spans.items()},
        contention_s={str(rank): s for rank, s in enumerate(found.contention_s)},
        profile_fit_error=largest_fit_error(simulator, strategy),
        calibrations=_calibrations(simulator),
    )


def _calibrations(simulator: Simulator) -> dict[str, float]:
    return simulator.profile.calibrations(simulator.graph.content_hash())


def largest_fit_error(simulator: Simulator, strategy: Strategy) -> float | None:
    """Largest relative error of the fits that stand in for unmeasured shards; None without any."""
    times = OperatorTimes(simulator.profile)
    errors = []
    for costs in map(simulator.costs, set(strategy.microbatch_sizes())):
        for op in simulator.placed:
            operator = simulator.graph.operators[op]
            plan = strategy.operators[operator.name]
            for block, device in zip(costs.blocks(op, plan), plan.devices, strict=True):
                sizes = [stop - start for start, stop in block]
                shape = dict(zip(costs.shapes[op], sizes, strict=True))
                shape = {dim: n for dim, n in shape.items() if dim in operator.shape}
                kind = simulator.cluster.devices[device].kind
                if not times.is_measured(operator, kind, shape):
                    errors.append(times.relative_error(operator, kind) or 0.0)
    return max(errors, default=None)
