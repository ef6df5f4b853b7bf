"""Read graphs of operators for placement, as msr-fiddle/dnn-partitioning publishes them (JSON).

    {"maxFPGAs": 3, "maxSizePerFPGA": 1.7e10, "nodes": [{"id": 0, "fpgaLatency": 1.5, "size": 64,
     "isBackwardNode": false, "colorClass": 16}],
     "edges": [{"sourceId": 0, "destId": 1, "cost": 2}]}

Nodes of one color class must share a device: they become one operator. Its order follows the edges
of the forward nodes; a class of backward nodes only is ordered by the reversed edges of its nodes,
and classes in a cycle become one. Times are read as milliseconds.
"""

from __future__ import annotations

import math
from collections import defaultdict
from graphlib import TopologicalSorter
from pathlib import Path

import msgspec
import numpy as np
from scipy.sparse import csr_array
from scipy.sparse.csgraph import connected_components

from harness.plan.published.maxload.problem import LoadProblem, Value


class _Node(msgspec.Struct):
    id: int
    fpgaLatency: float
    isBackwardNode: bool | int = False
    colorClass: int | None = None
    size: float = 0.0
    name: str = ""


class _Edge(msgspec.Struct):
    sourceId: int
    destId: int
    cost: float


class _File(msgspec.Struct):
    maxFPGAs: int
    maxSizePerFPGA: float
    nodes: list[_Node]
    edges: list[_Edge]


def read_problem(path: Path, n_devices: int | None = None) -> LoadProblem:
    """The file's problem on so many accelerators, by default its own number, without CPUs."""
    file = msgspec.json.decode(path.read_bytes(), type=_File)
    classes: dict[object, int] = {}
    class_of: dict[int, int] = {}
    for node in file.nodes:
        key = ("node", node.id) if node.colorClass is None else node.colorClass
        class_of[node.id] = classes.setdefault(key, len(classes))
    group_of, producers = _ordered(_order_of_classes(file, class_of), len(classes))
    at = {node: group_of[each] for node, each in class_of.items()}
    own: list[list[_Node]] = [[] for _ in producers]
    for node in file.nodes:
        own[at[node.id]].append(node)
    readers: dict[int, set[int]] = defaultdict(set)
    cost: dict[int, float] = {}
    for edge in file.edges:
        readers[edge.sourceId].add(at[edge.destId])
        cost[edge.sourceId] = edge.cost
    return LoadProblem(
        names=[nodes[0].name or str(nodes[0].id) for nodes in own],
        seconds=[math.fsum(node.fpgaLatency for node in nodes) / 1e3 for nodes in own],
        n_bytes=[math.fsum(node.size for node in nodes) for nodes in own],
        producers=producers,
        values=[
            Value(cost[source] / 1e3, tuple(sorted({at[source], *found})))
            for source, found in readers.items()
        ],
        n_devices=file.maxFPGAs if n_devices is None else n_devices,
        memory_bytes=file.maxSizePerFPGA,
    )


def _order_of_classes(file: _File, class_of: dict[int, int]) -> set[tuple[int, int]]:
    """Edges from a class to those that follow it."""
    is_backward = {node.id: bool(node.isBackwardNode) for node in file.nodes}
    forward = {class_of[node.id] for node in file.nodes if not node.isBackwardNode}
    found = set()
    for edge in file.edges:
        source, target = class_of[edge.sourceId], class_of[edge.destId]
        if not is_backward[edge.sourceId] and not is_backward[edge.destId]:
            found.add((source, target))
        elif is_backward[edge.sourceId] and {source, target} - forward:
            found.add((target, source))
    return {(a, b) for a, b in found if a != b}


def _ordered(edges: set[tuple[int, int]], n: int) -> tuple[list[int], list[list[int]]]:
    """Topological order of the strongly connected components: the position of each node's, and
    the positions of each component's producers."""
    rows, columns = zip(*sorted(edges), strict=True) if edges else ((), ())
    adjacency = csr_array((np.ones(len(rows), dtype=np.int8), (rows, columns)), shape=(n, n))
    n_parts, part_of = connected_components(adjacency, connection="strong")
    sources: dict[int, set[int]] = {part: set() for part in range(n_parts)}
    for a, b in sorted(edges):
        if part_of[a] != part_of[b]:
            sources[int(part_of[b])].add(int(part_of[a]))
    position = {part: k for k, part in enumerate(TopologicalSorter(sources).static_order())}
    producers = [sorted(position[p] for p in sources[part]) for part in position]
    return [position[int(part)] for part in part_of], producers
