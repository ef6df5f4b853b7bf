"""The chain of pipeline stages with the least bottleneck, by dynamic programming; stages balanced
over devices by the profile.

PipeDream's program (Narayanan et al., SOSP 2019, section 3.1). Cuts stand in an order; a stage runs
from one cut to a later one on consecutive workers. V[m][k] is the least bottleneck of what follows
cut k on the last m workers; a stage on r of them leads to V[m - r]. One (m, r) is a (min, max)
product of arrays. Counting workers from the end makes the workers behind a stage, and so its
minibatches in flight, known when it is placed.

`balance` adds a stage's transfers to its operators: it does not know which of them hide each other.
A stage on several devices goes at the speed of the slowest of them, times their number.
"""

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from harness.errors import StrategyError

Floats = npt.NDArray[np.float64]
Rest = Sequence[Floats | None]  # V by m; None is infinite

_BLOCK = 250_000  # elements of a temporary: it and its mask stay in the cache


class StageSeconds(Protocol):
    """Seconds of stages between cuts, on workers first, ..., first + r - 1."""

    @property
    def n_cuts(self) -> int: ...

    @property
    def n_workers(self) -> int: ...

    def block(self, first: int, r: int, rows: slice) -> Floats:
        """A new array, [i, j] for a stage from cut rows.start + i to cut rows.start + j, without
        transfers; infinite where there is none."""
        ...

    def transfers(self, first: int, r: int) -> tuple[Floats, Floats] | None:
        """By cut, seconds of a stage for the values that cross it
        at the stage's start, and at its end; None for no transfers. The first stage of a chain pays
        neither."""
        ...


class PlacedStage(NamedTuple):
    """A stage of a chain: cuts by position, the first of its workers, and how many."""

    start: int
    end: int
    first: int
    r: int


def best_chain(
    stages: StageSeconds, n_stages: int | None = None
) -> tuple[float, list[PlacedStage]] | None:
    """Bottleneck and stages, in order, of the best chain from the first cut to the last one.

    Args:
        n_stages: so many stages on all workers; None for any number, where workers may stay idle:
            those first in the order.

    Returns:
        None where there is no chain.
    """
    n = stages.n_workers
    end = np.full(stages.n_cuts, math.inf)
    end[-1] = 0.0
    rest: list[Floats | None] = [end]
    layers: list[Rest] = [rest]
    if n_stages is None:
        for m in range(1, n):
            rest.append(_tail(stages, m, rest))
        rests: Iterator[Rest] = itertools.repeat(rest)
    else:
        rest += [None] * n
        for s in range(1, n_stages):
            counts = range(s, n - n_stages + s + 1)
            tails = {m: _tail(stages, m, layers[-1]) for m in counts}
            layers.append([tails.get(m) for m in range(n + 1)])
        rests = reversed(layers)
    heads = range(1, n + 1) if n_stages is None else [n]
    rest_of_head = next(rests)
    found = (_first_stage(stages, 0, m, rest_of_head, pays=False) for m in heads)
    best_s, head = min(found, key=lambda each: each[0])
    if best_s == math.inf:
        return None
    chain = [head]
    while chain[-1].end != stages.n_cuts - 1:
        m = n - chain[-1].first - chain[-1].r
        chain.append(_first_stage(stages, chain[-1].end, m, next(rests), pays=True)[1])
    return best_s, chain


def _tail(stages: StageSeconds, m: int, rest: Rest) -> Floats:
    """V[m], of chains that go on by `rest` after their first stage."""
    n_cuts = stages.n_cuts
    found = np.full(n_cuts, math.inf)
    step = max(1, _BLOCK // n_cuts)
    for low in range(0, n_cuts, step):
        rows = slice(low, min(low + step, n_cuts))
        for _, block in _blocks(stages, m, rows, rest, pays=True):
            np.minimum(found[rows], block.min(axis=1), out=found[rows])
    return found


def _first_stage(
    stages: StageSeconds, start: int, m: int, rest: Rest, *, pays: bool
) -> tuple[float, PlacedStage]:
    """The best of a chain from a cut on the last m workers, and the chain's first stage."""
    found = []
    for r, block in _blocks(stages, m, slice(start, start + 1), rest, pays=pays):
        k = int(block[0].argmin())
        found.append((float(block[0, k]), PlacedStage(start, start + k, stages.n_workers - m, r)))
    return min(found, key=lambda each: each[0])


def _blocks(
    stages: StageSeconds, m: int, rows: slice, rest: Rest, *, pays: bool
) -> Iterator[tuple[int, Floats]]:
    """By workers of the first stage, [i, j]: bottlenecks of chains from cut rows.start + i on the
    last m workers whose first stage ends at cut rows.start + j."""
    for r in range(1, m + 1):
        tail = rest[m - r]
        if tail is not None:
            block = stages.block(stages.n_workers - m, r, rows)
            if pays:
                _pay_transfers(stages, stages.n_workers - m, r, rows, block)
            yield r, np.maximum(block, tail[rows.start :], out=block)


def _pay_transfers(stages: StageSeconds, first: int, r: int, rows: slice, block: Floats) -> None:
    """Raise a block of stages to the time of their transfers."""
    seconds = stages.transfers(first, r)
    if seconds is not None:
        np.maximum(block, seconds[0][rows, None], out=block)
        np.maximum(block, seconds[1][rows.start :], out=block)


def all_pairs(stages: StageSeconds) -> Floats:
    """Least bottleneck between any two cuts, infinite where there is none; workers may stay idle:
    those first in the order."""
    n, every = stages.n_workers, slice(0, stages.n_cuts)
    best = np.full((stages.n_cuts, stages.n_cuts), math.inf)
    tails: list[Floats] = []  # tails[q - 1]: chains on the last q workers that pay all transfers
    for m in range(1, n + 1):
        tail = np.full_like(best, math.inf)
        for r in range(1, m + 1):
            block = stages.block(n - m, r, every)
            rest = tails[m - r - 1] if r < m else None
            _lower(best, block, rest)
            if m < n:
                _pay_transfers(stages, n - m, r, every, block)
                _lower(tail, block, rest)
        tails.append(tail)
    return best


def _lower(into: Floats, left: Floats, right: Floats | None) -> None:
    """Lower `into`[i, j] to the least max(left[i, k], right[k, j]) over i < k < j, or to `left`."""
    if right is None:
        np.minimum(into, left, out=into)
        return
    n = len(left)
    columns = np.ascontiguousarray(left.T)
    buffer = np.empty(n * n // 4 + n)
    for k in range(1, n - 1):
        width = n - k - 1
        both = buffer[: k * width].reshape(k, width)
        np.maximum(columns[k, :k, None], right[k, None, k + 1 :], out=both)
        target = into[:k, k + 1 :]
        np.minimum(target, both, out=target)


class Balanced(NamedTuple):
    """Stages in order: one more than the position of each one's last operator, and its devices."""

    ends: tuple[int, ...]
    groups: tuple[tuple[int, ...], ...]


class _Consecutive:
    """Stages of consecutive operators on consecutive workers, each of which is one of the devices;
    their time includes the transfers at their start."""

    def __init__(self, totals: Floats, crossing_s: Floats) -> None:
        self._totals, self._crossing_s = totals, crossing_s
        self.n_workers, self.n_cuts = totals.shape

    def block(self, first: int, r: int, rows: slice) -> Floats:
        totals = self._totals[first : first + r]
        ends, starts = totals[:, None, rows.start :], totals[:, rows, None]
        block: Floats = (ends - starts).max(axis=0) / r
        block += self._crossing_s[rows, None]
        block[np.tri(*block.shape) > 0] = np.inf
        return block

    def transfers(self, first: int, r: int) -> None:
        return None


def balance(
    seconds: Sequence[Sequence[float]], n_stages: int, crossing_s: Sequence[float] = ()
) -> Balanced:
    """Cut operators and devices into as many consecutive parts; exact, by dynamic programming.

    Args:
        seconds: by device, of each operator.
        crossing_s: seconds of the transfers at a cut before each operator; none by default.

    Raises:
        StrategyError: more stages than operators or devices.
    """
    n_devices, n_ops = np.shape(seconds)
    most = min(n_ops, n_devices)
    if not 1 <= n_stages <= most:
        raise StrategyError(
            f"{n_stages} stages cannot be made of {n_ops} operators on {n_devices} devices: use 1 "
            f"to {most}"
        )
    return _balanced(*_at_cuts(seconds, crossing_s), n_stages)


def _at_cuts(
    seconds: Sequence[Sequence[float]], crossing_s: Sequence[float]
) -> tuple[Floats, Floats]:
    """By cut: (devices, operators + 1) seconds of the operators before it; (operators + 1,) of what
    crosses it, which is nothing before the first and after the last one."""
    totals = np.insert(np.cumsum(seconds, axis=1, dtype=np.float64), 0, 0.0, axis=1)
    crossing = np.zeros(totals.shape[1])
    crossing[1:-1] = crossing_s[1:] if len(crossing_s) else 0.0
    return totals, crossing


def _balanced(totals: Floats, crossing_s: Floats, n_stages: int) -> Balanced:
    found = best_chain(_Consecutive(totals, crossing_s), n_stages)
    assert found is not None, "there are as many operators and workers as stages"
    return Balanced(
        tuple(stage.end for stage in found[1]),
        tuple(tuple(range(stage.first, stage.first + stage.r)) for stage in found[1]),
    )


def balance_in_turn(
    seconds: Sequence[Sequence[float]], n_stages: int, crossing_s: Sequence[float] = ()
) -> Balanced:
    """Cut operators into consecutive stages, stage s on device s modulo their number; see
    `balance`.

    Raises:
        StrategyError: more stages than operators.
    """
    n_devices, n_ops = np.shape(seconds)
    if not 1 <= n_stages <= n_ops:
        raise StrategyError(
            f"{n_stages} stages cannot be made of {n_ops} operators: use 1 to {n_ops}"
        )
    totals, at_cuts = _at_cuts(seconds, crossing_s)
    in_turn = [stage % n_devices for stage in range(n_stages)]
    ends = _balanced(totals[in_turn], at_cuts, n_stages).ends
    return Balanced(ends, tuple((device,) for device in in_turn))
