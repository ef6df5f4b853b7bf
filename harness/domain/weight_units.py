"""Units of sharded weights: which weights are gathered together, and when they have memory.

A unit is gathered while the one before is used. The last unit of an action (the forward or backward
of one microbatch on one stage) that is the first of the next one stays:

    unit 0   |gather|--- operators ---|free
    unit 1           |gather|         |--- operators ---|free
    unit 2                            |gather|          |--- operators ---| kept for its backward

Weights that are not freed are gathered once a step, in the same units. Simulator and executor both
read these rules.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from itertools import groupby, pairwise
from typing import NamedTuple

from harness.domain.schedule import Action
from harness.domain.shard_state import Group

# Of the weights, in a unit of whole segments.
_LARGEST_SHARE = 1 / 8
# Operators whose matrices autocast rounds before each use, so that they may travel rounded.
ROUNDED_KINDS = frozenset(("linear", "conv2d", "attention"))


class SharedWeight(NamedTuple):
    """A slice of weights that several devices share.

    Attributes:
        operators: positions of those that use it, ascending.
        stages: pipeline stages of these operators.
        dtype: a unit has weights of one.
        is_alike: whether all devices use it in the same operators, so that each can wait for it
            there.
        is_rounded: whether autocast rounds it before each use.
    """

    devices: Group
    operators: tuple[int, ...]
    stages: frozenset[int]
    n_bytes: int
    dtype: str = "float32"
    is_alike: bool = True
    is_rounded: bool = False


class Unit(NamedTuple):
    """Weights that are gathered together.

    Attributes:
        operators: positions of all that use one of the weights, ascending.
        weights: places in the list of weights from which units were made.
        is_freed: after each use; only where alike.
        rounded_bytes: of `n_bytes`, of weights that autocast rounds.
    """

    devices: Group
    operators: tuple[int, ...]
    stages: frozenset[int]
    n_bytes: int
    weights: tuple[int, ...]
    is_alike: bool
    is_freed: bool
    rounded_bytes: int

    @property
    def first(self) -> int:
        return self.operators[0]

    @property
    def last(self) -> int:
        return self.operators[-1]

    def sent_bytes(self, wire_bytes_per_fp32_byte: float) -> int:
        """Bytes that are gathered: freed weights that autocast rounds travel in its dtype. Others
        do not, because the optimizer updates a part of each in place."""
        saved = self.rounded_bytes * (1 - wire_bytes_per_fp32_byte) * self.is_freed
        return self.n_bytes - round(saved)


def plan_units(
    weights: Sequence[SharedWeight],
    limit: int,
    *,
    segments: Mapping[int, int],
    recomputes: Sequence[bool],
    is_freeing: bool,
) -> list[Unit]:
    """Cut weights, in the order of their first use, into units of `limit` bytes or more; a unit has
    one set of devices and ends with an operator.

    Args:
        segments: by position, of the operators in stages that run again in several segments.
        recomputes: by stage, whether it runs forward again.
        is_freeing: weights are freed after each use.

    Returns:
        The units in the order of their first use.
    """
    alike: dict[object, list[int]] = defaultdict(list)
    for number, weight in enumerate(weights):
        alike[weight.devices, weight.stages, weight.dtype, weight.is_alike].append(number)

    def first_use(number: int) -> int:
        return weights[number].operators[0]

    units = []
    for numbers in alike.values():
        in_order = sorted(numbers, key=first_use)
        by_operator = [list(group) for _, group in groupby(in_order, key=first_use)]
        sizes = [sum(weights[number].n_bytes for number in group) for group in by_operator]
        shared, cuts = weights[numbers[0]], None
        # Units that are not freed end with segments only, and never in a stage of a single one.
        single = None if is_freeing or not any(recomputes[k] for k in shared.stages) else 0
        at = [segments.get(first_use(group[0]), single) for group in by_operator]
        if shared.is_alike and at[0] is not None:
            cuts = [k for k in range(1, len(at)) if at[k] != at[k - 1]]
        for start, end in pairwise((0, *unit_ends(sizes, limit, cuts, is_freeing=is_freeing))):
            members = [number for group in by_operator[start:end] for number in group]
            users = {op for number in members for op in weights[number].operators}
            units.append(
                Unit(
                    devices=shared.devices,
                    operators=tuple(sorted(users)),
                    stages=shared.stages,
                    n_bytes=sum(sizes[start:end]),
                    weights=tuple(members),
                    is_alike=shared.is_alike,
                    is_freed=is_freeing and shared.is_alike,
                    rounded_bytes=sum(weights[k].n_bytes for k in members if weights[k].is_rounded),
                )
            )
    return sorted(units, key=lambda unit: (unit.first, unit.devices, unit.is_alike))


def unit_ends(
    sizes: Sequence[float], limit: float, cuts: Collection[int] | None, *, is_freeing: bool
) -> list[int]:
    """Cut a row of sizes into units, each of which ends with the size that reaches the limit.

    In a stage that runs again in segments, a unit ends with a segment, because it cuts one in which
    it ends; but with few segments, units of whole ones would be most of the weights.

    Args:
        cuts: where these segments begin.
        is_freeing: units are freed after use, so that none may be most of the weights.

    Returns:
        One more than the position of each unit's last size.
    """
    ends, filled = [], 0.0
    most = sum(sizes) * _LARGEST_SHARE if is_freeing else math.inf
    for end, size in enumerate(sizes, 1):
        filled += size
        is_whole = cuts is None or end in cuts or filled >= most
        if end == len(sizes) or (filled >= limit and is_whole):
            ends.append(end)
            filled = 0.0
    return ends


def starts_segment(units: Set[int], used: Set[int]) -> bool:
    """Whether an operator of a stage that runs again begins another segment, because it uses other
    units of freed weights than the segment so far."""
    return bool(used) and not units <= used


class Visit(NamedTuple):
    """One stay of a unit in memory: numbers of the actions of its first and last use."""

    unit: int
    first: int
    last: int


def plan_visits(actions: Iterable[Action], units: Mapping[int, Unit]) -> list[Visit]:
    """The visits of a step, in the order in which all devices gather.

    Args:
        actions: of a device of the units.
        units: freed ones of one set of devices, by number, in the order of their first use.
    """
    backward = sorted(units, key=lambda number: (units[number].last, number), reverse=True)
    orders = {"forward": list(units), "backward": backward, "weight": []}
    visits: list[Visit] = []
    for at, action in enumerate(actions):
        for number in orders[action.kind]:
            if action.stage not in units[number].stages:
                continue
            if visits and visits[-1].unit == number:
                visits[-1] = visits[-1]._replace(last=at)
            else:
                visits.append(Visit(number, at, at))
    return visits
