"""Operators on equal devices as the maximum-load problem has them.

A value is what one operator produces and others read. The devices that hold some of its operators,
but not all, each pay its seconds once: the producer's device sends it, every other device of a
reader receives it. The load of a device is the seconds of its operators plus those of its values,
and the problem is to keep the greatest load small (Tarnawski et al., "Efficient algorithms for
device placement of DNN graph operators", NeurIPS 2020, section 3). In steady state a pipeline
finishes one microbatch in that time.

A closed set contains all producers of its operators. The closed sets of a problem, the values that
they cut, and the dynamic program over them are here too; its loops are compiled. Import this module
lazily: it imports numba.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from harness.plan.compiled import compiled, inlined
from harness.plan.published.pipedream.problem import (
    Flags,
    Words,
    consumers_of,
    flags_of,
    list_closed_sets,
    words_of,
)

Floats = npt.NDArray[np.float64]
Integers = npt.NDArray[np.int64]


class Value(NamedTuple):
    """Seconds to send or to receive it, and its producer and readers, distinct."""

    seconds: float
    operators: tuple[int, ...]


class Lists(NamedTuple):
    """Lists of different lengths in one array: list i is items[starts[i] : starts[i + 1]]."""

    starts: Integers
    items: Integers

    @classmethod
    def from_lists(cls, lists: Sequence[Sequence[int]]) -> Lists:
        starts = np.cumsum([0, *map(len, lists)], dtype=np.int64)
        return cls(starts, np.array([item for each in lists for item in each], dtype=np.int64))


@dataclass(frozen=True, kw_only=True)
class LoadProblem:
    """Operators in topological order, all lists by position.

    Attributes:
        seconds: of each operator on one device, all passes.
        n_bytes: that each operator keeps on its device.
        producers: positions of the operators that must not be in a later stage.
        memory_bytes: of each device; infinite for no limit.
    """

    names: list[str]
    seconds: Sequence[float]
    n_bytes: Sequence[float]
    producers: Sequence[Sequence[int]]
    values: list[Value]
    n_devices: int
    memory_bytes: float = math.inf

    @property
    def n_operators(self) -> int:
        return len(self.names)

    @cached_property
    def consumers(self) -> list[list[int]]:
        """Positions of the distinct consumers."""
        return consumers_of(self.producers)

    def load_s(self, operators: set[int]) -> float:
        """Of a device with these operators."""
        sent = (
            value.seconds
            for value in self.values
            if 0 < sum(i in operators for i in value.operators) < len(value.operators)
        )
        return math.fsum([*(self.seconds[i] for i in operators), *sent])


class Merged(NamedTuple):
    """A smaller problem, and the operators that each of its operators stands for."""

    problem: LoadProblem
    members: list[list[int]]


def merge_free(problem: LoadProblem) -> Merged:
    """Join operators that cost nothing, such as weights and unread outputs, with their neighbour.

    An operator that takes no time and has one neighbour, producer or consumer, which has part in
    all its values, may move to the neighbour's device: no load rises. So the least load stays, but
    for the memory that such operators fill.
    """
    whole = Merged(problem, [[i] for i in range(problem.n_operators)])
    while True:
        smaller = _merge(whole.problem, _free_moves(whole.problem))
        if len(smaller.members) == len(whole.members):
            return whole
        members = [[i for k in own for i in whole.members[k]] for own in smaller.members]
        whole = Merged(smaller.problem, members)


def _free_moves(problem: LoadProblem) -> list[int]:
    """By operator: the neighbour that it may join, which stays where it is, or itself."""
    common: dict[int, set[int]] = {}
    for value in problem.values:
        for i in value.operators:
            common[i] = common.get(i, set(value.operators)) & set(value.operators)
    into = list(range(problem.n_operators))
    for i, consumers in enumerate(problem.consumers):
        near = [*problem.producers[i], *consumers]
        if problem.seconds[i] == 0 and len(near) == 1:
            [other] = near
            if into[other] == other and other in common.get(i, {other}):
                into[i] = other
    return into


def _merge(problem: LoadProblem, into: list[int]) -> Merged:
    """Join operators with those that they go into, which stay."""
    kept = [i for i in range(problem.n_operators) if into[i] == i]
    position = {i: k for k, i in enumerate(kept)}
    at = [position[i] for i in into]
    members: list[list[int]] = [[] for _ in kept]
    for i, k in enumerate(at):
        members[k].append(i)
    values: dict[tuple[int, ...], float] = {}
    for value in problem.values:
        operators = tuple(sorted({at[i] for i in value.operators}))
        if len(operators) > 1 and value.seconds > 0:
            values[operators] = values.get(operators, 0.0) + value.seconds
    producers = [
        sorted({at[p] for i in own for p in problem.producers[i]} - {k})
        for k, own in enumerate(members)
    ]
    merged = replace(
        problem,
        names=[problem.names[i] for i in kept],
        seconds=[math.fsum(problem.seconds[i] for i in own) for own in members],
        n_bytes=[math.fsum(problem.n_bytes[i] for i in own) for own in members],
        producers=producers,
        values=[Value(seconds, operators) for operators, seconds in values.items()],
    )
    return Merged(merged, members)


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
        return tabulate(problem, found, is_complete=True)
    width = max(1, most // (problem.n_operators + 1))

    def cheapest(sets: list[int]) -> Integers:
        cut_s, *_ = _cut_values(problem, flags_of(sets, problem.n_operators))
        return np.argsort(cut_s, kind="stable")[:width]

    beam = list_closed_sets(problem.producers, max(most, problem.n_operators + 1), cheapest)
    assert beam is not None, "each size has at most its part"
    return tabulate(problem, beam, is_complete=False)


def _cut_values(problem: LoadProblem, flags: Flags) -> tuple[Floats, Integers, Integers, Integers]:
    operators = Lists.from_lists([value.operators for value in problem.values])
    value_s = np.array([value.seconds for value in problem.values], dtype=np.float64)
    found: tuple[Floats, Integers, Integers, Integers] = cut_values(flags, *operators, value_s)
    return found


def tabulate(problem: LoadProblem, sets: list[int], *, is_complete: bool) -> ClosedSets:
    """Some closed sets with their sums."""
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
    return flags @ np.round(each / unit) * unit
