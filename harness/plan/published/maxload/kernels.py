"""The loops of the maximum-load search, compiled. Import this module lazily: it imports numba."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.plan.compiled import compiled, inlined


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
