"""Links, network interfaces and collectives as resources that transfers occupy.

Resources are numbered: links from device a to b, then each node's NIC outwards, each node's NIC
inwards (full duplex), then each device's stream of collectives, which runs one at a time. A
transfer occupies a link for bytes / link bandwidth and a NIC for bytes / NIC bandwidth, so that a
fast NIC serves several slow links at once.

Of a measured curve, the logarithm of time is linear in the logarithm of size between two sizes.
Below the smallest size time is constant (latency), above the largest it grows in proportion
(bandwidth). For a number of ranks that was not measured, the curve of the nearest number is scaled
by the share of the bytes that a rank sends, (n-1)/n.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from harness.domain.cluster import Cluster
from harness.domain.key_forms import Rounds
from harness.domain.shard_state import averaged_replicas, by_node
from harness.errors import ClusterError
from harness.plan.simulate.options import AllReduce
from harness.plan.simulate.transfers import Floats, Ints

# A link or device counts as slower than another's from here on.
SLOWER = 1.2
_TRANSPORTS = ("nccl", "gloo", "mpi")

CollectiveName = Literal["all_reduce", "reduce_scatter", "all_gather"]


class Curves:
    """The measured curves of a cluster, of the first transport that has any."""

    def __init__(self, cluster: Cluster) -> None:
        self._has_single_devices = int(np.bincount(cluster.node_of()).max()) == 1
        present = {point.transport for point in cluster.collectives if point.n_ranks > 1}
        first = next((name for name in _TRANSPORTS if name in present), "")
        self._is_nccl = first == "nccl"
        self._curves: dict[tuple[str, bool], dict[int, list[tuple[float, float]]]]
        self._curves = defaultdict(lambda: defaultdict(list))
        for spans in (False, True):
            for p in sorted(cluster.curves(spans_nodes=spans), key=lambda p: p.n_bytes):
                if p.n_ranks > 1 and p.transport == first:
                    self._curves[p.operation, spans][p.n_ranks].append((p.n_bytes, p.duration_s))

    def seconds(
        self, operation: CollectiveName, n_ranks: int, n_bytes: Floats | float, *, spans_nodes: bool
    ) -> Floats | None:
        """Seconds of one collective, by its bytes, or None if no measured curve applies.

        Curves between nodes do not apply to a group inside one, nor the other way round. The
        executor exchanges parts node by node where nodes have several devices, and over gloo by
        messages that use both directions of the links, which gloo's own reduce-scatter does not.
        """
        curves = self._curves.get((operation, spans_nodes))
        if not curves:
            return None
        is_flat = self._has_single_devices or not spans_nodes
        if operation != "all_reduce" and not (self._is_nccl and is_flat):
            return None
        nearest = min(curves, key=lambda n: (abs(n - n_ranks), n))
        ratio = ((n_ranks - 1) / n_ranks) / ((nearest - 1) / nearest)
        return _read(curves[nearest], np.asarray(n_bytes, dtype=np.float64)) * ratio


def _read(curve: list[tuple[float, float]], n_bytes: Floats) -> Floats:
    """Seconds at each number of bytes; 0 of none."""
    sizes, seconds = np.array(curve).T
    inside = np.exp(np.interp(np.log(np.maximum(n_bytes, 1)), np.log(sizes), np.log(seconds)))
    found: Floats = inside * np.maximum(1.0, n_bytes / sizes[-1]) * (n_bytes > 0)
    return found


@dataclass(frozen=True)
class Collective:
    """One collective: its duration, and the (resource, seconds) that it occupies."""

    duration_s: float
    occupied: tuple[tuple[int, float], ...]

    def scaled(self, share: float) -> Collective:
        occupied = tuple((resource, share * seconds) for resource, seconds in self.occupied)
        return Collective(share * self.duration_s, occupied)


class Network:
    """A cluster's links in matrices, by position of the devices.

    Attributes:
        latency_s, bandwidth: (n_devices, n_devices), from row to column.
        rates: (n_devices, n_devices) bytes/s of one flow on an idle network.
        nic: (n_nodes,) bytes/s each way; infinite if not limiting.
        node_of: (n_devices,) node of each device.
    """

    def __init__(self, cluster: Cluster, all_reduce: AllReduce = "ring") -> None:
        self._is_hierarchical = all_reduce == "hierarchical"
        n = cluster.n_devices
        self.n_devices = n
        self.names = [device.name for device in cluster.devices]
        self.node_names = [node.name for node in cluster.nodes]
        self._nodes = cluster.node_of()
        self.node_of: Ints = np.array(self._nodes, dtype=np.int64)
        self._shares_node = self.node_of[:, None] == self.node_of
        rates = [node.nic_bytes_per_s for node in cluster.nodes]
        limits = [np.inf if rate is None else rate for rate in rates]
        self.nic: Floats = np.array(limits, dtype=np.float64)
        self.latency_s: Floats = np.zeros((n, n))
        self.bandwidth: Floats = np.full((n, n), np.nan)
        position = {name: i for i, name in enumerate(self.names)}
        for link in cluster.links:
            a, b = position[link.source], position[link.target]
            self.latency_s[a, b] = link.latency_s
            self.bandwidth[a, b] = link.bandwidth_bytes_per_s
        self._complete()
        self._curves = Curves(cluster)
        self._cache: dict[tuple[object, ...], Collective] = {}

    @property
    def n_resources(self) -> int:
        return self.n_devices**2 + 2 * len(self.nic) + self.n_devices

    def _complete(self) -> None:
        """Set each link that is not listed from the NICs at its ends.

        Raises:
            ClusterError: neither NIC has a bandwidth.
        """
        np.fill_diagonal(self.bandwidth, np.inf)
        nic, is_missing = self.nic[self.node_of], np.isnan(self.bandwidth)
        rates = np.minimum.outer(nic, nic)
        rates[self._shares_node] = np.inf
        lacking = np.argwhere(is_missing & np.isinf(rates))
        if len(lacking):
            a, b = lacking[0]
            raise ClusterError(
                f"the cluster has no link {self.names[a]} -> {self.names[b]}: add it to the "
                "cluster file, or measure with `./entry.sh links`"
            )
        self.bandwidth[is_missing] = rates[is_missing]
        self.rates = np.minimum(self.bandwidth, rates)

    @property
    def n_in_node(self) -> int:
        """Devices of each node; 1 if nodes have unlike numbers."""
        counts = np.bincount(self.node_of)
        return int(counts[0]) if (counts == counts[0]).all() else 1

    def out_resource(self, node: int) -> int:
        return self.n_devices**2 + node

    def in_resource(self, node: int) -> int:
        return self.n_devices**2 + len(self.nic) + node

    def stream_resource(self, device: int) -> int:
        return self.n_devices**2 + 2 * len(self.nic) + device

    def is_interface(self, resource: int) -> bool:
        """Whether it is a node's NIC."""
        return 0 <= resource - self.n_devices**2 < 2 * len(self.nic)

    def resource_name(self, resource: int) -> str:
        """Name of a resource, for explanations."""
        n, nodes = self.n_devices, len(self.nic)
        if resource < n * n:
            return f"link {self.names[resource // n]} -> {self.names[resource % n]}"
        resource -= n * n
        if resource < 2 * nodes:
            way = "out of" if resource < nodes else "into"
            return f"interface {way} {self.node_names[resource % nodes]}"
        return f"collectives of {self.names[resource - 2 * nodes]}"

    def rate(self, a: int, b: int) -> float:
        """Bytes/s of one flow from a to b on an idle network."""
        return float(self.rates[a, b])

    @property
    def has_slow_link(self) -> list[bool]:
        """Whether the fastest link of each device to other nodes is slower than other devices'."""
        best = np.where(self._shares_node, 0.0, self.rates).max(axis=1)
        found: list[bool] = (best * SLOWER < best.max()).tolist()
        return found

    def promising(self, device_s: Sequence[float]) -> tuple[int, ...]:
        """All devices, those whose links to other nodes are slow last, else the fastest first.

        Args:
            device_s: seconds of the model on each device.
        """
        is_slow = self.has_slow_link
        return tuple(sorted(range(self.n_devices), key=lambda d: (is_slow[d], device_s[d], d)))

    def transfer_s(self, a: int, b: int, n_bytes: float) -> float:
        """Seconds from a to b on an idle network."""
        return 0.0 if a == b else float(self.latency_s[a, b]) + n_bytes / self.rate(a, b)

    def all_reduce(self, group: tuple[int, ...], n_bytes: int) -> Collective:
        """Price one all-reduce of n_bytes on every device of an ascending group.

        Uses the measured curve if there is one; else a ring in the group's order, in which every
        device sends n_bytes / n to the next 2(n-1) times, at the speed of the slowest hop.
        """
        return self.priced("all_reduce", group, n_bytes)

    def priced(self, operation: CollectiveName, group: tuple[int, ...], n_bytes: int) -> Collective:
        """Price any collective of n_bytes in all.

        A reduce-scatter or an all-gather without a measured curve takes half of an all-reduce, or,
        where several nodes have equally many devices of the group, half of rings within nodes and
        of one device of each node.
        """
        key = (operation, group, n_bytes)
        if key not in self._cache:
            self._cache[key] = self._price(operation, group, n_bytes)
        return self._cache[key]

    def beside(self, one: Collective) -> Collective:
        """The same, while the devices run other collectives."""
        first = self.stream_resource(0)
        return replace(one, occupied=tuple(pair for pair in one.occupied if pair[0] < first))

    def replicas(self, group: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The devices of a group that train each of its averaged replicas."""
        return averaged_replicas(group, self._nodes)

    def _price(self, operation: CollectiveName, group: tuple[int, ...], n_bytes: int) -> Collective:
        n, rows = len(group), by_node(group, self._nodes)
        share = 1.0 if operation == "all_reduce" else 0.5  # of the bytes of an all-reduce
        is_even = 1 < len(rows) < n and len({len(row) for row in rows}) == 1
        if is_even and (share < 1 or self._is_hierarchical):
            return self.within_and_between(rows, n_bytes, share, share)
        measured = self._curves.seconds(operation, n, n_bytes, spans_nodes=len(rows) > 1)
        if measured is None and share < 1:
            return self.all_reduce(group, n_bytes).scaled(share)
        hops = list(zip(group, (*group[1:], group[0]), strict=True))
        slowest = max(self.transfer_s(a, b, n_bytes / n) for a, b in hops)
        duration = 2 * (n - 1) * slowest if measured is None else float(measured)
        return self._around(hops, duration, share * 2 * (n - 1) / n * n_bytes)

    def pass_around(
        self, group: tuple[int, ...], n_bytes: int, rounds: Rounds, hidden_s: float
    ) -> Collective:
        """Price messages that each device of a group sends to the next, the last one to the first;
        as many seconds of each round as are hidden by computing beside them are free."""
        hops = list(zip(group, (*group[1:], group[0]), strict=True))
        each_s = max(self.transfer_s(a, b, n_bytes) for a, b in hops)
        duration = rounds.alone * each_s
        duration += sum(max(0.0, n * each_s - hidden_s) for n in rounds.beside if n)
        return self._around(hops, duration, rounds.n_messages * n_bytes)

    def _around(self, hops: Sequence[tuple[int, int]], duration: float, wire: float) -> Collective:
        """Occupy the resources of a ring, over each of whose hops `wire` bytes go."""
        occupied = {self.stream_resource(d): duration for d, _ in hops}
        for a, b in hops:
            occupied[a * self.n_devices + b] = min(duration, wire / float(self.bandwidth[a, b]))
            source, target = int(self.node_of[a]), int(self.node_of[b])
            if source != target:
                out, into = self.out_resource(source), self.in_resource(target)
                occupied[out] = min(duration, occupied.get(out, 0) + wire / float(self.nic[source]))
                occupied[into] = min(
                    duration, occupied.get(into, 0) + wire / float(self.nic[target])
                )
        return Collective(duration, tuple(sorted(occupied.items())))

    def within_and_between(
        self,
        rows: Sequence[Sequence[int]],
        n_bytes: int,
        inner_share: float = 1.0,
        outer_share: float = 1.0,
    ) -> Collective:
        """Price rings within all rows at once, and then between them: device k of each row has a
        ring for its share of the bytes, and a node's rings share its NIC.

        Args:
            rows: devices of each node, or of several; of unlike numbers, the smallest counts.
            inner_share: of an all-reduce, that the rings within take; 0.5: a reduce-scatter.
            outer_share: of the bytes, that go between the rows.
        """
        several = [tuple(row) for row in rows if len(row) > 1 and inner_share > 0]
        inside = [self.all_reduce(row, n_bytes).scaled(inner_share) for row in several]
        columns = list(zip(*rows, strict=False)) if outer_share > 0 and len(rows) > 1 else []
        share = max(1, int(n_bytes * outer_share) // len(rows[0]))
        between = [self.all_reduce(column, share) for column in columns]
        occupied: dict[int, float] = defaultdict(float)
        for ring in (*inside, *between):
            for resource, seconds in ring.occupied:
                occupied[resource] += seconds
        nodes = {int(self.node_of[row[0]]) for row in rows} if columns else ()
        nics = [r(k) for k in nodes for r in (self.out_resource, self.in_resource)]
        crossing = max(
            [one.duration_s for one in between] + [occupied.get(nic, 0.0) for nic in nics],
            default=0.0,
        )
        duration = max((one.duration_s for one in inside), default=0.0) + crossing
        for row in rows:
            occupied.update((self.stream_resource(device), duration) for device in row)
        shared = ((resource, min(s, duration)) for resource, s in sorted(occupied.items()))
        return Collective(duration, tuple(shared))
