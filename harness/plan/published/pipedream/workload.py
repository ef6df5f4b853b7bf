"""A model as PipeDream's formula has it: a DAG of operators with three numbers each.

Inputs are dropped (they stand in the first stage), and so are `__getitem__` sinks, whose
results nobody reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from harness.domain.graph import Graph, Operator
from harness.domain.profile import Profile
from harness.errors import GraphError
from harness.plan.fit import OperatorTimes

# Seconds are summed as whole multiples of this: equal sets have equal sums, whatever the order.
TICK_S = 1e-13


@dataclass(frozen=True, kw_only=True)
class OperatorDag:
    """Operators in topological order, all lists by position.

    Attributes:
        compute_ticks: forward plus backward of the profiled minibatch on one device, in TICK_S.
        activation_bytes: kept until the backward pass, whole minibatch.
        output_bytes: sent to its consumers, whole minibatch.
        producers: positions of the distinct producers.
    """

    names: list[str]
    compute_ticks: list[int]
    parameter_bytes: list[int]
    activation_bytes: list[int]
    output_bytes: list[int]
    producers: list[list[int]]

    @cached_property
    def consumers(self) -> list[list[int]]:
        """Positions of the distinct consumers."""
        found: list[list[int]] = [[] for _ in self.names]
        for i, sources in enumerate(self.producers):
            for source in sources:
                found[source].append(i)
        return found

    @property
    def n_operators(self) -> int:
        return len(self.names)

    def grouped(self, groups: Sequence[Sequence[int]], group_of: Sequence[int]) -> OperatorDag:
        """With runs of operators as one; consumers read the last of each."""

        def summed(values: list[int]) -> list[int]:
            return [sum(values[i] for i in members) for members in groups]

        outside = [
            [group_of[p] for i in members for p in self.producers[i] if group_of[p] != k]
            for k, members in enumerate(groups)
        ]
        return OperatorDag(
            names=[self.names[members[-1]] for members in groups],
            compute_ticks=summed(self.compute_ticks),
            parameter_bytes=summed(self.parameter_bytes),
            activation_bytes=summed(self.activation_bytes),
            output_bytes=[self.output_bytes[members[-1]] for members in groups],
            producers=[list(dict.fromkeys(sources)) for sources in outside],
        )


def workload_from(graph: Graph, profile: Profile, device_kind: str) -> OperatorDag:
    """Join a graph with its times on one kind of device.

    Raises:
        GraphError: nothing but inputs is left.
        PlanError: the profile does not know an operator on that kind of device.
    """
    read = {name for operator in graph.operators for name in operator.inputs}
    kept = [op for op in graph.operators if op.kind != "input" and not _is_unread_item(op, read)]
    if not kept:
        raise GraphError(f"graph {graph.name!r} has only inputs: there is nothing to plan")
    times = OperatorTimes(profile)
    position = {operator.name: i for i, operator in enumerate(kept)}
    return OperatorDag(
        names=[op.name for op in kept],
        compute_ticks=[round(times.lookup(op, device_kind).total_s / TICK_S) for op in kept],
        parameter_bytes=[op.parameter_bytes for op in kept],
        activation_bytes=[op.activation_bytes for op in kept],
        output_bytes=[op.activation_bytes for op in kept],
        producers=[
            [position[name] for name in dict.fromkeys(op.inputs) if name in position] for op in kept
        ],
    )


def _is_unread_item(operator: Operator, read: set[str]) -> bool:
    is_item = str(operator.attrs.get("description", "")).startswith("__getitem__")
    return is_item and operator.name not in read
