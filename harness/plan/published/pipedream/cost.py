"""PipeDream's formula, with activation transfers counted.

On one level of W workers joined by B bytes/s, a stage of compute c (seconds) and parameters P
(bytes) on r replicas costs

    (c + 4 (r - 1) P / (B r) / inner) / r                              seconds per minibatch,

where `inner` is the number of workers inside each worker of this level, and c on level L + 1 is
the best time of all workers of level L. A stage that is not the first of its level also costs
2 a / (B r) for the activations a of the cut at its start, and for those of the cut at its end.
The step time is the costliest of all. Source: optimizer_graph_hierarchical.py of PipeDream, whose
optimizer forgets `inner` in pipelines, and transfers unless a compression ratio is given.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

from harness.plan.bottleneck import Floats
from harness.plan.published.pipedream.problem import Cuts

# Bytes held per byte of parameters: the parameters, their gradients, and momentum.
STATE_BYTES_PER_PARAMETER_BYTE = 3


def n_in_flight(n_replicas: int, n_after: int) -> int:
    """Minibatches that a replica holds activations of: its own and those further down.

    Every replica admits a minibatch whenever the pipeline finishes one per replica, so that the
    `n_after` workers behind the stage hold ceil(n_after / n_replicas) of each replica's.
    """
    return math.ceil(n_after / n_replicas) + 1


Amount = TypeVar("Amount", float, Floats)


def memory_bytes(parameters: Amount, activations: Amount, in_flight: int) -> Amount:
    """Peak of one replica: state, a stashed copy of the weights per extra minibatch, activations.

    Args:
        parameters: bytes of the stage's parameters.
        activations: bytes of everything the stage keeps of one minibatch, inputs too.
    """
    return (STATE_BYTES_PER_PARAMETER_BYTE + in_flight - 1) * parameters + in_flight * activations


@dataclass(frozen=True, kw_only=True)
class Level:
    """Equal workers of one level.

    Attributes:
        bandwidth: bytes/s of the slowest link between them.
        inner: workers inside each: 1 on the innermost level, where they are devices.
        memory_bytes: of each device; infinite for no limit, and on outer levels.
    """

    n_workers: int
    bandwidth: float
    inner: int
    memory_bytes: float = math.inf

    def sync_s_per_byte(self, r: int) -> float:
        """Gradient synchronisation of r replicas, per byte of parameters."""
        return 4 * (r - 1) / (self.bandwidth * r * r) / self.inner


def levels_of(
    n_workers: Sequence[int], bandwidths: Sequence[float], memory: float = math.inf
) -> list[Level]:
    """Levels of equal workers, innermost first; `memory` is of each device."""
    inner = [1, *n_workers[:-1]]
    limits = [memory, *[math.inf] * (len(n_workers) - 1)]
    return [
        Level(n_workers=n, bandwidth=bandwidth, inner=within, memory_bytes=limit)
        for n, bandwidth, within, limit in zip(n_workers, bandwidths, inner, limits, strict=True)
    ]


def data_parallel_s(compute_s: float, parameter_bytes: float, levels: Sequence[Level]) -> float:
    """Step time when every device holds the whole model."""
    time_s = compute_s
    for level in levels:
        n = level.n_workers
        time_s = time_s / n + level.sync_s_per_byte(n) * parameter_bytes
    return time_s


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of one group of workers that is a replica of an outer stage.

    Attributes:
        n_copies: groups that replicate the outer stage.
        n_after: devices behind the outer stage.
    """

    n_copies: int = 1
    n_after: int = 0

    def within(self, outer: Surroundings) -> Surroundings:
        """Of a group inside a group."""
        n_after = self.n_after * outer.n_copies + outer.n_after
        return Surroundings(self.n_copies * outer.n_copies, n_after)


@dataclass(frozen=True, eq=False)
class Stages:
    """Stages between cuts on the workers of one level (`bottleneck.StageSeconds`).

    Attributes:
        around: surroundings of the level's workers.
        group_s: best time of one worker between any two cuts, given its surroundings, where
            workers are groups of the level below; None where they are devices.
    """

    cuts: Cuts
    level: Level
    n_devices_each: int = 1
    around: Surroundings = Surroundings()
    group_s: Callable[[Surroundings], Floats] | None = None

    @property
    def n_cuts(self) -> int:
        return len(self.cuts)

    @property
    def n_workers(self) -> int:
        return self.level.n_workers

    def inside(self, first: int, r: int) -> Surroundings:
        """The surroundings of one worker of a stage."""
        n_after = (self.n_workers - first - r) * self.n_devices_each
        return Surroundings(r, n_after).within(self.around)

    def block(self, first: int, r: int, rows: slice) -> Floats:
        cuts, cols = self.cuts, slice(rows.start, None)
        sync_s = cuts.parameter_bytes * self.level.sync_s_per_byte(r)
        block: Floats
        if self.group_s is not None:
            block = self.group_s(self.inside(first, r))[rows, cols] / r
            block += np.subtract.outer(-sync_s[rows], -sync_s[cols])
            return block
        whole_s = cuts.compute_s / r + sync_s
        block = np.subtract.outer(-whole_s[rows], -whole_s[cols])
        np.copyto(block, math.inf, where=cuts.blocked[rows, cols])
        if self.level.memory_bytes < math.inf:
            inside = self.inside(first, r)
            in_flight = n_in_flight(inside.n_copies, inside.n_after)
            held = memory_bytes(cuts.parameter_bytes, cuts.activation_bytes, in_flight)
            received = in_flight * cuts.crossing_bytes
            needed = np.subtract.outer(received[rows] - held[rows], -held[cols])
            block[needed > self.level.memory_bytes] = math.inf
        return block

    def transfers(self, first: int, r: int) -> tuple[Floats, Floats]:
        seconds = 2 / (self.level.bandwidth * r) * self.cuts.crossing_bytes
        return seconds, seconds
