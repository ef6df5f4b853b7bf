"""The Markov chain: propose, simulate what it affects, accept or take back. All of it compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.plan.published.flexflow2018.compiled import compiled
from harness.plan.published.flexflow2018.proposals import Random, draw_unit, propose
from harness.plan.published.flexflow2018.synchronisation import synchronise
from harness.plan.published.flexflow2018.tables import (
    CHANNEL,
    FINISH,
    FREE,
    IS_FINAL,
    LAST_READY,
    LATEST_READY,
    SYNC_MS,
    SYNC_SQUARED,
    Events,
    Floats,
    Ints,
    State,
    Tables,
    Work,
    new_base,
    new_events,
    new_state,
    new_work,
)
from harness.plan.published.flexflow2018.timeline import remember, simulate_from, simulate_fully
from harness.plan.published.flexflow2018.transfers import count_parts

CURRENT, BEST = 0, 1
N_VALID, CLEAN_TO, N_PROPOSED, N_BY_WAY, LAST_WAY = 0, 1, 2, 3, 7


class Chain(NamedTuple):
    """A search in progress.

    Attributes:
        current, trial: outside of a proposal trial's plan equals current's, and so does its
            timeline up to what layer CLEAN_TO finds.
        base: (plane, layer, part), ready and finish of current's parts.
        best: (layer, n_devices + 1), the best plan.
        cost_ms: (2,), of CURRENT and BEST.
        tally: (8,), N_VALID, CLEAN_TO, N_PROPOSED, then proposals by the way of
            `timeline` that settled them, and the LAST_WAY that settled an accepted one.
    """

    tables: Tables
    current: State
    trial: State
    best: Ints
    work: Work
    events: Events
    base: Floats
    random: Random
    cost_ms: Floats
    tally: Ints


def new_chain(tables: Tables, seed: int) -> Chain:
    """A chain without a plan: call `restart` next."""
    return Chain(
        tables=tables,
        current=new_state(tables),
        trial=new_state(tables),
        best=np.zeros((tables.n_layers, tables.n_devices + 1), dtype=np.int64),
        work=new_work(tables),
        events=new_events(tables),
        base=new_base(tables),
        random=np.array([seed % 2**64], dtype=np.uint64),
        cost_ms=np.full(2, np.inf),
        tally=np.zeros(8, dtype=np.int64),
    )


@compiled
def restart(chain: Chain, plan: Ints) -> float:
    """Make a plan the current one, and the best if it is; returns its cost in ms."""
    tables = chain.tables
    _copy_plan(plan, chain.current.plan)
    _copy_plan(plan, chain.trial.plan)
    cost_ms, way, n_valid = simulate_fully(
        tables, chain.current, chain.work, chain.events, chain.base
    )
    remember(tables, chain.current, chain.work, chain.base, way, way, 0)
    chain.tally[LAST_WAY] = way
    _copy_timeline(tables, chain.current, chain.trial, 0, tables.n_layers)
    for layer in range(tables.n_layers):
        _copy_synchronisation(chain.current, chain.trial, layer)
    chain.cost_ms[CURRENT] = cost_ms
    chain.tally[N_VALID] = n_valid
    chain.tally[CLEAN_TO] = tables.n_layers
    _keep_best(chain)
    return cost_ms


@compiled
def walk(chain: Chain, n_proposals: int, temperature_ms: float, use_bound: bool) -> None:
    """Judge `n_proposals` plans that differ from the current one.

    A plan that is slower by d is accepted with probability exp(-d / temperature_ms). The random
    number is drawn first, so that the slowest acceptable step is known before the simulation,
    which may then end early (`use_bound`); decisions are the same either way.
    """
    tables, current, trial = chain.tables, chain.current, chain.trial
    work, events, tally = chain.work, chain.events, chain.tally
    n_done = 0
    while n_done < n_proposals:
        first, last = propose(tables, trial.plan, chain.random)
        while first <= last and not _differs(tables, trial.plan, current.plan, first):
            first += 1
        if first > last:
            continue
        n_done += 1
        limit_ms = chain.cost_ms[CURRENT] - temperature_ms * np.log(1.0 - draw_unit(chain.random))
        if tally[CLEAN_TO] < first:
            _copy_timeline(tables, current, trial, tally[CLEAN_TO], first)
        for layer in range(first, last + 1):
            synchronise(tables, trial, work, layer)
        bound_ms = limit_ms if use_bound else np.inf
        cost_ms, way, n_valid = simulate_from(
            tables, trial, work, events, chain.base, first, tally[N_VALID], bound_ms
        )
        tally[CLEAN_TO] = first
        tally[N_BY_WAY + way] += 1
        if cost_ms <= limit_ms:
            _accept(chain, first, last, cost_ms, way, n_valid)
        else:
            for layer in range(first, last + 1):
                _copy_cut(tables, current, trial, layer)
    tally[N_PROPOSED] += n_done


@compiled
def _differs(tables: Tables, a: Ints, b: Ints, layer: int) -> bool:
    if a[layer, tables.n_devices] != b[layer, tables.n_devices]:
        return True
    for part in range(count_parts(tables, a, layer)):  # noqa: SIM110  (numba has no generators in any)
        if a[layer, part] != b[layer, part]:
            return True
    return False


@compiled
def _accept(chain: Chain, first: int, last: int, cost_ms: float, way: int, n_valid: int) -> None:
    last_way = chain.tally[LAST_WAY]
    remember(chain.tables, chain.trial, chain.work, chain.base, way, last_way, first)
    chain.tally[LAST_WAY] = way
    for layer in range(first, last + 1):
        _copy_cut(chain.tables, chain.trial, chain.current, layer)
    _copy_timeline(chain.tables, chain.trial, chain.current, first, chain.tables.n_layers)
    chain.cost_ms[CURRENT] = cost_ms
    chain.tally[N_VALID] = n_valid
    chain.tally[CLEAN_TO] = chain.tables.n_layers
    _keep_best(chain)


@compiled
def _keep_best(chain: Chain) -> None:
    if chain.cost_ms[CURRENT] < chain.cost_ms[BEST]:
        chain.cost_ms[BEST] = chain.cost_ms[CURRENT]
        _copy_plan(chain.current.plan, chain.best)


@compiled
def _copy_plan(source: Ints, target: Ints) -> None:
    for layer in range(source.shape[0]):
        for k in range(source.shape[1]):
            target[layer, k] = source[layer, k]


@compiled
def _copy_cut(tables: Tables, source: State, target: State, layer: int) -> None:
    for k in range(tables.n_devices + 1):
        target.plan[layer, k] = source.plan[layer, k]
    _copy_synchronisation(source, target, layer)


@compiled
def _copy_synchronisation(source: State, target: State, layer: int) -> None:
    target.times[SYNC_MS, layer, 0] = source.times[SYNC_MS, layer, 0]
    target.times[SYNC_SQUARED, layer, 0] = source.times[SYNC_SQUARED, layer, 0]


@compiled
def _copy_timeline(tables: Tables, source: State, target: State, first: int, end: int) -> None:
    """Copy what layers `first` to `end - 1` did, and what layers `first` to `end` find."""
    for layer in range(first, end + 1):
        for k in range(tables.n_devices):
            target.times[FINISH, layer, k] = source.times[FINISH, layer, k]
            target.times[FREE, layer, k] = source.times[FREE, layer, k]
            target.times[LAST_READY, layer, k] = source.times[LAST_READY, layer, k]
            target.times[CHANNEL, layer, k] = source.times[CHANNEL, layer, k]
        target.times[LATEST_READY, layer, 0] = source.times[LATEST_READY, layer, 0]
        target.times[IS_FINAL, layer, 0] = source.times[IS_FINAL, layer, 0]
