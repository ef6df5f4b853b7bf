"""Proposals: small and large changes of a plan that are likely to be good ones.

FlexFlow draws a layer, a cut and a device for every part at random. Almost all of those scatter
neighbouring samples over all nodes. Most proposals here keep parts that talk near each other:

    spread      one layer on a contiguous, aligned range of devices, blockwise, cyclic or transposed
    copy        one layer takes its neighbour's devices
    segment     consecutive layers take one layer's cut and devices
    refine      one layer has more or fewer parts, which stay where their samples were
    move, swap  one part to another device; two parts change places
    random      FlexFlow's own, so that every plan can be reached
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from harness.plan.published.flexflow2018.compiled import compiled
from harness.plan.published.flexflow2018.simulation import Ints, Tables, count_parts

Random = NDArray[np.uint64]  # (1,), the generator's state

# Percent of the proposals up to and including each kind.
SPREAD, COPY, SEGMENT, REFINE, MOVE, SWAP = 25, 40, 55, 70, 85, 95


@compiled
def draw_bits(random: Random) -> np.uint64:
    """The next 64 random bits (splitmix64; Steele, Lea and Flood, OOPSLA 2014)."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    z = random[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint64(z ^ (z >> np.uint64(31)))


@compiled
def draw_below(random: Random, n: int) -> int:
    """A whole number from 0 to n - 1."""
    high = draw_bits(random) >> np.uint64(32)
    return int(np.int64((high * np.uint64(n)) >> np.uint64(32)))


@compiled
def draw_unit(random: Random) -> float:
    """A number from 0 up to, without, 1."""
    return float(draw_bits(random) >> np.uint64(11)) * 2.0**-53


@compiled
def propose(tables: Tables, plan: Ints, random: Random) -> tuple[int, int]:
    """Change the plan in `plan`; returns the first and last layer that it wrote."""
    layer = draw_below(random, len(plan))
    kind = draw_below(random, 100)
    if kind < SPREAD:
        _draw_cut(tables, plan, random, layer)
        _spread(tables, plan, random, layer)
    elif kind < COPY:
        _copy_neighbour(tables, plan, random, layer)
    elif kind < SEGMENT:
        return _write_segment(tables, plan, random, layer)
    elif kind < REFINE:
        _refine(tables, plan, random, layer)
    elif kind < MOVE:
        part = draw_below(random, count_parts(tables, plan, layer))
        plan[layer, part] = draw_below(random, (plan.shape[1] - 1))
    elif kind < SWAP:
        n_parts = count_parts(tables, plan, layer)
        a, b = draw_below(random, n_parts), draw_below(random, n_parts)
        devices = plan[layer]
        devices[a], devices[b] = devices[b], devices[a]
    else:
        _draw_cut(tables, plan, random, layer)
        for part in range(count_parts(tables, plan, layer)):
            plan[layer, part] = draw_below(random, (plan.shape[1] - 1))
    return layer, layer


@compiled
def _draw_cut(tables: Tables, plan: Ints, random: Random, layer: int) -> None:
    plan[layer, -1] = draw_below(random, tables.part_ms.shape[1])


@compiled
def _spread(tables: Tables, plan: Ints, random: Random, layer: int) -> None:
    """Put the parts on an aligned power of two of consecutive devices."""
    n_parts = count_parts(tables, plan, layer)
    n_samples = 1 << plan[layer, -1]
    n_features = n_parts // n_samples
    width = 1 << draw_below(random, tables.part_ms.shape[1])
    base = width * draw_below(random, (plan.shape[1] - 1) // width)
    cyclic, transposed = draw_below(random, 2), draw_below(random, 2)
    for part in range(n_parts):
        place = part
        if transposed:
            place = part % n_features * n_samples + part // n_features
        offset = place % width if cyclic or n_parts < width else place * width // n_parts
        plan[layer, part] = base + offset


@compiled
def _copy_neighbour(tables: Tables, plan: Ints, random: Random, layer: int) -> None:
    neighbour = layer + 1 if layer == 0 or draw_below(random, 2) else layer - 1
    if neighbour == len(plan):
        neighbour = layer - 1
    if draw_below(random, 2):
        plan[layer, -1] = plan[neighbour, -1]
    _follow(tables, plan, layer, neighbour)


@compiled
def _follow(tables: Tables, plan: Ints, layer: int, leader: int) -> None:
    """Give each part the device of the leader's part at the same place."""
    n_parts, n_theirs = count_parts(tables, plan, layer), count_parts(tables, plan, leader)
    for part in range(n_parts):
        plan[layer, part] = plan[leader, part * n_theirs // n_parts]


@compiled
def _write_segment(tables: Tables, plan: Ints, random: Random, layer: int) -> tuple[int, int]:
    length = 2 + draw_below(random, len(plan) - 1)
    first = max(0, layer - length + 1) if draw_below(random, 2) else layer
    last = min(len(plan), first + length) - 1
    leader = first + draw_below(random, last - first + 1)
    if draw_below(random, 2):
        _draw_cut(tables, plan, random, leader)
        _spread(tables, plan, random, leader)
    for follower in range(first, last + 1):
        if follower != leader:
            plan[follower, -1] = plan[leader, -1]
            _follow(tables, plan, follower, leader)
    return first, last


@compiled
def _refine(tables: Tables, plan: Ints, random: Random, layer: int) -> None:
    """Double or halve the sample blocks; parts keep the device of the block they come from."""
    s = plan[layer, -1] + (1 if draw_below(random, 2) else -1)
    s = min(max(s, 0), tables.part_ms.shape[1] - 1)
    devices = plan[layer]
    n_before = count_parts(tables, plan, layer)
    plan[layer, -1] = s
    n_parts = count_parts(tables, plan, layer)
    if n_parts > n_before:
        for part in range(n_parts - 1, -1, -1):
            devices[part] = devices[part * n_before // n_parts]
    else:
        for part in range(n_parts):
            devices[part] = devices[part * n_before // n_parts]
