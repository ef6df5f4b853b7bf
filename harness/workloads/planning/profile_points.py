"""The list of measurements that a search needs: each operator at each shape of its shards.

The simulator looks up shapes from cuts of the batch (data parallelism, microbatches) and cuts of
the weights (features of linear, convolution and embedding; contraction of linear; heads of
attention). Operators with equal signatures share a measurement.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from harness.domain.graph import Graph, Operator
from harness.domain.partition import cut_dim
from harness.domain.sharding import full_shape, has_tasks, is_partial, output_sizes, weight_dims

# Shards of other kinds take time in proportion to their elements, which cuts by samples measure.
_CUT_BY_WEIGHTS = ("linear", "conv2d", "embedding", "attention")


@dataclass(frozen=True, kw_only=True)
class Point:
    """One measurement.

    Attributes:
        operator: the name of one operator with this signature.
        key: its `profile_key`.
        shape: shape of the shard's output, as the simulator looks it up.
        samples: number of samples that the model is fed.
        dim, size: the dim along which the weights are cut, and its size in the shard; empty if
            the weights are whole.
    """

    operator: str
    key: str
    shape: dict[str, int]
    samples: int
    dim: str = ""
    size: int = 0

    @property
    def identity(self) -> tuple[object, ...]:
        return self.key, tuple(self.shape.items())


def shard_counts(n_ranks: int) -> list[int]:
    """1 to 4, the number of ranks, and powers of two up to it (at least 8)."""
    powers = [2**k for k in range(12) if 2**k <= max(8, n_ranks)]
    return sorted({1, 2, 3, 4, n_ranks, *powers})


def part_sizes(size: int, counts: Sequence[int]) -> list[int]:
    """Distinct sizes of the parts of a dim that is cut into each of `counts`, largest first."""
    found = {b - a for n in counts if n <= size for a, b in cut_dim(size, n)}
    return sorted(found, reverse=True)


def _shard_shapes(operator: Operator, counts: Sequence[int]) -> Iterator[tuple[str, int]]:
    """Yield (dim, size) of each proper part of the weights."""
    if operator.kind not in _CUT_BY_WEIGHTS:
        return
    full = full_shape(operator, batch=1, graph_batch=None)
    for dim in weight_dims(operator):
        size = full.get(dim, 0)
        yield from ((dim, part) for part in part_sizes(size, counts) if part < size)


def _points_of(
    operator: Operator, graph: Graph, samples: int, counts: Sequence[int]
) -> Iterator[Point]:
    full = full_shape(operator, batch=samples, graph_batch=graph.batch)
    key = operator.profile_key
    shown = output_sizes(operator, full)
    yield Point(operator=operator.name, key=key, shape=shown, samples=samples)
    if samples == graph.batch:
        for dim, size in _shard_shapes(operator, counts):
            whole = full if is_partial(operator, dim) else shown
            shape = {**whole, dim: size}
            yield Point(
                operator=operator.name, key=key, shape=shape, samples=samples, dim=dim, size=size
            )


def points_of(
    graph: Graph, batch_counts: Sequence[int], weight_counts: Sequence[int]
) -> list[Point]:
    """List every distinct measurement, large batches first.

    Args:
        batch_counts: numbers of parts that the batch is cut into; 1 is always included.
        weight_counts: numbers of parts that weights are cut into.
    """
    assert graph.batch is not None
    found: dict[object, Point] = {}
    for samples in part_sizes(graph.batch, [1, *batch_counts]):
        for operator in filter(has_tasks, graph.operators):
            for point in _points_of(operator, graph, samples, weight_counts):
                found.setdefault(point.identity, point)
    return list(found.values())
