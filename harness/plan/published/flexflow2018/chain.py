"""The Markov chain: propose, simulate, accept or take back. All of it compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.plan.compiled import compiled
from harness.plan.published.flexflow2018.proposals import Random, draw_unit, propose
from harness.plan.published.flexflow2018.simulation import (
    CostTables,
    Floats,
    Ints,
    count_parts,
    simulate,
)

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
