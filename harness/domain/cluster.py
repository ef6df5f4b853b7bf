"""A cluster: nodes, their devices, the links between devices, measured collective curves.

The JSON form (`to_json`, `from_json`) is written by the links workload, read by planning, and
may be written by hand; `Cluster.uniform` builds the common case from four numbers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from harness.domain.files import Count, FileKind, JsonFile, Number
from harness.errors import ClusterError
from harness.inputs import MOST_S, is_amount, is_positive

SCHEMA = "harness-cluster"
SCHEMA_VERSION = 2
CLUSTER_FILE = "cluster.json"
# Measured rates and speeds of equal machines differ by less.
ALIKE = 1.1
ANY_KIND = "device"  # of devices whose model nobody says

_MOST_LISTED = 512  # devices
_MOST_LATENCY_S = 10.0  # of a link; more is a number of milliseconds or microseconds


class Device(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU, or the CPU share of one rank.

    Attributes:
        name: unique in the cluster, such as `node0:0`.
        kind: hardware model, such as `NVIDIA GeForce RTX 3070`; the key of its profile.
        memory_bytes: memory that a training run may use.
        speed: relative to the profile of its kind: at 0.5 each operator takes twice as long.
        flops_per_s: measured matmul rate by dtype, such as fp32; empty when not measured.
        host_s_per_byte: communication overhead, in seconds of computation for each byte sent or
            received, because gloo copies and runs TCP on the same cores, and NCCL's kernels run on
            the same GPU. 0 when not measured.
    """

    name: str
    kind: str
    memory_bytes: Count
    speed: float = 1.0
    flops_per_s: dict[str, Number] = {}
    host_s_per_byte: float = 0.0


class Node(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A host.

    Attributes:
        nic_bytes_per_s: bandwidth of its network interface, each way; None when not limiting.
    """

    name: str
    devices: list[Device]
    nic_bytes_per_s: float | None = None


class Link(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One direction between two devices: a transfer takes latency_s + n_bytes / bandwidth."""

    source: str
    target: str
    latency_s: float
    bandwidth_bytes_per_s: float


class CollectivePoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One measured point of a collective's curve: median of the maximum over ranks, in seconds.

    Attributes:
        operation: its name, as `links --operations` has it.
        transport: gloo, nccl or mpi.
        n_bytes: nccl-tests' S: the whole n-rank buffer for all_gather and reduce_scatter.
    """

    operation: str
    transport: str
    n_ranks: Count
    n_bytes: Count
    duration_s: Number


class Cluster(JsonFile, frozen=True, kw_only=True):
    """Nodes, links of every ordered pair of devices, and collective curves (may be empty)."""

    FILE = FileKind(
        "cluster file",
        SCHEMA,
        SCHEMA_VERSION,
        ClusterError,
        "measure it again with `./entry.sh links`",
    )

    nodes: list[Node]
    links: list[Link] = msgspec.field(default_factory=list)
    collectives: list[CollectivePoint] = msgspec.field(default_factory=list)
    schema: str = SCHEMA
    version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        names = [device.name for device in self.devices]
        if not names:
            raise ClusterError("the cluster has no device: name at least one node with one device")
        for kind, own in (("device", names), ("node", [node.name for node in self.nodes])):
            name, n = max(Counter(own).items(), key=lambda one: one[1])
            if n > 1:
                raise ClusterError(f"{n} {kind}s are named {name!r}: give each its own name")
        for node in self.nodes:
            if not node.devices:
                raise ClusterError(f"node {node.name} has no device: name one, or leave it out")
            if node.nic_bytes_per_s is not None and not is_positive(node.nic_bytes_per_s):
                raise ClusterError(
                    f"node {node.name} has nic_bytes_per_s {node.nic_bytes_per_s}: it must be "
                    "above 0, at most 1e30, or null where the interface does not limit"
                )
        for device in self.devices:
            _check_device(device)
        _check_links(self.links, names)
        for point in self.collectives:
            if point.n_ranks < 1 or point.n_bytes < 1 or not is_positive(point.duration_s, MOST_S):
                raise ClusterError(
                    f"{point.operation} of {point.n_ranks} ranks and {point.n_bytes} B takes "
                    f"{point.duration_s} s: each must be above 0"
                )

    @property
    def devices(self) -> list[Device]:
        """All devices, node by node: the position is the rank."""
        return [device for node in self.nodes for device in node.devices]

    @property
    def n_devices(self) -> int:
        return sum(len(node.devices) for node in self.nodes)

    def node_of(self) -> list[int]:
        """Index of the node that holds each device, by the device's position."""
        return [i for i, node in enumerate(self.nodes) for _ in node.devices]

    def curves(self, *, spans_nodes: bool) -> list[CollectivePoint]:
        """The collectives between nodes, or inside one: those of no more ranks than a node has
        devices, and all of a single node."""
        n_each = max(len(node.devices) for node in self.nodes)
        return [
            point
            for point in self.collectives
            if (len(self.nodes) > 1 and point.n_ranks > n_each) == spans_nodes
        ]

    def part(self, devices: Iterable[int]) -> Cluster:
        """Some of the devices, by position, with the links among them."""
        kept, place, nodes = set(devices), itertools.count(), []
        for node in self.nodes:
            own = [device for device in node.devices if next(place) in kept]
            if own:
                nodes.append(msgspec.structs.replace(node, devices=own))
        names = {device.name for node in nodes for device in node.devices}
        links = [link for link in self.links if {link.source, link.target} <= names]
        return msgspec.structs.replace(self, nodes=nodes, links=links)

    def scaled(self, factors: Sequence[float]) -> Cluster:
        """The cluster with the speed of each device multiplied; its communication overhead, which
        is computing, too."""
        return self.with_devices(
            msgspec.structs.replace(
                device, speed=device.speed * factor, host_s_per_byte=device.host_s_per_byte / factor
            )
            for device, factor in zip(self.devices, factors, strict=True)
        )

    def with_devices(self, devices: Iterable[Device]) -> Cluster:
        """The cluster with as many other devices in the places of its own."""
        left, replace = iter(devices), msgspec.structs.replace
        nodes = [replace(node, devices=[next(left) for _ in node.devices]) for node in self.nodes]
        return replace(self, nodes=nodes)

    @classmethod
    def uniform(
        cls,
        n_nodes: int,
        n_devices: int,
        *,
        inside_bytes_per_s: float,
        between_bytes_per_s: float | None = None,
        memory_bytes: int,
        kind: str = ANY_KIND,
        latency_s: float = 0.0,
    ) -> Cluster:
        """Build equal nodes of equal devices; `between_bytes_per_s` defaults to `inside_...`.

        Of many devices without latency, links between nodes are left to the NICs: n squared links
        of 4096 devices would take gigabytes.
        """
        lists_all = n_nodes * n_devices <= _MOST_LISTED or latency_s > 0
        between = inside_bytes_per_s if between_bytes_per_s is None else between_bytes_per_s
        nodes = [
            Node(
                name=f"node{i}",
                devices=[
                    Device(name=f"node{i}:{j}", kind=kind, memory_bytes=memory_bytes)
                    for j in range(n_devices)
                ],
                nic_bytes_per_s=between if n_nodes > 1 else None,
            )
            for i in range(n_nodes)
        ]
        places = [(i, d.name) for i, node in enumerate(nodes) for d in node.devices]
        own_places = [[(i, d.name) for d in node.devices] for i, node in enumerate(nodes)]
        links = [
            Link(
                source=a,
                target=b,
                latency_s=latency_s,
                bandwidth_bytes_per_s=inside_bytes_per_s if i == j else between,
            )
            for i, a in places
            for j, b in (places if lists_all else own_places[i])
            if a != b
        ]
        return cls(nodes=nodes, links=links)


def are_near(a: float, b: float) -> bool:
    """Whether two measured rates or speeds may be those of equal machines."""
    return a == b or max(a, b) <= ALIKE * min(a, b)


def _check_device(device: Device) -> None:
    """Refuse memory or speed that is not positive, and a negative communication overhead."""
    if device.memory_bytes <= 0 or not is_positive(device.speed):
        raise ClusterError(
            f"device {device.name} has memory {device.memory_bytes} B and speed "
            f"{device.speed}: both must be above 0, and speed at most 1e30"
        )
    if not is_amount(device.host_s_per_byte, MOST_S):
        raise ClusterError(
            f"device {device.name} has host_s_per_byte {device.host_s_per_byte}: it must be >= 0, "
            "and at most 1e10"
        )
    for dtype, rate in device.flops_per_s.items():
        if not is_positive(rate):
            raise ClusterError(
                f"device {device.name} has flops_per_s {rate} of {dtype}: it must be above 0, or "
                "left out"
            )


def _check_links(links: list[Link], names: list[str]) -> None:
    """Refuse links of unknown devices or of one, links without bandwidth, and duplicates."""
    known, seen = set(names), set()
    for link in links:
        ends = link.source, link.target
        if not known.issuperset(ends):
            raise ClusterError(
                f"link {link.source} -> {link.target} names a device that is not in the "
                f"cluster ({', '.join(names[:8])}{' ...' if len(names) > 8 else ''})"
            )
        if link.source == link.target:
            raise ClusterError(
                f"link {link.source} -> {link.target} joins a device with itself: name two devices"
            )
        if ends in seen:
            raise ClusterError(
                f"link {link.source} -> {link.target} is there twice: keep one; a link has one way"
            )
        seen.add(ends)
        if not is_positive(link.bandwidth_bytes_per_s) or not is_amount(
            link.latency_s, _MOST_LATENCY_S
        ):
            raise ClusterError(
                f"link {link.source} -> {link.target} has latency {link.latency_s} s and "
                f"bandwidth {link.bandwidth_bytes_per_s} B/s: latency must be >= 0 and "
                f"bandwidth > 0, at most {_MOST_LATENCY_S:g} s and 1e30 B/s"
            )
