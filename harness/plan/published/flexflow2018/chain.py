"""The Markov chain: propose, simulate, accept or take back. All of it compiled.

Proposals: changes of a plan that are likely to be good ones.

FlexFlow draws a layer, a cut and a device for every part at random. Almost all of those scatter
neighbouring samples over all nodes. Most proposals here keep parts that talk near each other:

    segment     consecutive layers take one layer's cut and devices, which may first be spread anew:
                over an aligned range of devices, blockwise, cyclic or transposed
    move        one part to another device
    random      FlexFlow's own, so that every plan can be reached
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.plan.compiled import compiled
from harness.plan.published.flexflow2018.simulation import (
    CostTables,
    Floats,
    Ints,
    count_parts,
    simulate,
)

Random = NDArray[np.uint64]  # (1,), the generator's state

# Percent of the proposals up to and including each kind.
SEGMENT, MOVE = 80, 95


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
def propose(tables: CostTables, plan: Ints, random: Random) -> tuple[int, int]:
    """Change the plan in `plan`; returns the first and last layer that it wrote."""
    layer = draw_below(random, len(plan))
    kind = draw_below(random, 100)
    if kind < SEGMENT:
        return _write_segment(tables, plan, random, layer)
    n_devices = plan.shape[1] - 1
    if kind < MOVE:
        part = draw_below(random, count_parts(tables, plan, layer))
        plan[layer, part] = draw_below(random, n_devices)
    else:
        plan[layer, -1] = draw_below(random, tables.part_ms.shape[1])
        for part in range(count_parts(tables, plan, layer)):
            plan[layer, part] = draw_below(random, n_devices)
    return layer, layer


@compiled
def _write_segment(tables: CostTables, plan: Ints, random: Random, layer: int) -> tuple[int, int]:
    length = 2 + draw_below(random, len(plan) - 1)
    first = max(0, layer - length + 1) if draw_below(random, 2) else layer
    last = min(len(plan), first + length) - 1
    leader = first + draw_below(random, last - first + 1)
    if draw_below(random, 2):
        plan[leader, -1] = draw_below(random, tables.part_ms.shape[1])
        _spread(tables, plan, random, leader)
    n_theirs = count_parts(tables, plan, leader)
    for follower in range(first, last + 1):
        if follower != leader:
            plan[follower, -1] = plan[leader, -1]
            n_parts = count_parts(tables, plan, follower)
            for part in range(n_parts):
                plan[follower, part] = plan[leader, part * n_theirs // n_parts]
    return first, last


@compiled
def _spread(tables: CostTables, plan: Ints, random: Random, layer: int) -> None:
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


CURRENT, BEST = 0, 1
N_PROPOSED, N_BOUNDED = 0, 1


class MarkovChain(NamedTuple):
    """A search in progress. Plans are arrays as in `CostTables`.

    Attributes:
        trial: equals current outside of a proposal.
        cost_ms: (2,), of CURRENT and BEST.
        tally: (2,), proposals, and those of them that a lower bound refused.
    """

    tables: CostTables
    current: Ints
    trial: Ints
    best: Ints
    random: Random
    cost_ms: Floats
    tally: Ints


def new_chain(tables: CostTables, plan: Ints, seed: int) -> MarkovChain:
    """A chain with a plan that `restart` has yet to cost."""
    return MarkovChain(
        tables=tables,
        current=plan.copy(),
        trial=plan.copy(),
        best=plan.copy(),
        random=np.array([seed % 2**64], dtype=np.uint64),
        cost_ms=np.full(2, np.inf),
        tally=np.zeros(2, dtype=np.int64),
    )


@compiled
def restart(chain: MarkovChain, plan: Ints) -> float:
    """Make a plan the current one, and the best if it is; returns its cost in ms."""
    chain.current[:] = plan
    chain.trial[:] = plan
    chain.cost_ms[CURRENT] = simulate(chain.tables, plan, np.inf)
    _keep_best(chain)
    return float(chain.cost_ms[CURRENT])


@compiled
def walk(chain: MarkovChain, n_proposals: int, temperature_ms: float, use_bound: bool) -> None:
    """Judge `n_proposals` plans that differ from the current one.

    A plan that is slower by d is accepted with probability exp(-d / temperature_ms). The random
    number is drawn first, so that the slowest acceptable step is known before the simulation,
    which may then end early (`use_bound`); decisions are the same either way.
    """
    current, trial = chain.current, chain.trial
    n_done = 0
    while n_done < n_proposals:
        first, last = propose(chain.tables, trial, chain.random)
        if not _differ(chain.tables, trial, current, first, last):
            continue
        n_done += 1
        limit_ms = chain.cost_ms[CURRENT] - temperature_ms * np.log(1.0 - draw_unit(chain.random))
        cost_ms = simulate(chain.tables, trial, limit_ms if use_bound else np.inf)
        chain.tally[N_BOUNDED] += cost_ms == np.inf
        if cost_ms <= limit_ms:
            current[first : last + 1] = trial[first : last + 1]
            chain.cost_ms[CURRENT] = cost_ms
            _keep_best(chain)
        else:
            trial[first : last + 1] = current[first : last + 1]
    chain.tally[N_PROPOSED] += n_done


@compiled
def _differ(tables: CostTables, a: Ints, b: Ints, first: int, last: int) -> bool:
    """Whether two plans differ from layer `first` to layer `last`; what lies beyond a layer's
    parts is not read."""
    for layer in range(first, last + 1):
        n_parts = count_parts(tables, a, layer)
        if a[layer, -1] != b[layer, -1] or (a[layer, :n_parts] != b[layer, :n_parts]).any():
            return True
    return False


@compiled
def _keep_best(chain: MarkovChain) -> None:
    if chain.cost_ms[CURRENT] < chain.cost_ms[BEST]:
        chain.cost_ms[BEST] = chain.cost_ms[CURRENT]
        chain.best[:] = chain.current
