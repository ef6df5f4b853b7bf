"""Sets of machines that are worth pricing; parts of a cluster, and a cluster with one exchange.

Nodes with equal devices and equal links are interchangeable, so of each class only the number that
is used matters: five unlike nodes have 31 sets, 64 equal nodes have 64. Where the sets are too many
the numbers are thinned to powers of two, and then to the fastest first.
"""

import itertools
import math
from collections.abc import Iterator, Sequence

import msgspec

from harness.domain.cluster import ALIKE, Cluster, Device, Link, are_near
from harness.plan.simulate.network import Network

# Payload of TCP over Ethernet with frames of 1,500 B, as a share of the nominal rate.
TCP_SHARE = 0.94
# A rate within this factor of a link's is that link's own kind.
_FASTER = 1.5
_ETHERNET_BITS_PER_S = (1e9, 10e9, 25e9, 50e9, 100e9, 200e9, 400e9)


def part_of(cluster: Cluster, devices: Sequence[int]) -> Cluster:
    """The cluster of some devices, by position, with the links among them and its curves."""
    if len(set(devices)) == cluster.n_devices:
        return cluster
    return _with_curves(cluster, cluster.part(devices))


def with_rate(cluster: Cluster, node: int | None, bytes_per_s: float) -> Cluster:
    """The cluster with another network interface in one node, or with faster ones in all (None).

    A link between two nodes carries what the slower end does, so the other end's fastest link
    still limits.
    """
    at = {d.name: k for k, one in enumerate(cluster.nodes) for d in one.devices}
    limits = [
        bytes_per_s if node in (None, k) else _limit(cluster, k) for k in range(len(cluster.nodes))
    ]

    def changed(link: Link) -> Link:
        ends = at[link.source], at[link.target]
        if ends[0] == ends[1] or not (node is None or node in ends):
            return link
        rate = max(link.bandwidth_bytes_per_s, min(limits[end] for end in ends))
        return msgspec.structs.replace(link, bandwidth_bytes_per_s=rate)

    nodes = list(cluster.nodes)
    for k in range(len(nodes)) if node is None else (node,):
        nic = nodes[k].nic_bytes_per_s
        if node is None or nic is not None:
            nic = max(bytes_per_s, nic or 0.0)
        nodes[k] = msgspec.structs.replace(nodes[k], nic_bytes_per_s=nic)
    links = [changed(link) for link in cluster.links]
    return _with_curves(cluster, msgspec.structs.replace(cluster, nodes=nodes, links=links))


def with_device(cluster: Cluster, node: int, model: Device) -> Cluster:
    """The cluster with all devices of one node exchanged for another's kind."""
    nodes = list(cluster.nodes)
    devices = [
        msgspec.structs.replace(model, name=device.name, host_s_per_byte=device.host_s_per_byte)
        for device in nodes[node].devices
    ]
    nodes[node] = msgspec.structs.replace(nodes[node], devices=devices)
    return _with_curves(cluster, msgspec.structs.replace(cluster, nodes=nodes))


def node_rate(cluster: Cluster, node: int) -> float | None:
    """Bytes/s that a node's fastest link to another node carries; None for a single node."""
    network = Network(cluster)
    found = [
        network.rate(a, b)
        for a in range(network.n_devices)
        for b in range(network.n_devices)
        if (network.node_of[a] == node) != (network.node_of[b] == node)
    ]
    return max(found, default=None)


def _limit(cluster: Cluster, node: int) -> float:
    """The most that a node is known to carry; infinite where nothing is known."""
    nic = cluster.nodes[node].nic_bytes_per_s
    if len(cluster.nodes) > 2:
        return max(node_rate(cluster, node) or 0.0, nic or 0.0)
    return math.inf if nic is None else nic


def next_ethernet(bytes_per_s: float) -> tuple[str, float] | None:
    """The name and payload rate of the next faster Ethernet that is usual; None beyond all."""
    for bits in _ETHERNET_BITS_PER_S:
        rate = bits / 8 * TCP_SHARE
        if rate > _FASTER * bytes_per_s:
            return f"{bits / 1e9:g} Gbit/s", rate
    return None


def _ring_s(network: Network, n_ranks: int, n_bytes: int) -> float:
    """Seconds of a ring over the first devices of a network without measured curves."""
    group = tuple(range(min(n_ranks, network.n_devices)))
    return network.all_reduce(group, n_bytes).duration_s


def _with_curves(old: Cluster, new: Cluster) -> Cluster:
    """Carry measured collectives over: measured time x ring on the new links / on the old ones.

    Curves inside a node stay as they are between several.
    """
    is_one = len(new.nodes) == 1
    points = [p for p in old.curves(spans_nodes=not is_one) if p.n_ranks > 1]
    inside = msgspec.structs.replace(new, collectives=old.curves(spans_nodes=False))
    kept = [] if is_one else inside.curves(spans_nodes=False)
    if new.n_devices == 1 or not points:
        return msgspec.structs.replace(new, collectives=kept)
    before, after = (Network(msgspec.structs.replace(one, collectives=[])) for one in (old, new))
    most: dict[str, int] = {}
    for point in points:
        most[point.operation] = max(point.n_ranks, most.get(point.operation, 0))
    n, moved = new.n_devices, []
    for point in points:
        if point.n_ranks == most[point.operation]:
            old_s = _ring_s(before, point.n_ranks, point.n_bytes)
            ratio = _ring_s(after, n, point.n_bytes) / old_s
            seconds = point.duration_s * ratio
            moved.append(msgspec.structs.replace(point, n_ranks=n, duration_s=seconds))
    return msgspec.structs.replace(new, collectives=[*kept, *moved])


MOST_SETS = 40


def node_classes(cluster: Cluster) -> list[list[int]]:
    """Nodes by number, grouped into classes of interchangeable ones."""
    network = Network(cluster)
    classes: list[list[int]] = []
    for node in range(len(cluster.nodes)):
        for known in classes:
            if _are_alike(cluster, network, known[0], node):
                known.append(node)
                break
        else:
            classes.append([node])
    return classes


def _are_alike(cluster: Cluster, network: Network, a: int, b: int) -> bool:
    own, other = cluster.nodes[a].devices, cluster.nodes[b].devices
    return (
        len(own) == len(other)
        and all(map(_is_alike, own, other))
        and all(map(are_near, _rates(network, a, b), _rates(network, b, a)))
    )


def _is_alike(a: Device, b: Device) -> bool:
    return (
        a.kind == b.kind and are_near(a.speed, b.speed) and are_near(a.memory_bytes, b.memory_bytes)
    )


def _rates(network: Network, node: int, without: int) -> list[float]:
    """The slowest rate inside a node, and those of its first device to and from each third node's
    first device."""
    first = {int(n): k for k, n in reversed(list(enumerate(network.node_of)))}
    others = [k for n, k in sorted(first.items()) if n not in (node, without)]
    own, is_own = first[node], network.node_of == node
    between = [rate for k in others for rate in (network.rate(own, k), network.rate(k, own))]
    return [float(network.rates[is_own][:, is_own].min()), *between]


def devices_by_speed(cluster: Cluster, device_s: Sequence[float]) -> list[list[int]]:
    """The devices of each node by position, fast ones first; those that are alike keep their order.

    Args:
        device_s: of each device for the whole batch.
    """
    nodes: list[list[int]] = [[] for _ in cluster.nodes]
    for k, node in enumerate(cluster.node_of()):
        nodes[node].append(k)
    alike_s = [ALIKE * min(device_s[k] for k in own) for own in nodes]
    return [
        [k for _, k in sorted((device_s[k] // alike, k) for k in own)]
        for own, alike in zip(nodes, alike_s, strict=True)
    ]


def sets_of(cluster: Cluster, device_s: Sequence[float]) -> list[tuple[int, ...]]:
    """Sets of devices by position: one device of each kind in each class, then sets of whole nodes;
    fast ones first.

    Args:
        device_s: of each device for the whole batch.
    """
    places = devices_by_speed(cluster, device_s)
    classes = sorted(node_classes(cluster), key=lambda nodes: device_s[places[nodes[0]][0]])
    devices, firsts = cluster.devices, [places[nodes[0]] for nodes in classes]
    found: list[tuple[int, ...]] = [
        (k,)
        for own in firsts
        for n, k in enumerate(own)
        if not any(_is_alike(devices[k], devices[other]) for other in own[:n])
    ]
    for own in firsts:
        found += [tuple(sorted(own[:n])) for n in _powers(len(own)) if n < len(own)]
    for nodes in _node_sets(classes):
        found.append(tuple(sorted(k for node in nodes for k in places[node])))
    return list(dict.fromkeys(found))


def _powers(n: int) -> list[int]:
    return [2**k for k in range(n.bit_length()) if 2**k <= n]


def _node_sets(classes: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Sets of nodes, small ones first."""
    all_counts = [range(len(nodes) + 1) for nodes in classes]
    few_counts = [sorted({0, *_powers(len(nodes)), len(nodes)}) for nodes in classes]
    for counts in (all_counts, few_counts):
        if math.prod(map(len, counts)) - 1 <= MOST_SETS:
            for numbers in sorted(itertools.product(*counts), key=sum)[1:]:
                own = zip(numbers, classes, strict=True)
                yield tuple(node for n, nodes in own for node in nodes[:n])
            return
    order = [node for nodes in classes for node in nodes]
    yield from ((nodes[0],) for nodes in classes[:MOST_SETS])
    for n in sorted({*_powers(len(order)), len(order)}):
        yield tuple(order[:n])
