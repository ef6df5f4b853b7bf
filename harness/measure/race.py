"""Which of several that are timed in turn is the fastest: as many rounds as tell, and no more.

A machine's speed drifts, so what is timed in one round is compared within that round. Racing leaves
time for those that are near each other: Maron and Moore, Hoeffding races, NIPS 1993; here who is
behind is decided by the interval of `paired_ratio`, which assumes no distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from harness.measure.statistics import paired_ratio

LEAST_ROUNDS, MOST_ROUNDS = 4, 24


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one of the racers came in.

    Attributes:
        index: of the racer.
        duration_s: what it takes beside the others: the median over its rounds of its time over
            the round's mean, times the median of these means. Means are geometric, of those that
            stayed to the end.
        n_rounds: that it was timed in.
    """

    index: int
    duration_s: float
    n_rounds: int


def race(
    time_one: Callable[[int], float], n: int, is_late: Callable[[], bool]
) -> list[list[float]]:
    """Time n racers in turn until one is left, or until it is late, or rounds are many.

    Who was slower than another in all of the first rounds, and later by all that can be decided,
    leaves. On several ranks all must call it, with answers that are equal on all.

    Args:
        time_one: seconds that a racer takes; slower is worse.
        is_late: whether to stop, asked after each round but the first few.

    Returns:
        Of each racer its seconds by round.
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
        running = ahead or running  # many could be behind one another in a ring
        if len(running) == 1 or is_late():
            break
    return seconds


def _is_behind(racer: int, running: Sequence[int], seconds: Sequence[Sequence[float]]) -> bool:
    others = [other for other in running if other != racer]
    return any(paired_ratio(seconds[racer], seconds[other]).low > 1 for other in others)


def places(seconds: Sequence[Sequence[float]]) -> list[Place]:
    """Who stayed longest comes first, and of these the fastest; of what `race` returned."""
    most = max(map(len, seconds))
    stayed = np.log([own for own in seconds if len(own) == most]).mean(axis=0)
    level_s = float(np.exp(np.median(stayed)))
    found = [
        Place(
            index=k,
            duration_s=level_s * float(np.exp(np.median(np.log(own) - stayed[: len(own)]))),
            n_rounds=len(own),
        )
        for k, own in enumerate(seconds)
    ]
    return sorted(found, key=lambda place: (-place.n_rounds, place.duration_s))
