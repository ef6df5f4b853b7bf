"""Strategies of replicas that exchange no activations, so that they can be averaged."""

from __future__ import annotations

import msgspec

from harness.domain.graph import Graph
from harness.domain.partition import REPLICA, SAMPLE
from harness.domain.strategy import Strategy


def with_copies(strategy: Strategy, graph: Graph, n_replicas: int) -> Strategy:
    """Let each replica compute the operators that are not cut, which the first computes for all,
    such as the embedding of positions; losses stay.

    Args:
        strategy: of operators whose outermost cut is by samples, over the replicas.
    """
    kinds = {operator.name: operator.kind for operator in graph.operators}
    firsts = {
        plan.stage: plan.devices[:: len(plan.devices) // n_replicas]
        for plan in strategy.operators.values()
        if SAMPLE in plan.partition
    }
    plans = {
        name: msgspec.structs.replace(
            plan, partition={REPLICA: n_replicas}, devices=firsts[plan.stage]
        )
        for name, plan in strategy.operators.items()
        if not plan.partition and plan.stage in firsts and kinds[name] != "loss"
    }
    return msgspec.structs.replace(strategy, operators=strategy.operators | plans)
