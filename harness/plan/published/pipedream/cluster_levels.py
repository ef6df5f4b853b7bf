"""A cluster as PipeDream's formula sees it: one or two levels of equal workers.

The formula knows one bandwidth per level: the slowest link counts. Nodes of unequal size, or
devices of unequal speed, become one level of devices in the cluster's order.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from harness.domain.cluster import Cluster
from harness.errors import PlanError
from harness.plan.published.pipedream.cost import Level, levels_of
from harness.plan.published.pipedream.cuts import Floats
from harness.plan.published.pipedream.dynamic import Workers


@dataclass(frozen=True)
class Machines:
    """Levels innermost first; `unlike` when devices differ (then one level), see `Problem`."""

    levels: list[Level]
    memory: float
    unlike: Workers | None = None


def machines_of(cluster: Cluster, memory_bytes: int | None, speeds: list[float]) -> Machines:
    """Levels of a cluster.

    Args:
        memory_bytes: limit that replaces the devices' own.
        speeds: of each device, relative to the one whose times the workload holds.

    Raises:
        PlanError: several devices but a missing link.
    """
    memories = [device.memory_bytes for device in cluster.devices]
    if memory_bytes is not None:
        memories = [memory_bytes] * len(memories)
    sizes = {len(node.devices) for node in cluster.nodes}
    bandwidth = _bandwidths(cluster)
    if len(set(speeds)) > 1 or len(set(memories)) > 1 or len(sizes) > 1:
        n = cluster.n_devices
        slowest = float(bandwidth[~np.eye(n, dtype=bool)].min()) if n > 1 else math.inf
        unlike = Workers.ordered(speeds, bandwidth, [float(m) for m in memories])
        return Machines([Level(n, slowest)], math.inf, unlike)
    node_of = np.array(cluster.node_of())
    same = node_of[:, None] == node_of[None, :]
    np.fill_diagonal(same, False)
    inside = float(bandwidth[same].min()) if same.any() else math.inf
    n_nodes, size = len(cluster.nodes), sizes.pop()
    if n_nodes == 1:
        return Machines(levels_of([size], [inside]), float(memories[0]))
    between = float(bandwidth[node_of[:, None] != node_of[None, :]].min())
    if size == 1:
        return Machines(levels_of([n_nodes], [between]), float(memories[0]))
    return Machines(levels_of([size, n_nodes], [inside, between]), float(memories[0]))


def _bandwidths(cluster: Cluster) -> Floats:
    position = {device.name: i for i, device in enumerate(cluster.devices)}
    n = cluster.n_devices
    bandwidth = np.zeros((n, n))
    for link in cluster.links:
        bandwidth[position[link.source], position[link.target]] = link.bandwidth_bytes_per_s
    np.fill_diagonal(bandwidth, math.inf)
    if not bandwidth.all():
        a, b = (int(i) for i in np.argwhere(bandwidth == 0)[0])
        names = [device.name for device in cluster.devices]
        raise PlanError(
            f"the cluster has no link {names[a]} -> {names[b]} ({len(cluster.links)} links for "
            f"{n} devices): measure it with `./entry.sh links`, or write the link"
        )
    return bandwidth
