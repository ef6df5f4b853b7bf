"""The links of equal nodes, and seconds of a layout's transfers and all-reduces over them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.domain.cluster import Cluster, are_near
from harness.domain.shard_state import ShardState, shards_in_nodes
from harness.errors import PlanError
from harness.plan.layouts.degrees import ParallelLayout
from harness.plan.simulate.network import CollectiveName, Curves
from harness.plan.simulate.transfers import Floats, Ints


class NodeLinks(NamedTuple):
    """Links of equal nodes: bytes/s and seconds; and measured curves of collectives."""

    n_each: int
    inside: float
    inside_latency_s: float
    between: float
    between_latency_s: float
    nic: float
    curves: Curves

    def shared(self, n_flows: int) -> float:
        """Bytes/s of each of some flows from one node to another."""
        return min(self.between, self.nic / min(n_flows, self.n_each))

    def measured(
        self,
        operation: CollectiveName,
        n_ranks: int,
        n_bytes: Floats,
        *,
        spans_nodes: bool,
        n_flows: int = 1,
    ) -> Floats | None:
        """Seconds of a collective by its measured curve, None without one; of so many that share a
        NIC at least what that takes for all."""
        found = self.curves.seconds(operation, n_ranks, n_bytes, spans_nodes=spans_nodes)
        if found is None or not spans_nodes:
            return found
        sent_s = 2 * (n_ranks - 1) / n_ranks * n_bytes / self.nic
        shared_s: Floats = min(n_flows, self.n_each) * np.minimum(found, sent_s)
        return np.maximum(found, shared_s, dtype=np.float64)

    @classmethod
    def from_cluster(cls, cluster: Cluster) -> NodeLinks:
        """The slowest link inside the first node, from it to the others, and interface of a node.

        Raises:
            PlanError: nodes or devices differ, or a bandwidth is missing.
        """
        nics = sorted(node.nic_bytes_per_s or np.inf for node in cluster.nodes)
        for what, values in (
            ("devices in a node", {len(node.devices) for node in cluster.nodes}),
            ("kind", {device.kind for device in cluster.devices}),
            ("speed", {device.speed for device in cluster.devices}),
            ("memory_bytes", {device.memory_bytes for device in cluster.devices}),
            ("nic_bytes_per_s", {nics[0]} if are_near(nics[0], nics[-1]) else set(nics)),
        ):
            if len(values) > 1:
                raise PlanError(
                    "--cost layouts plans for equal nodes of equal devices, and the cluster's "
                    f"differ in {what} ({min(values)} and {max(values)}): use --cost simulator"
                )
        n_each = len(cluster.nodes[0].devices)
        own = {device.name for device in cluster.nodes[0].devices}
        links = [link for link in cluster.links if link.source in own]
        near = [link for link in links if link.target in own]
        far = [link for link in links if link.target not in own]
        if (n_each > 1 and not near) or (len(cluster.nodes) > 1 and not far and np.isinf(nics[0])):
            raise PlanError("the cluster lacks links of its first node: measure or write them")
        return cls(
            n_each,
            min((link.bandwidth_bytes_per_s for link in near), default=np.inf),
            max((link.latency_s for link in near), default=0.0),
            min((link.bandwidth_bytes_per_s for link in far), default=np.inf),
            max((link.latency_s for link in far), default=0.0),
            nics[0],
            Curves(cluster),
        )


def transfer_seconds(
    layout: ParallelLayout, n_bytes: Floats, links: NodeLinks, far: bool | npt.NDArray[np.bool_]
) -> tuple[Floats, Floats]:
    """Of one microbatch into a stage and of its gradient back: (2, pairs) that a link is occupied,
    and latency.

    Args:
        n_bytes: (2, 2, pairs) see `GroupCosts.sent_bytes`.
        far: whether the two stages are on different nodes.
    """
    sent_s = np.where(
        far, n_bytes[0] / links.shared(layout.tp * layout.dp), n_bytes[1] / links.inside
    )
    latency_s = np.where(far, links.between_latency_s, links.inside_latency_s)
    return sent_s, latency_s * (n_bytes[0, 0] > 0)


def queues(nodes: Ints) -> Ints:
    """(2, pairs, 2) queues of a transfer between the stages of a pair, and of one back: the NICs of
    both nodes (2, pairs), out of one and into the other, or a link inside a node."""
    before, node = nodes
    inward = nodes.max(initial=0) + 1
    ways = np.array([[before, inward + node], [node, inward + before]])
    links = 2 * inward + np.arange(2 * len(node)).reshape(2, 1, -1)
    return np.ascontiguousarray(np.where(before == node, links, ways).swapaxes(1, 2))


def replicas_in_node(layout: ParallelLayout, links: NodeLinks) -> int:
    """Replicas of a stage in each node."""
    return min(layout.dp, max(1, links.n_each // layout.tp))


class Rings(NamedTuple):
    """Collectives among a layout's replicas: seconds on each device of a group, by each stage's
    bytes."""

    layout: ParallelLayout
    shard_state: ShardState
    links: NodeLinks

    @property
    def n_sharing(self) -> int:
        """Replicas that share state."""
        if shards_in_nodes(self.shard_state):
            return replicas_in_node(self.layout, self.links)
        return self.layout.dp

    def every(self, n_bytes: Floats, n_stages: int = 1) -> Floats:
        """An all-reduce among all replicas of some stages; the rings of a node share its NIC."""
        layout, links = self.layout, self.links
        n = layout.dp * n_stages
        width = layout.n_devices if n_stages > 1 else layout.dp * layout.tp
        rate, latency_s, is_far = links.inside, links.inside_latency_s, width > links.n_each
        measured = links.measured("all_reduce", n, n_bytes, spans_nodes=is_far, n_flows=layout.tp)
        if measured is not None:
            return measured
        if is_far:
            has_hops_inside = layout.dp > 1 and layout.tp < links.n_each
            rate = min([links.shared(layout.tp), *[links.inside] * has_hops_inside])
            latency_s = links.between_latency_s
        return 2 * (n - 1) * (n_bytes / n / rate + latency_s)

    def part(self, operation: CollectiveName, n_bytes: Floats) -> Floats:
        """An all-gather or a reduce-scatter among the replicas that share state."""
        layout, links = self.layout, self.links
        is_far = layout.dp * layout.tp > links.n_each and not shards_in_nodes(self.shard_state)
        measured = links.measured(operation, self.n_sharing, n_bytes, spans_nodes=is_far)
        if measured is not None:
            return measured
        n = replicas_in_node(layout, links)
        if is_far and n == 1:
            return self.every(n_bytes) / 2
        within_s = links.measured("all_reduce", n, n_bytes, spans_nodes=False)
        if within_s is None:
            within_s = 2 * (n - 1) * (n_bytes / n / links.inside + links.inside_latency_s)
        return within_s / 2 + (self._between(n_bytes / 2) if is_far else 0.0)

    def outer(self, n_bytes: Floats) -> Floats:
        """An all-reduce of parts among the other replicas, where each node keeps the state."""
        is_whole = shards_in_nodes(self.shard_state)
        return self._between(n_bytes) if is_whole else np.zeros_like(n_bytes)

    def _between(self, n_bytes: Floats) -> Floats:
        """An all-reduce, among the nodes of a stage, of a part of the bytes on each device."""
        layout, links = self.layout, self.links
        own = replicas_in_node(layout, links)
        n, n_flows, n_bytes = layout.dp // own, own * layout.tp, n_bytes / own
        measured = links.measured("all_reduce", n, n_bytes, spans_nodes=n > 1, n_flows=n_flows)
        if measured is not None:
            return measured
        return 2 * (n - 1) * (n_bytes / n / links.shared(n_flows) + links.between_latency_s)
