"""Predict the cost of a change of strategy, and whether it pays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from harness.domain.cluster import Cluster


def predict_change_s(cluster: Cluster, pair_bytes: Mapping[tuple[int, int], int]) -> float:
    """The time of the slowest link or NIC, all pairs of ranks sending at once.

    Args:
        pair_bytes: bytes by (sender, reader), as positions in `Cluster.devices`.
    """
    rank_of = {device.name: rank for rank, device in enumerate(cluster.devices)}
    slowest_s = 0.0
    for link in cluster.links:
        n_bytes = pair_bytes.get((rank_of[link.source], rank_of[link.target]), 0)
        if n_bytes:
            slowest_s = max(slowest_s, link.latency_s + n_bytes / link.bandwidth_bytes_per_s)
    node_of = cluster.node_of()
    sent: Counter[int] = Counter()
    received: Counter[int] = Counter()
    for (source, target), n_bytes in pair_bytes.items():
        if node_of[source] != node_of[target]:
            sent[node_of[source]] += n_bytes
            received[node_of[target]] += n_bytes
    for at, node in enumerate(cluster.nodes):
        if node.nic_bytes_per_s:
            slowest_s = max(slowest_s, max(sent[at], received[at]) / node.nic_bytes_per_s)
    return slowest_s


def is_worth(before_s: float, after_s: float, n_steps_left: int, cost_s: float) -> bool:
    """Whether the steps that are left gain more than the change costs."""
    return (before_s - after_s) * n_steps_left > cost_s
