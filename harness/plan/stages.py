"""Balance a pipeline's stages over devices by the profile, with replicas where stages are fewer.

PipeDream's partition (Narayanan et al., 2019, section 3.1) for consecutive devices, without the
transfers: the slowest stage is to be as fast as possible, and a stage on several devices goes at
the pace of the slowest of them, divided by their number.
"""

from __future__ import annotations

from collections.abc import Sequence
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
    """Cut operators into consecutive stages, stage s on device s modulo their number; exact.

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
    groups = tuple((stage % n_devices,) for stage in range(n_stages))
    return Balanced(tuple(reversed(ends)), groups)
