"""Strategies of replicas that exchange no activations, so that they can be averaged."""

import msgspec

from harness.domain.graph import Graph
from harness.domain.partition import REPLICA, SAMPLE
from harness.domain.sharding import may_have_copies
from harness.domain.strategy import Strategy
from harness.errors import StrategyError


def with_copies(strategy: Strategy, graph: Graph, n_replicas: int) -> Strategy:
    """Let each of several replicas compute the operators that are not cut by samples, which the
    first one computes for all.

    Args:
        strategy: of operators whose outermost cut is by samples, over the replicas.

    Raises:
        StrategyError: such an operator may have no copies, because it has weights.
    """
    if n_replicas == 1:
        return strategy
    operators = {operator.name: operator for operator in graph.operators}
    firsts = {
        plan.stage: plan.devices[:: len(plan.devices) // n_replicas]
        for plan in strategy.operators.values()
        if SAMPLE in plan.partition
    }
    plans = dict(strategy.operators)
    for name, plan in plans.items():
        if SAMPLE in plan.partition:
            continue
        if not may_have_copies(operators[name]) or plan.stage not in firsts:
            raise StrategyError(
                f"--sync-every averages replicas that exchange nothing else, and operator {name!r} "
                f"({operators[name].kind}) is computed by one of them for all: drop it, or use "
                "--engine torch --strategy ddp"
            )
        copies = {REPLICA: n_replicas}
        plans[name] = msgspec.structs.replace(plan, partition=copies, devices=firsts[plan.stage])
    return msgspec.structs.replace(strategy, operators=plans)
