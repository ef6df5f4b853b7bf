"""Balance a pipeline's stages over devices by the profile, with replicas where stages are fewer.

PipeDream's partition (Narayanan et al., 2019, section 3.1) for consecutive devices, without the
transfers: the slowest stage is to be as fast as possible, and a stage on several devices goes at
the pace of the slowest of them, divided by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.errors import StrategyError

Floats = npt.NDArray[np.float64]


class Balanced(NamedTuple):
    """Stages in order: one more than the position of each one's last operator, and its devices."""

    ends: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


def balance(seconds: Sequence[Sequence[float]], n_stages: int) -> Balanced:
    """Cut operators and devices into as many consecutive parts; exact, by dynamic programming.

    Args:
        seconds: by device, of each operator.

    Raises:
        StrategyError: more stages than operators or devices.
    """
    times = np.asarray(seconds, dtype=np.float64)
    n_devices, n_ops = times.shape
    _check(n_stages, n_ops, n_devices)
    if n_stages == n_devices:
        return balance_in_turn(seconds, n_stages)
    totals = _running_totals(times)
    # best[d, i]: pace of the first i operators on the first d devices; nothing on none is free.
    best = np.full((n_devices + 1, n_ops + 1), np.inf)
    best[0, 0] = 0.0
    choices = []
    for _ in range(n_stages):
        best, choice = _add_stage(best, totals)
        choices.append(choice)
    return _walk_back(choices, n_devices, n_ops)


def _check(n_stages: int, n_ops: int, n_devices: int) -> None:
    most = min(n_ops, n_devices)
    if not 1 <= n_stages <= most:
        raise StrategyError(
            f"{n_stages} stages cannot be made of {n_ops} operators on {n_devices} devices: use "
            f"--stages 1 to {most}"
        )


def _running_totals(times: Floats) -> Floats:
    """(devices, operators + 1): seconds of the operators before each."""
    return np.concatenate([np.zeros((len(times), 1)), times.cumsum(axis=1)], axis=1)


def _add_stage(
    before: Floats, totals: Floats
) -> tuple[Floats, dict[tuple[int, int], tuple[int, int]]]:
    """The best paces with one stage more, and where each one's last stage starts."""
    n_devices, n_ops = before.shape[0] - 1, before.shape[1] - 1
    after = np.full_like(before, np.inf)
    choice: dict[tuple[int, int], tuple[int, int]] = {}
    for d in range(1, n_devices + 1):
        for i in range(1, n_ops + 1):
            for start in range(d):
                own = (totals[start:d, i : i + 1] - totals[start:d, :i]).max(axis=0) / (d - start)
                paces = np.maximum(before[start, :i], own)
                cut = int(paces.argmin())
                if paces[cut] < after[d, i]:
                    after[d, i] = paces[cut]
                    choice[d, i] = (start, cut)
    return after, choice


def _walk_back(
    choices: Sequence[dict[tuple[int, int], tuple[int, int]]], n_devices: int, n_ops: int
) -> Balanced:
    d, i = n_devices, n_ops
    ends, groups = [], []
    for choice in reversed(choices):
        start, cut = choice[d, i]
        ends.append(i)
        groups.append(tuple(range(start, d)))
        d, i = start, cut
    return Balanced(tuple(reversed(ends)), tuple(reversed(groups)))


def balance_in_turn(seconds: Sequence[Sequence[float]], n_stages: int) -> Balanced:
    """Cut operators into consecutive stages, stage s on device s modulo their number.

    The slowest stage is as fast as possible (exact). Where devices have several stages, that is
    where it begins: ends are then moved one at a time for as long as that takes from the busiest
    device, since all its stages of a microbatch set the pace, and not one of them.

    Raises:
        StrategyError: more stages than operators.
    """
    times = np.asarray(seconds, dtype=np.float64)
    n_devices, n_ops = times.shape
    if not 1 <= n_stages <= n_ops:
        raise StrategyError(
            f"{n_stages} stages cannot be made of {n_ops} operators: use --stages 1 to {n_ops}"
        )
    totals = _running_totals(times)
    best = np.full(n_ops + 1, np.inf)
    best[0] = 0.0
    cuts = []
    for stage in range(n_stages):
        own = totals[stage % n_devices]
        # paces[i, j]: the stage holds operators j to i.
        paces = np.maximum(best[None, :], own[:, None] - own[None, :])
        paces[np.triu_indices(n_ops + 1)] = np.inf
        cuts.append(paces.argmin(axis=1))
        best = paces.min(axis=1)
    ends = [n_ops]
    for cut in reversed(cuts[1:]):
        ends.append(int(cut[ends[-1]]))
    ends.reverse()
    if n_stages > n_devices:
        ends = _levelled(ends, totals)
    groups = tuple((stage % n_devices,) for stage in range(n_stages))
    return Balanced(tuple(ends), groups)


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
    """What each device computes, the busiest first; the longest stage. In whole numbers, so that
    loads that differ by rounding are equal."""
    n_devices = len(totals)
    stages = [
        float(totals[stage % n_devices, end] - totals[stage % n_devices, start])
        for stage, (start, end) in enumerate(pairwise((0, *ends)))
    ]
    loads = [sum(stages[device::n_devices]) for device in range(n_devices)]
    unit_s = 1e-9 * float(totals.max()) or 1.0
    return sorted((round(s / unit_s) for s in loads), reverse=True), round(max(stages) / unit_s)
