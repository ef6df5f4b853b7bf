"""Graphs, profiles and requests by hand, for tests of several packages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise, permutations
from typing import Any

from msgspec.structs import replace

from harness.domain.checkpoints import with_recomputation
from harness.domain.cluster import Cluster, Link
from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, Profile
from harness.domain.schedule import ScheduleName
from harness.domain.sharding import has_tasks
from harness.domain.strategy import Strategy
from harness.plan.builders import pipeline
from harness.plan.costs import PlanRequest

GB = 10**9
Seconds = tuple[float, float]


def profile_of(
    graph: Graph, seconds: Seconds | Mapping[str, Seconds] = (1.0, 2.0), kind: str = "device"
) -> Profile:
    """Forward and backward of each operator on one kind of device.

    Args:
        seconds: by operator, or of all but the first, which is the input.
    """
    if isinstance(seconds, tuple):
        seconds = {operator.name: seconds for operator in graph.operators[1:]}
    shapes = {operator.name: operator.shape for operator in graph.operators}
    points = [
        Measurement(device_kind=kind, operator=name, shape=shapes[name], forward_s=f, backward_s=b)
        for name, (f, b) in seconds.items()
    ]
    return Profile(model=graph.name, measurements=points)


def profile_by_keys(
    graph: Graph, seconds: Seconds = (1.0, 1.0), kind: str = "device", dtype: str = ""
) -> Profile:
    """The same of a captured graph, whose operators are measured under their keys in each dtype."""
    forward_s, backward_s = seconds
    points = {
        op.profile_key: Measurement(
            device_kind=kind, operator=op.profile_key, shape=op.shape, dtype=dtype or op.dtype,
            forward_s=forward_s, backward_s=backward_s,
        )
        for op in filter(has_tasks, graph.operators)
    }  # fmt: skip
    return Profile(model=graph.name, measurements=list(points.values()))


def changed(graph: Graph, names: Collection[str], **changes: Any) -> Graph:
    """The graph with these changes of its operators of these names."""
    operators = [replace(op, **changes) if op.name in names else op for op in graph.operators]
    return replace(graph, operators=operators)


def layers(
    n: int = 4, *, batch: int = 8, parameters: int = 1000, seconds: float = 1.0
) -> tuple[Graph, Profile]:
    """So many equal linear layers, one after the other."""
    operators = [Operator(name="x", kind="input", shape={"sample": batch, "feature": 8})]
    for i in range(n):
        operators.append(
            Operator(
                name=f"fc{i}",
                kind="linear",
                inputs=[operators[-1].name],
                shape={"sample": batch, "feature": 8},
                parameter_bytes=parameters,
                activation_bytes=32 * batch,
            )
        )
    graph = Graph(name="layers", operators=operators, batch=batch)
    return graph, profile_of(graph, (seconds, 2 * seconds))


def request_of(
    graph: Graph,
    profile: Profile,
    cluster: Cluster | None = None,
    *,
    budget: int = 300,
    **changes: Any,
) -> PlanRequest:
    """A short search, by default on four equal devices of one node."""
    cluster = cluster or Cluster.uniform(1, 4, inside_bytes_per_s=1e6, memory_bytes=GB)
    return PlanRequest(graph=graph, profile=profile, cluster=cluster, budget=budget, **changes)


def small_cluster(n_devices: int) -> Cluster:
    """Equal devices, one on each node."""
    return Cluster.uniform(n_devices, 1, inside_bytes_per_s=1e9, memory_bytes=1 << 30)


def replicated_pipeline(
    graph: Graph,
    batch: int,
    devices: list[list[int]],
    *,
    n_microbatches: int = 4,
    schedule: ScheduleName = "1f1b",
    recompute: bool = False,
) -> Strategy:
    """Stages of equally many operators, stage s data parallel on `devices[s]`: PipeDream's 3-1 is
    [[0, 1, 2], [3]]."""
    names = [op.name for op in graph.operators if has_tasks(op)]
    ends = [len(names) * k // len(devices) for k in range(len(devices) + 1)]
    found = pipeline(
        graph,
        batch,
        [names[a:b] for a, b in pairwise(ends)],
        devices,
        n_microbatches=n_microbatches,
        schedule=schedule,
        name="-".join(str(len(own)) for own in devices),
    )
    return with_recomputation(found, graph, 1) if recompute else found


def unlike_cluster(speeds: Sequence[float], memory_bytes: int = GB) -> Cluster:
    """One node with a device of each speed."""
    cluster = Cluster.uniform(1, len(speeds), inside_bytes_per_s=1e6, memory_bytes=memory_bytes)
    devices = zip(cluster.devices, speeds, strict=True)
    return cluster.with_devices(replace(device, speed=speed) for device, speed in devices)


def links_between(
    names: Sequence[str], rates: Callable[[str, str], tuple[float, float]]
) -> list[Link]:
    """A link for each pair of devices, each way; latency and bandwidth are a function of both."""
    return [
        Link(source=a, target=b, latency_s=latency_s, bandwidth_bytes_per_s=bandwidth)
        for a, b in permutations(names, 2)
        for latency_s, bandwidth in [rates(a, b)]
    ]
