"""Balance a pipeline's stages over devices by the profile, with replicas where stages are fewer.

PipeDream's partition (Narayanan et al., 2019, section 3.1) for consecutive devices, without the
transfers: the slowest stage is to be as fast as possible, and a stage on several devices goes at
the speed of the slowest of them, times their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from harness.errors import StrategyError
from harness.plan.bottleneck import Floats, best_chain


class Balanced(NamedTuple):
    """Stages in order: one more than the position of each one's last operator, and its devices."""

    ends: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


class _Consecutive:
    """Stages of consecutive operators on consecutive workers, without transfers; each worker is one
    of the devices."""

    def __init__(self, totals: Floats) -> None:
        self._totals = totals
        self.n_workers, self.n_cuts = totals.shape

    def block(self, first: int, r: int, rows: slice) -> Floats:
        ends, starts = (
            self._totals[first : first + r, rows.start :],
            self._totals[first : first + r, rows],
        )
        block: Floats = (ends[:, None, :] - starts[:, :, None]).max(axis=0) / r
        block[np.tri(*block.shape) > 0] = np.inf
        return block

    def transfers(self, first: int, r: int) -> None:
        return None


def balance(seconds: Sequence[Sequence[float]], n_stages: int) -> Balanced:
    """Cut operators and devices into as many consecutive parts; exact, by dynamic programming.

    Args:
        seconds: by device, of each operator.

    Raises:
        StrategyError: more stages than operators or devices.
    """
    n_devices, n_ops = np.shape(seconds)
    most = min(n_ops, n_devices)
    if not 1 <= n_stages <= most:
        raise StrategyError(
            f"{n_stages} stages cannot be made of {n_ops} operators on {n_devices} devices: use "
            f"--stages 1 to {most}"
        )
    return _balanced(_running_totals(seconds), n_stages)


def _running_totals(seconds: Sequence[Sequence[float]]) -> Floats:
    """(devices, operators + 1): seconds of the operators before each."""
    times = np.asarray(seconds, dtype=np.float64)
    return np.concatenate([np.zeros((len(times), 1)), times.cumsum(axis=1)], axis=1)


def _balanced(totals: Floats, n_stages: int) -> Balanced:
    found = best_chain(_Consecutive(totals), n_stages)
    assert found is not None, "there are as many operators and workers as stages"
    return Balanced(
        tuple(stage.end for stage in found[1]),
        tuple(tuple(range(stage.first, stage.first + stage.r)) for stage in found[1]),
    )


def balance_in_turn(seconds: Sequence[Sequence[float]], n_stages: int) -> Balanced:
    """Cut operators into consecutive stages, stage s on device s modulo their number.

    The slowest stage is as fast as possible (exact). Where devices have several stages, ends are
    then moved one at a time for as long as the busiest device gets less to do, because all its
    stages take its time in each microbatch.

    Raises:
        StrategyError: more stages than operators.
    """
    n_devices, n_ops = np.shape(seconds)
    if not 1 <= n_stages <= n_ops:
        raise StrategyError(
            f"{n_stages} stages cannot be made of {n_ops} operators: use --stages 1 to {n_ops}"
        )
    totals = _running_totals(seconds)
    in_turn = [stage % n_devices for stage in range(n_stages)]
    ends = list(_balanced(totals[in_turn], n_stages).ends)
    if n_stages > n_devices:
        ends = _levelled(ends, totals)
    return Balanced(tuple(ends), tuple((device,) for device in in_turn))


def _levelled(ends: list[int], totals: Floats) -> list[int]:
    """Move ends for as long as the busiest device gets less, or of equally busy ones fewer are."""
    best, is_better = _load(ends, totals), True
    while is_better:
        is_better = False
        for k in range(len(ends) - 1):
            first = ends[k - 1] + 1 if k else 1
            for end in range(first, ends[k + 1]):
                moved = [*ends[:k], end, *ends[k + 1 :]]
                load = _load(moved, totals)
                if load < best:
                    ends, best, is_better = moved, load, True
    return ends


def _load(ends: Sequence[int], totals: Floats) -> tuple[list[int], int]:
    """Seconds of each device, the busiest first; the longest stage. In whole numbers, so that
    loads that differ by rounding are equal."""
    n_devices = len(totals)
    stages = [
        float(totals[stage % n_devices, end] - totals[stage % n_devices, start])
        for stage, (start, end) in enumerate(pairwise((0, *ends)))
    ]
    loads = [sum(stages[device::n_devices]) for device in range(n_devices)]
    unit_s = 1e-9 * float(totals.max()) or 1.0
    return sorted((round(s / unit_s) for s in loads), reverse=True), round(max(stages) / unit_s)
