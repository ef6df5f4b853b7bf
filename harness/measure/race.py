"""Find the fastest of several candidates with few timings, by racing them.

A machine's speed drifts, so times are compared within a round. A race drops slow candidates early,
which leaves time for close ones (Maron and Moore, Hoeffding races, NIPS 1993). The interval of
`paired_ratio`, which assumes no distribution, decides which are slow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.measure.statistics import paired_ratio

LEAST_ROUNDS, MOST_ROUNDS = 4, 24


@dataclass(frozen=True, kw_only=True)
class Place:
    """Result of one racer.

    Attributes:
        index: index of the racer.
        duration_s: drift-corrected seconds: the median over its rounds of its time over the
            round's mean, times the median of these means. Means are geometric, over the racers
            that were never dropped.
        n_rounds: rounds in which it was timed.
    """

    index: int
    duration_s: float
    n_rounds: int


def race(
    time_one: Callable[[int], float], n: int, is_late: Callable[[], bool]
) -> list[list[float]]:
    """Time n racers in turn until one is left, `is_late` is true, or MOST_ROUNDS are done.

    From LEAST_ROUNDS on, a racer is dropped when the interval of its ratio to another lies above 1.
    On several ranks all must call it, and both functions must return the same values on all.

    Args:
        time_one: time one racer; returns seconds.
        is_late: whether to stop; called after each round but the first few.

    Returns:
        The seconds of each racer by round.
    """
    seconds: list[list[float]] = [[] for _ in range(n)]
    running = list(range(n))
    for k in range(MOST_ROUNDS):
        turn = k % len(running)
        for racer in running[turn:] + running[:turn]:
            seconds[racer].append(time_one(racer))
        if k + 1 < LEAST_ROUNDS:
            continue
        ahead = [one for one in running if not _is_behind(one, running, seconds)]
        running = ahead or running  # racers could each be behind another, in a cycle
        if len(running) == 1 or is_late():
            break
    return seconds


def _is_behind(racer: int, running: Sequence[int], seconds: Sequence[Sequence[float]]) -> bool:
    others = [other for other in running if other != racer]
    return any(paired_ratio(seconds[racer], seconds[other]).low > 1 for other in others)


def places(seconds: Sequence[Sequence[float]]) -> list[Place]:
    """Rank the result of `race`: most rounds first, then fastest first."""
    most = max(map(len, seconds))
    stayed = np.log([times for times in seconds if len(times) == most]).mean(axis=0)
    level_s = float(np.exp(np.median(stayed)))
    found = [
        Place(
            index=k,
            duration_s=level_s * float(np.exp(np.median(np.log(times) - stayed[: len(times)]))),
            n_rounds=len(times),
        )
        for k, times in enumerate(seconds)
    ]
    return sorted(found, key=lambda place: (-place.n_rounds, place.duration_s))
