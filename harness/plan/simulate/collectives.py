"""Measured curves of all-reduce, interpolated and extrapolated.

Between two measured sizes the logarithm of time is linear in the logarithm of size. Below the
smallest size time is constant (latency), above the largest it grows in proportion (bandwidth). For
a number of ranks that was not measured, the curve of the nearest number is scaled by the bytes that
a ring moves per rank, 2(n-1)/n.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict

from harness.domain.cluster import Cluster

_TRANSPORTS = ("nccl", "gloo", "mpi")


class Curves:
    """The all-reduce curves of a cluster, of the first transport that has any."""

    def __init__(self, cluster: Cluster) -> None:
        self._n_nodes = len(cluster.nodes)
        points = [p for p in cluster.collectives if p.operation == "all_reduce" and p.n_ranks > 1]
        present = [t for t in _TRANSPORTS if any(p.transport == t for p in points)]
        self._curves: dict[int, list[tuple[int, float]]] = defaultdict(list)
        for point in points:
            if [point.transport] == present[:1] and point.n_bytes > 0 and point.duration_s > 0:
                self._curves[point.n_ranks].append((point.n_bytes, point.duration_s))
        for curve in self._curves.values():
            curve.sort()

    def all_reduce_s(self, n_ranks: int, n_bytes: int, *, spans_nodes: bool) -> float | None:
        """Seconds of one all-reduce, or None if no measured curve applies.

        Curves of a cluster of several nodes do not apply to a group inside one node.
        """
        if not self._curves or (self._n_nodes > 1 and not spans_nodes):
            return None
        nearest = min(self._curves, key=lambda n: (abs(n - n_ranks), n))
        ratio = ((n_ranks - 1) / n_ranks) / ((nearest - 1) / nearest)
        return _read(self._curves[nearest], n_bytes) * ratio


def _read(curve: list[tuple[int, float]], n_bytes: int) -> float:
    k = bisect.bisect_left(curve, (n_bytes, 0.0))
    if k == 0:
        return curve[0][1]
    if k == len(curve):
        return curve[-1][1] * n_bytes / curve[-1][0]
    (x0, y0), (x1, y1) = curve[k - 1], curve[k]
    share = math.log(n_bytes / x0) / math.log(x1 / x0)
    return math.exp(math.log(y0) + share * math.log(y1 / y0))
