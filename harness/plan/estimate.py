"""Operator times of hardware that nobody has profiled: FLOPs over the device's matmul rate.

A stand-in until `./entry.sh profile` has run there: it leaves out memory bandwidth and launches.
"""

from __future__ import annotations

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Measurement, Profile
from harness.errors import PlanError


def estimate_profile(graph: Graph, cluster: Cluster) -> Profile:
    """Times of every operator on every kind of device of the cluster.

    Raises:
        PlanError: a kind of device has no matmul rate.
    """
    rates: dict[str, float] = {}
    for device in cluster.devices:
        rate = device.flops_per_s.get("float32") or max(device.flops_per_s.values(), default=0.0)
        if rate <= 0:
            raise PlanError(
                f"nothing says how fast {device.kind!r} runs {graph.name!r}: give --profile "
                f"(`./entry.sh profile --model {graph.name}` writes one), or write flops_per_s of "
                f"device {device.name} into the cluster file"
            )
        rates.setdefault(device.kind, rate)
    seen: set[tuple[object, ...]] = set()
    points = []
    for kind, rate in rates.items():
        for operator in graph.operators:
            key = (kind, operator.profile_key, tuple(operator.shape.items()), operator.dtype)
            if operator.kind == "input" or key in seen:
                continue
            seen.add(key)
            points.append(
                Measurement(
                    device_kind=kind,
                    operator=operator.profile_key,
                    shape=operator.shape,
                    dtype=operator.dtype,
                    forward_s=operator.forward_flops / rate,
                    backward_s=operator.backward_flops / rate,
                )
            )
    return Profile(
        model=graph.name, measurements=points, provenance={"source": "estimated from FLOPs"}
    )
