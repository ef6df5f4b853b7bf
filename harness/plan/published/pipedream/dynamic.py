"""Exact dynamic programs over cuts: the best chain of replicated stages.

The worker counts are layers. V[m][k] is the least bottleneck of what follows cut k on the last m
workers; a stage on r of them leads to V[m - r]. Since a stage's compute is a difference of two
prefix sums, one layer is a (min, max) product of arrays. Counting workers from the end makes a
stage's minibatches in flight, and so its memory, known when it is placed.

Workers stand in a fixed order, and may differ in speed and links; levels of the hierarchy are
solved from the inside: `all_pairs` gives the best time of one group of workers for every pair of
cuts, which is the compute of a stage one level up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from harness.plan.published.pipedream.cost import Level, memory_bytes, n_in_flight
from harness.plan.published.pipedream.cuts import Cuts, Floats

Ints = npt.NDArray[np.signedinteger]

_BLOCK = 250_000  # elements of a temporary: it and its mask stay in the cache
_SLACK = 1 + 1e-9  # a bound is met up to rounding


@dataclass(frozen=True, eq=False)
class Workers:
    """Workers of one level, in order; tables are indexed [first, r] for workers first..first+r-1.

    Attributes:
        rate: compute of the group, in units of the profiled device.
        sync_s_per_byte: gradient synchronisation inside the group, per byte of parameters.
        receive_s_per_byte: from the worker before the group, per byte of activations.
        send_s_per_byte: to the worker after the group.
        memory_bytes: least memory in the group; infinite for no limit.
    """

    rate: Floats
    sync_s_per_byte: Floats
    receive_s_per_byte: Floats
    send_s_per_byte: Floats
    memory_bytes: Floats

    @property
    def n(self) -> int:
        return len(self.rate)

    @classmethod
    def uniform(cls, level: Level, memory: float = math.inf) -> Workers:
        """Equal workers by PipeDream's formula."""
        n = level.n_workers
        counts = np.arange(n + 1, dtype=float)
        counts[0] = math.nan
        sync = [math.nan] + [level.sync_s_per_byte(r) for r in range(1, n + 1)]
        transfer = [math.nan] + [level.transfer_s_per_byte(r) for r in range(1, n + 1)]

        def rows(values: Sequence[float] | Floats) -> Floats:
            return np.tile(np.asarray(values, dtype=float), (n, 1))

        return cls(
            rate=rows(counts),
            sync_s_per_byte=rows(sync),
            receive_s_per_byte=rows(transfer),
            send_s_per_byte=rows(transfer),
            memory_bytes=np.full((n, n + 1), memory),
        )

    @classmethod
    def ordered(
        cls, speeds: Sequence[float], bandwidth: Floats, memory: Sequence[float] | None = None
    ) -> Workers:
        """Unlike workers in the given order.

        Replicas share the samples in proportion to their speeds; a group synchronises at the
        slowest link inside it, and hands over at the slowest link to its neighbour.

        Args:
            speeds: per worker, in units of the profiled device.
            bandwidth: bytes/s from worker to worker, shape (n, n); the diagonal is not read.
            memory: bytes per worker; None for no limit.
        """
        n = len(speeds)
        shape = (n, n + 1)
        rate, sync = np.full(shape, math.nan), np.full(shape, math.nan)
        receive, send, limit = np.zeros(shape), np.zeros(shape), np.full(shape, math.inf)
        for first in range(n):
            for r in range(1, n - first + 1):
                group = range(first, first + r)
                pairs = [bandwidth[a, b] for a in group for b in group if a != b]
                rate[first, r] = sum(speeds[w] for w in group)
                sync[first, r] = 4 * (r - 1) / (min(pairs) * r * r) if pairs else 0.0
                if first > 0:
                    receive[first, r] = 2 / (r * min(bandwidth[first - 1, w] for w in group))
                if first + r < n:
                    send[first, r] = 2 / (r * min(bandwidth[w, first + r] for w in group))
                if memory is not None:
                    limit[first, r] = min(memory[w] for w in group)
        return cls(rate, sync, receive, send, limit)


class StageTimes(Protocol):
    """Seconds of stages between cuts, without transfers; infinite where one cannot be."""

    def block(self, first: int, r: int, rows: slice, cols: slice) -> Floats:
        """A new array, [i, j] for a stage from cut rows[i] to cut cols[j] on r workers."""
        ...

    def most_compute_s(self, first: int, n: int) -> float:
        """Compute that n workers get through in one second of bottleneck, at best."""
        ...


@dataclass(frozen=True)
class Surroundings:
    """What lies around one group of workers when it is one of the replicas of an outer stage.

    Attributes:
        n_copies: groups that replicate the outer stage.
        n_after: devices behind the outer stage.
    """

    n_copies: int = 1
    n_after: int = 0

    def in_flight(self, r: int, n_after: int) -> int:
        """Minibatches held by a stage on r devices with n_after behind it in its group."""
        return n_in_flight(r * self.n_copies, n_after * self.n_copies + self.n_after)


@dataclass(frozen=True, eq=False)
class DeviceStages:
    """Stages whose workers are devices."""

    cuts: Cuts
    workers: Workers
    around: Surroundings = field(default_factory=Surroundings)

    def block(self, first: int, r: int, rows: slice, cols: slice) -> Floats:
        cuts, workers = self.cuts, self.workers
        whole = (
            cuts.compute_s / workers.rate[first, r]
            + cuts.parameter_bytes * workers.sync_s_per_byte[first, r]
        )
        block: Floats = np.subtract.outer(-whole[rows], -whole[cols])
        np.copyto(block, math.inf, where=cuts.blocked[rows, cols])
        limit = workers.memory_bytes[first, r]
        if limit < math.inf:
            in_flight = self.around.in_flight(r, workers.n - first - r)
            block[self._held(in_flight, rows, cols) > limit] = math.inf
        return block

    def _held(self, in_flight: int, rows: slice, cols: slice) -> Floats:
        cuts = self.cuts
        held = memory_bytes(cuts.parameter_bytes, cuts.activation_bytes, in_flight)
        received = in_flight * cuts.crossing_bytes
        needed: Floats = np.subtract.outer(received[rows] - held[rows], -held[cols])
        return needed

    def most_compute_s(self, first: int, n: int) -> float:
        return float(self.workers.rate[first, n]) if n else 0.0


@dataclass(frozen=True)
class Placed:
    """A stage of a solution: cuts by position, the first of its workers, and how many."""

    start: int
    end: int
    first: int
    r: int


def best_chain(
    cuts: Cuts, workers: Workers, stages: StageTimes, *, bound_s: float = math.inf
) -> tuple[float, list[Placed]] | None:
    """The chain of stages from the first cut to the last one with the least bottleneck.

    Workers may stay idle: those first in the order.

    Args:
        bound_s: only chains at most this slow are looked for; smaller is faster.

    Returns:
        Seconds and stages in order; None when nothing fits the memory or the bound.
    """
    n, end = workers.n, len(cuts) - 1
    windows = [_window(cuts, stages, n, m, bound_s) for m in range(n)]
    values = [np.zeros(1)] + [np.full(w.stop - w.start, math.inf) for w in windows[1:]]
    choices: list[dict[str, Ints]] = [{} for _ in windows]
    crossing = cuts.crossing_bytes
    for m in range(1, n):
        rows, first = windows[m], n - m
        size = rows.stop - rows.start
        chosen_r, chosen_end = np.zeros(size, dtype=np.int32), np.zeros(size, dtype=np.int32)
        for r in range(1, m + 1):
            cols = windows[m - r]
            if size == 0 or cols.stop == cols.start:
                continue
            tail = np.maximum(values[m - r], workers.send_s_per_byte[first, r] * crossing[cols])
            value, arg = _step(stages, first, r, rows, cols, tail)
            np.maximum(value, workers.receive_s_per_byte[first, r] * crossing[rows], out=value)
            better = value < values[m]
            values[m][better] = value[better]
            chosen_r[better] = r
            chosen_end[better] = arg[better] + cols.start
        choices[m] = {"r": chosen_r, "end": chosen_end}
    best_s, head = math.inf, None
    for m in range(1, n + 1):
        for r in range(1, m + 1):
            cols = windows[m - r]
            if cols.stop == cols.start:
                continue
            value, arg = _step(stages, n - m, r, slice(0, 1), cols, values[m - r])
            if value[0] < best_s:
                best_s, head = float(value[0]), Placed(0, int(arg[0]) + cols.start, n - m, r)
    if head is None or best_s > bound_s * _SLACK:
        return None
    chain = [head]
    while chain[-1].end != end:
        first, k = chain[-1].first + chain[-1].r, chain[-1].end
        m = n - first
        row = k - windows[m].start
        r = int(choices[m]["r"][row])
        chain.append(Placed(k, int(choices[m]["end"][row]), first, r))
    return best_s, chain


def _window(cuts: Cuts, stages: StageTimes, n: int, m: int, bound_s: float) -> slice:
    """Cuts at which the last m of n workers may begin, if no worker is busier than the bound."""
    end = len(cuts) - 1
    if m == 0:
        return slice(end, end + 1)
    if bound_s == math.inf:
        return slice(1, end)
    whole = float(cuts.compute_s[-1] - cuts.compute_s[0])
    bound_s *= _SLACK
    least = cuts.compute_s[0] + whole - bound_s * stages.most_compute_s(n - m, m)
    most = cuts.compute_s[0] + bound_s * stages.most_compute_s(0, n - m)
    low = int(np.searchsorted(cuts.compute_s, least - 1e-12, side="left"))
    high = int(np.searchsorted(cuts.compute_s, most + 1e-12, side="right"))
    low, high = max(low, 1), min(high, end)
    return slice(low, max(low, high))


def _step(
    stages: StageTimes, first: int, r: int, rows: slice, cols: slice, tail: Floats
) -> tuple[Floats, Ints]:
    """Least of max(stage, tail) over cols, and where, for each of rows; in blocks."""
    n_rows = rows.stop - rows.start
    value, arg = np.empty(n_rows), np.empty(n_rows, dtype=np.intp)
    step = max(1, _BLOCK // (cols.stop - cols.start))
    for low in range(0, n_rows, step):
        high = min(low + step, n_rows)
        block = stages.block(first, r, slice(rows.start + low, rows.start + high), cols)
        np.maximum(block, tail, out=block)
        arg[low:high] = block.argmin(axis=1)
        value[low:high] = block[np.arange(high - low), arg[low:high]]
    return value, arg
