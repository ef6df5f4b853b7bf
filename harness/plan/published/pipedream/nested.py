"""Two levels and more: the best time of one group of workers for every pair of cuts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from harness.plan.published.pipedream.cuts import Cuts, Floats
from harness.plan.published.pipedream.dynamic import StageTimes, Surroundings, Workers


def product(left: Floats, right: Floats, into: Floats) -> None:
    """Lower `into`[i, j] to the least max(left[i, k], right[k, j]) over i < k < j."""
    n = len(left)
    columns = np.ascontiguousarray(left.T)
    buffer = np.empty(n * n // 4 + n)
    for k in range(1, n - 1):
        width = n - k - 1
        both = buffer[: k * width].reshape(k, width)
        np.maximum(columns[k, :k, None], right[k, None, k + 1 :], out=both)
        target = into[:k, k + 1 :]
        np.minimum(target, both, out=target)


def all_pairs(cuts: Cuts, workers: Workers, stages: StageTimes, *, limited: bool) -> Floats:
    """Least bottleneck of one group between any two cuts, infinite where there is none.

    The first stage of a group pays no transfers, the others pay both, as in the formula.

    Args:
        limited: memory is limited, so that a stage's time depends on the workers behind it.
    """
    n, every = workers.n, slice(0, len(cuts))
    best = np.full((len(cuts), len(cuts)), math.inf)
    tails: list[Floats] = []  # tails[q - 1]: chains of paying stages on q workers
    for m in range(1, n + 1):
        tail = np.full_like(best, math.inf)
        for r in range(1, m + 1):
            stage = stages.block(n - m, r, every, every)
            q = m - r
            if limited or m == n or q == 0:
                _lead(best, stage, tails, q)
            if m < n:
                _pay_transfers(cuts, workers, n - m, r, stage)
                _lead(tail, stage, tails, q)
        if not limited and tails:
            np.minimum(tail, tails[-1], out=tail)  # a worker may idle
        tails.append(tail)
    return best


def _lead(into: Floats, stage: Floats, tails: list[Floats], q: int) -> None:
    """Lower `into` by chains that begin with `stage` and go on with q workers."""
    if q == 0:
        np.minimum(into, stage, out=into)
    else:
        product(stage, tails[q - 1], into)


def _pay_transfers(cuts: Cuts, workers: Workers, first: int, r: int, stage: Floats) -> None:
    crossing = cuts.crossing_bytes
    np.maximum(stage, (workers.receive_s_per_byte[first, r] * crossing)[:, None], out=stage)
    np.maximum(stage, (workers.send_s_per_byte[first, r] * crossing)[None, :], out=stage)


@dataclass(frozen=True, eq=False)
class GroupStages:
    """Stages whose workers are groups of workers of the level below.

    Attributes:
        inner_s: best time of one group between any two cuts, given what surrounds it.
        inner_rate: devices in a group.
    """

    cuts: Cuts
    workers: Workers
    inner_s: Callable[[Surroundings], Floats]
    inner_rate: float

    def block(self, first: int, r: int, rows: slice, cols: slice) -> Floats:
        around = self.surroundings(first, r)
        parameters = self.cuts.parameter_bytes
        block: Floats = self.inner_s(around)[rows, cols] / self.workers.rate[first, r]
        sync_s = self.workers.sync_s_per_byte[first, r]
        block += np.subtract.outer(-parameters[rows], -parameters[cols]) * sync_s
        return block

    def surroundings(self, first: int, r: int) -> Surroundings:
        """What one group of the stage sees around it."""
        n_after = (self.workers.n - first - r) * int(self.inner_rate)
        return Surroundings(n_copies=r, n_after=n_after)

    def most_compute_s(self, first: int, n: int) -> float:
        return float(self.workers.rate[first, n]) * self.inner_rate if n else 0.0
