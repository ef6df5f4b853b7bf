"""The closed sets of a problem, the values that they cut, and the dynamic program over them.

Its loops are compiled. Import this module lazily: it imports numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from harness.plan.compiled import compiled, inlined
from harness.plan.published.closed_sets import Flags, Words, flags_of, list_closed_sets, words_of
from harness.plan.published.maxload.problem import Floats, Integers, Lists, LoadProblem


@compiled
def cut_values(bits: Any, starts: Any, operators: Any, value_s: Any) -> Any:
    """By closed set: seconds of the values that it cuts, and these values with the number of their
    operators inside.

    Args:
        bits: `Flags` of the sets.
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


def cuts_of(problem: LoadProblem, most: int) -> ClosedSets:
    """All closed sets, or, where they are more than `most`, as many of the cheapest to cut at of
    each size."""
    found = list_closed_sets(problem.producers, most)
    if found is not None:
        return _tabulate(problem, found, is_complete=True)
    width = max(1, most // (problem.n_operators + 1))

    def cheapest(sets: list[int]) -> Integers:
        cut_s, *_ = _cut_values(problem, flags_of(sets, problem.n_operators))
        return np.argsort(cut_s, kind="stable")[:width]

    beam = list_closed_sets(problem.producers, max(most, problem.n_operators + 1), cheapest)
    assert beam is not None, "each size has at most its part"
    return _tabulate(problem, beam, is_complete=False)


def _cut_values(problem: LoadProblem, flags: Flags) -> tuple[Floats, Integers, Integers, Integers]:
    operators = Lists.from_lists([value.operators for value in problem.values])
    value_s = np.array([value.seconds for value in problem.values], dtype=np.float64)
    found: tuple[Floats, Integers, Integers, Integers] = cut_values(flags, *operators, value_s)
    return found


def _tabulate(problem: LoadProblem, sets: list[int], *, is_complete: bool) -> ClosedSets:
    flags = flags_of(sets, problem.n_operators)
    seconds = _sums(flags, problem.seconds)
    order = np.lexsort((flags.sum(axis=1), seconds))
    members, flags = [sets[k] for k in order], flags[order]
    return ClosedSets(
        members,
        words_of(members, problem.n_operators).copy(),
        seconds[order],
        _sums(flags, problem.n_bytes),
        *_cut_values(problem, flags),
        is_complete,
    )


_TICK = 1e-12  # seconds and bytes are summed as multiples, so that order does not matter


def _sums(flags: Flags, amounts: object) -> Floats:
    """Sum of each set's amounts."""
    each = np.asarray(amounts, dtype=np.float64)
    unit = max(float(each.max(initial=0.0)) * _TICK, 1e-300)
    total: Floats = flags @ np.round(each / unit) * unit
    return total
