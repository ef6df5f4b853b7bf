"""What PipeDream's formula sees of a model: a DAG of operators with three numbers each.

Inputs are dropped (they stand in the first stage), and so are `__getitem__` sinks, whose
results nobody reads.
"""

from __future__ import annotations

from dataclasses import dataclass

from harness.domain.graph import Graph, Operator
from harness.domain.profile import Profile
from harness.errors import GraphError
from harness.plan.fit import OperatorTimes

# Seconds are summed as whole multiples of this: equal sets have equal sums, whatever the order.
TICK_S = 1e-13


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Operators in topological order, all lists by position.

    Attributes:
        compute_ticks: forward plus backward of the profiled minibatch on one device, in TICK_S.
        activation_bytes: what stays until the backward pass, whole minibatch.
        output_bytes: what its consumers are sent, whole minibatch.
        producers: positions of the distinct producers.
        consumers: positions of the distinct consumers.
    """

    names: list[str]
    compute_ticks: list[int]
    parameter_bytes: list[int]
    activation_bytes: list[int]
    output_bytes: list[int]
    producers: list[list[int]]
    consumers: list[list[int]]

    @property
    def n_operators(self) -> int:
        return len(self.names)


def workload_from(graph: Graph, profile: Profile, device_kind: str) -> Workload:
    """Join a graph with its times on one kind of device.

    Raises:
        GraphError: nothing but inputs is left.
        PlanError: the profile does not know an operator on that kind of device.
    """
    kept = _planned(graph)
    if not kept:
        raise GraphError(f"graph {graph.name!r} has only inputs: there is nothing to plan")
    times = OperatorTimes(profile)
    position = {operator.name: i for i, operator in enumerate(kept)}
    producers = [
        [position[name] for name in dict.fromkeys(operator.inputs) if name in position]
        for operator in kept
    ]
    consumers: list[list[int]] = [[] for _ in kept]
    for i, sources in enumerate(producers):
        for source in sources:
            consumers[source].append(i)
    return Workload(
        names=[operator.name for operator in kept],
        compute_ticks=[
            round(times.lookup(operator, device_kind).total_s / TICK_S) for operator in kept
        ],
        parameter_bytes=[operator.parameter_bytes for operator in kept],
        activation_bytes=[operator.activation_bytes for operator in kept],
        output_bytes=[operator.activation_bytes for operator in kept],
        producers=producers,
        consumers=consumers,
    )


def _planned(graph: Graph) -> list[Operator]:
    read = {name for operator in graph.operators for name in operator.inputs}
    return [
        operator
        for operator in graph.operators
        if operator.kind != "input" and not (operator.name not in read and _is_getitem(operator))
    ]


def _is_getitem(operator: Operator) -> bool:
    return str(operator.attrs.get("description", "")).startswith("__getitem__")
