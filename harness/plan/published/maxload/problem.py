"""Operators on equal devices as the maximum-load problem has them.

A value is what one operator produces and others read. The devices that hold some of its operators,
but not all, each pay its seconds once: the producer's device sends it, every other device of a
reader receives it. The load of a device is the seconds of its operators plus those of its values,
and the problem is to keep the greatest load small (Tarnawski et al., "Efficient algorithms for
device placement of DNN graph operators", NeurIPS 2020, section 3). In steady state a pipeline
finishes one microbatch in that time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.plan.published.closed_sets import consumers_of

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

    def max_load_s(self, device_of: Sequence[int]) -> float:
        """Of the busiest device of a placement."""
        own = [{i for i, d in enumerate(device_of) if d == device} for device in set(device_of)]
        return max(self.load_s(operators) for operators in own)

    def fits(self, device_of: Sequence[int]) -> bool:
        """Whether every device holds the bytes of its operators."""
        held = np.bincount(device_of, weights=self.n_bytes)
        return bool(held.max() <= self.memory_bytes)


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
    taken: set[int] = set()
    for i, consumers in enumerate(problem.consumers):
        near = [*problem.producers[i], *consumers]
        if problem.seconds[i] == 0 and len(near) == 1 and i not in taken:
            [other] = near
            if into[other] == other and other in common.get(i, {other}):
                into[i] = other
                taken.add(other)
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
