"""Which sets of machines are worth pricing.

Nodes with equal devices and equal links are interchangeable, so of each class only the number that
is used matters: five unlike nodes have 31 sets, 64 equal nodes have 64. Where the sets are too many
the numbers are thinned to powers of two, and then to the fastest first.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

from harness.domain.cluster import Cluster, Device
from harness.plan.simulate.network import Network

MOST_SETS = 40
# Measured rates and speeds of equal machines differ by less.
_ALIKE = 1.1


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
        and all(
            _is_near(x, y)
            for x, y in zip(_rates(network, a, b), _rates(network, b, a), strict=True)
        )
    )


def _is_alike(a: Device, b: Device) -> bool:
    return (
        a.kind == b.kind
        and _is_near(a.speed, b.speed)
        and _is_near(float(a.memory_bytes), float(b.memory_bytes))
    )


def _is_near(a: float, b: float) -> bool:
    return a == b or max(a, b) <= _ALIKE * min(a, b)


def _rates(network: Network, node: int, without: int) -> list[float]:
    """Rates of a node's first device to and from each third node's first device."""
    first = {int(n): k for k, n in reversed(list(enumerate(network.node_of)))}
    others = [k for n, k in sorted(first.items()) if n not in (node, without)]
    own = first[node]
    return [rate for k in others for rate in (network.rate(own, k), network.rate(k, own))]


def sets_of(cluster: Cluster, node_seconds: Sequence[float]) -> list[tuple[int, ...]]:
    """Sets of devices by position: one device of each class, then sets of whole nodes.

    Args:
        node_seconds: of one device of each node for the whole batch; fast nodes are kept first.
    """
    places = _places(cluster)
    classes = sorted(node_classes(cluster), key=lambda nodes: node_seconds[nodes[0]])
    found: list[tuple[int, ...]] = [(places[nodes[0]][0],) for nodes in classes]
    found += [tuple(places[nodes[0]][:n]) for nodes in classes for n in _inside(places[nodes[0]])]
    for nodes in _node_sets(classes):
        found.append(tuple(sorted(k for node in nodes for k in places[node])))
    return list(dict.fromkeys(found))


def _places(cluster: Cluster) -> list[list[int]]:
    count = itertools.count()
    return [[next(count) for _ in node.devices] for node in cluster.nodes]


def _inside(places: Sequence[int]) -> list[int]:
    return [n for n in _powers(len(places)) if n < len(places)]


def _powers(n: int) -> list[int]:
    return [2**k for k in range(n.bit_length()) if 2**k <= n]


def _node_sets(classes: Sequence[Sequence[int]]) -> Iterator[tuple[int, ...]]:
    """Sets of nodes, small ones first."""
    all_counts = [range(len(nodes) + 1) for nodes in classes]
    few_counts = [sorted({0, *_powers(len(nodes)), len(nodes)}) for nodes in classes]
    for counts in (all_counts, few_counts):
        if math.prod(map(len, counts)) - 1 <= MOST_SETS:
            chosen = sorted(itertools.product(*counts), key=sum)
            for numbers in chosen[1:]:
                yield tuple(
                    node for n, nodes in zip(numbers, classes, strict=True) for node in nodes[:n]
                )
            return
    order = [node for nodes in classes for node in nodes]
    yield from ((nodes[0],) for nodes in classes[:MOST_SETS])
    for n in sorted({*_powers(len(order)), len(order)}):
        yield tuple(order[:n])
