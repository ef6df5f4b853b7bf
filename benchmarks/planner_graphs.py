"""Generate PipeDream profiles with many branches, as large as the largest published ones."""

from __future__ import annotations

import random
from collections.abc import Callable


class _Writer:
    """Builds the nodes and edges of one graph.txt."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self._nodes: list[str] = []
        self._edges: list[str] = []

    @property
    def n_nodes(self) -> int:
        return len(self._nodes)

    def add(self, producers: list[int]) -> int:
        """Append a node with random times and sizes; returns its number."""
        number, rng = len(self._nodes), self.rng
        forward_ms = rng.uniform(0.05, 3)
        self._nodes.append(
            f"node{number} -- Conv2d({number}) -- forward_compute_time={forward_ms:.3f}, "
            f"backward_compute_time={2 * forward_ms:.3f}, "
            f"activation_size={rng.choice([1e5, 1e6, 5e6, 2e7]):.3f}, "
            f"parameter_size={rng.choice([0, 0, 1e4, 1e6, 1e7]):.3f}"
        )
        self._edges += [f"\tnode{p} -- node{number}" for p in dict.fromkeys(producers)]
        return number

    def text(self) -> str:
        return "\n".join([*self._nodes, *self._edges]) + "\n"


def modules(n_nodes: int, width: int, *, skips: bool, seed: int) -> str:
    """Modules with up to `width` branches, like Inception, or with skips like NASNet."""
    graph = _Writer(seed)
    rng = graph.rng
    heads = [graph.add([])]
    while graph.n_nodes < n_nodes - 1:
        ends = []
        for _ in range(rng.randint(2, width)):
            end = rng.choice(heads)
            for _ in range(rng.randint(1, 5)):
                extra = [rng.choice(heads)] if skips and rng.random() < 0.2 else []
                end = graph.add([end, *extra])
            ends.append(end)
        middle = len(ends) // 2
        groups = [ends[: middle + 1], ends[middle:]] if skips and rng.random() < 0.3 else [ends]
        heads = [graph.add(group) for group in groups]
    graph.add(heads)
    return graph.text()


def towers(n_nodes: int, n_branches: int, *, seed: int) -> str:
    """Parallel branches from the first node to the last one."""
    graph = _Writer(seed)
    first = graph.add([])
    ends = []
    for _ in range(n_branches):
        end = first
        for _ in range((n_nodes - 2) // n_branches):
            end = graph.add([end])
        ends.append(end)
    graph.add(ends)
    return graph.text()


def tangle(n_nodes: int, reach: int, *, seed: int) -> str:
    """A graph in which every node reads up to three of the previous `reach` nodes."""
    graph = _Writer(seed)
    graph.add([])
    while graph.n_nodes < n_nodes:
        low, high = max(0, graph.n_nodes - reach), graph.n_nodes
        graph.add([graph.rng.randrange(low, high) for _ in range(graph.rng.randint(1, 3))])
    return graph.text()


GRAPHS: dict[str, Callable[[], str]] = {
    "modules of 8, 1200 nodes": lambda: modules(1200, 8, skips=False, seed=1),
    "modules of 30, skips, 1200": lambda: modules(1200, 30, skips=True, seed=4),
    "4 towers, 1200 nodes": lambda: towers(1200, 4, seed=6),
    "40 towers, 1200 nodes": lambda: towers(1200, 40, seed=5),
    "tangle, 1200 nodes": lambda: tangle(1200, 60, seed=9),
}
