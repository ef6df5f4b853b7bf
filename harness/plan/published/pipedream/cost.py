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
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import numpy.typing as npt

# Bytes held per byte of parameters: the parameters, their gradients, and momentum.
STATE_BYTES_PER_PARAMETER_BYTE = 3


@dataclass(frozen=True)
class Level:
    """One level of the hierarchy, innermost first.

    Attributes:
        n_workers: devices (innermost) or groups of the level below.
        bandwidth: bytes/s between them.
        inner: workers inside each: 1 on the innermost level.
    """

    n_workers: int
    bandwidth: float
    inner: int = 1

    def sync_s_per_byte(self, n_replicas: int) -> float:
        """Seconds of gradient synchronisation per byte of a stage's parameters."""
        return 4 * (n_replicas - 1) / (self.bandwidth * n_replicas * n_replicas) / self.inner

    def transfer_s_per_byte(self, n_replicas: int) -> float:
        """Seconds per byte of a cut's activations, forward and gradients back."""
        return 2 / (self.bandwidth * n_replicas)


def levels_of(n_workers: Sequence[int], bandwidths: Sequence[float]) -> list[Level]:
    """Stack levels, innermost first; `inner` is the workers of the level just below."""
    inner = [1, *n_workers[:-1]]
    return [Level(*each) for each in zip(n_workers, bandwidths, inner, strict=True)]


def data_parallel_s(compute_s: float, parameter_bytes: float, levels: Sequence[Level]) -> float:
    """Step time when every device holds the whole model."""
    time_s = compute_s
    for level in levels:
        n = level.n_workers
        time_s = time_s / n + level.sync_s_per_byte(n) * parameter_bytes
    return time_s


def n_in_flight(n_replicas: int, n_after: int) -> int:
    """Minibatches that a replica holds activations of: its own and those further down.

    Every replica admits a minibatch whenever the pipeline finishes one per replica, so that the
    `n_after` workers behind the stage hold ceil(n_after / n_replicas) of each replica's.
    """
    return math.ceil(n_after / n_replicas) + 1


Amount = TypeVar("Amount", float, npt.NDArray[np.float64])


def memory_bytes(parameters: Amount, activations: Amount, in_flight: int) -> Amount:
    """Peak of one replica: state, a stashed copy of the weights per extra minibatch, activations.

    Args:
        parameters: bytes of the stage's parameters.
        activations: bytes of everything the stage keeps of one minibatch, inputs too.
    """
    return (STATE_BYTES_PER_PARAMETER_BYTE + in_flight - 1) * parameters + in_flight * activations


@dataclass(frozen=True)
class Stage:
    """Consecutive operators on `n_replicas` workers of one level.

    Attributes:
        start: members (bit i: operator i) of the cut where it begins.
        end: members of the cut where it ends; its operators are `end & ~start`.
        first: its workers are first, ..., first + n_replicas - 1 of its level's.
        n_replicas: each takes every n_replicas-th minibatch.
        inner: how each worker, itself a group of workers, runs it; empty on the innermost level.
    """

    start: int
    end: int
    first: int
    n_replicas: int
    inner: tuple[Stage, ...] = ()
