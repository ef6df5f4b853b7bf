"""Sets of operators that contain all their producers: where a pipeline of stages may be cut.

The loops of the maximum-load search, compiled. Import this module lazily: it imports numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.plan.compiled import compiled, inlined
from harness.plan.published.maxload.problem import Floats, Integers, Lists, LoadProblem


@compiled
def cut_values(bits: Any, starts: Any, operators: Any, value_s: Any) -> Any:
    """By closed set: seconds of the values that it cuts, and these values with the number of their
    operators inside.

    Args:
        bits: (n_sets, n_operators), 1 for members.
        starts, operators: `Lists` of each value's operators.
    """
    n_sets, n_values = len(bits), len(value_s)
    cut_s, begins = np.zeros(n_sets), np.zeros(n_sets + 1, np.int64)
    values, inside = np.empty(0, np.int64), np.empty(0, np.int64)
    for write in range(2):  # first count, then write
        if write:
            values, inside = np.empty(begins[-1], np.int64), np.empty(begins[-1], np.int64)
        for k in range(n_sets):
            at = begins[k]
            for v in range(n_values):
                n_inside = 0
                for o in range(starts[v], starts[v + 1]):
                    n_inside += bits[k, operators[o]]
                if 0 < n_inside < starts[v + 1] - starts[v]:
                    if write:
                        values[at], inside[at] = v, n_inside
                        cut_s[k] += value_s[v]
                    at += 1
            if not write:
                begins[k + 1] = at
    return cut_s, begins, values, inside


@inlined
def _shared_s(i: int, j: int, starts: Any, values: Any, inside: Any, value_s: Any) -> float:
    """Seconds that the values cut by both sets are counted too much: once where the stage between
    holds some of the value's operators, twice where it holds none."""
    a, b, end_a, end_b = starts[i], starts[j], starts[i + 1], starts[j + 1]
    found = 0.0
    while a < end_a and b < end_b:
        if values[a] < values[b]:
            a += 1
        elif values[a] > values[b]:
            b += 1
        else:
            found += value_s[values[a]] * (2.0 if inside[a] == inside[b] else 1.0)
            a += 1
            b += 1
    return found


@inlined
def _is_within(inner: Any, outer: Any) -> Any:
    extra = np.uint64(0)
    for w in range(len(inner)):
        extra |= inner[w] & ~outer[w]
    return extra == 0


@compiled
def add_device(
    before: Any, limit_s: float, n_after: int, memory_bytes: float, words: Any, seconds: Any,
    n_bytes: Any, cut_s: Any, starts: Any, values: Any, inside: Any, value_s: Any,
) -> Any:  # fmt: skip
    """By closed set: the least greatest load of its operators with one device more, and the set
    that the other devices hold.

    Args:
        before: the least loads without that device, infinite where there is none.
        limit_s: only loads below it count, so that sets which cannot be completed below it, or
            reached, are left out.
        n_after: devices that are to come.
    """
    n = len(seconds)
    best, source = before.copy(), np.arange(n)
    # The devices to come must be able to hold the rest.
    first = np.searchsorted(seconds, seconds[n - 1] - limit_s * n_after) if n_after else n - 1
    for i in range(n):
        if before[i] >= limit_s:
            continue
        for j in range(max(i + 1, first), n):
            work = seconds[j] - seconds[i]
            if work >= limit_s:
                break
            least = max(before[i], work + abs(cut_s[i] - cut_s[j]))
            if least >= best[j] or least >= limit_s:
                continue
            if n_bytes[j] - n_bytes[i] > memory_bytes or not _is_within(words[i], words[j]):
                continue
            shared = _shared_s(i, j, starts, values, inside, value_s)
            load = max(before[i], work + cut_s[i] + cut_s[j] - shared)
            if load < best[j]:
                best[j], source[j] = load, i
    return best, source


Words = npt.NDArray[np.uint64]


class ClosedSets(NamedTuple):
    """Closed sets by their seconds: a set stands after those that it includes.

    Attributes:
        members: as integers, bit i is operator i.
        words: the same as rows of 64 bits.
        seconds, n_bytes: of the members.
        cut_s: seconds of the values with operators on both sides.
        cut_starts, cut_values: those values by set, ascending, as `Lists` holds them.
        cut_inside: of each, how many of its operators are members.
        is_complete: all closed sets are here.
    """

    members: list[int]
    words: Words
    seconds: Floats
    n_bytes: Floats
    cut_s: Floats
    cut_starts: Integers
    cut_values: Integers
    cut_inside: Integers
    is_complete: bool

    def __len__(self) -> int:
        return len(self.members)


def list_closed_sets(problem: LoadProblem, most: int) -> ClosedSets:
    """All closed sets, or, where they are more than `most`, as many of the cheapest to cut at of
    each size."""
    found = _grow(problem, most, width=None)
    if found is not None:
        return _tabulate(problem, found, is_complete=True)
    width = max(1, most // (problem.n_operators + 1))
    beam = _grow(problem, most, width=width)
    assert beam is not None, "each size has at most its part"
    return _tabulate(problem, beam, is_complete=False)


def _grow(problem: LoadProblem, most: int, width: int | None) -> list[int] | None:
    """Closed sets by size, at most `width` of each; None where there are more than `most`."""
    n = problem.n_operators
    needs = [sum(1 << p for p in set(producers)) for producers in problem.producers]
    sources = tuple(i for i in range(n) if not needs[i])
    found, level = [0], {0: sources}
    while level:
        above: dict[int, tuple[int, ...]] = {}
        for members, ready in level.items():
            for i in ready:
                grown = members | 1 << i
                if grown not in above:
                    freed = [j for j in problem.consumers[i] if not needs[j] & ~grown]
                    above[grown] = (*(j for j in ready if j != i), *freed)
        if width is not None and len(above) > width:
            cut_s = _tabulate(problem, list(above), is_complete=False, is_ordered=True).cut_s
            kept = np.argsort(cut_s, kind="stable")[:width]
            items = list(above.items())
            above = dict(items[k] for k in kept)
        found += above
        if width is None and len(found) > most:
            return None
        level = above
    return found


def _tabulate(
    problem: LoadProblem, members: list[int], *, is_complete: bool, is_ordered: bool = False
) -> ClosedSets:
    n_words = (problem.n_operators + 63) // 64
    raw = b"".join(each.to_bytes(8 * n_words, "little") for each in members)
    words: Words = np.frombuffer(raw, dtype="<u8").reshape(len(members), n_words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=problem.n_operators)
    seconds = _sums(bits, problem.seconds)
    if not is_ordered:
        order = np.lexsort((bits.sum(axis=1), seconds))
        members, words, seconds = [members[k] for k in order], words[order], seconds[order]
        bits = bits[order]
    operators = Lists.from_lists([value.operators for value in problem.values])
    value_s = np.array([value.seconds for value in problem.values], dtype=np.float64)
    cut_s, starts, values, inside = cut_values(bits, *operators, value_s)
    return ClosedSets(
        members,
        np.ascontiguousarray(words),
        seconds,
        _sums(bits, problem.n_bytes),
        cut_s,
        starts,
        values,
        inside,
        is_complete,
    )


_TICK = 1e-12  # seconds and bytes are summed as multiples, so that order does not matter


def _sums(bits: npt.NDArray[np.uint8], amounts: object) -> Floats:
    """Sum of each set's amounts."""
    each = np.asarray(amounts, dtype=np.float64)
    unit = max(float(each.max(initial=0.0)) * _TICK, 1e-300)
    total: Floats = bits @ np.round(each / unit) * unit
    return total
