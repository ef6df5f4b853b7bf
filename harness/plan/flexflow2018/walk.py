"""The Markov chain: propose, simulate what it affects, accept or take back. All of it compiled."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from harness.plan.flexflow2018.compiled import compiled
from harness.plan.flexflow2018.proposals import Random, draw_unit, propose
from harness.plan.flexflow2018.tables import (
    Floats,
    Ints,
    Scratch,
    State,
    Tables,
    new_scratch,
    new_state,
)
from harness.plan.flexflow2018.timeline import simulate_from, simulate_fully
from harness.plan.flexflow2018.transfers import count_parts, synchronise

CURRENT, BEST = 0, 1
N_VALID, DIRTY_FROM, N_ACCEPTED, N_PROPOSED = 0, 1, 2, 3


class Chain(NamedTuple):
    """A search in progress.

    Attributes:
        current, trial, best: plans; only plan and cost are kept of the best. Outside of a proposal
            trial's plan equals current's; its timeline does up to layer `DIRTY_FROM`.
        cost_ms: (2,), of CURRENT and BEST.
        count: (4,), indexed by N_VALID, DIRTY_FROM, N_ACCEPTED, N_PROPOSED.
        n_by_way: (3,), proposals simulated in each way of `timeline`.
    """

    tables: Tables
    current: State
    trial: State
    best: State
    scratch: Scratch
    random: Random
    cost_ms: Floats
    count: Ints
    n_by_way: Ints


def new_chain(tables: Tables, seed: int) -> Chain:
    """A chain without a plan: call `restart` next."""
    return Chain(
        tables=tables,
        current=new_state(tables),
        trial=new_state(tables),
        best=new_state(tables),
        scratch=new_scratch(tables),
        random=np.array([seed % 2**64], dtype=np.uint64),
        cost_ms=np.full(2, np.inf),
        count=np.zeros(4, dtype=np.int64),
        n_by_way=np.zeros(3, dtype=np.int64),
    )


@compiled
def restart(chain: Chain, s: Ints, devices: Ints) -> None:
    """Make a plan the current one, and the best if it is."""
    _write(chain.current, s, devices)
    _write(chain.trial, s, devices)
    cost_ms, _, n_valid = simulate_fully(chain.tables, chain.current, chain.scratch)
    _copy_timeline(chain.tables, chain.current, chain.trial, 0, chain.tables.n_layers)
    for layer in range(chain.tables.n_layers):
        _copy_synchronisation(chain.current, chain.trial, layer)
    chain.cost_ms[CURRENT] = cost_ms
    chain.count[N_VALID] = n_valid
    chain.count[DIRTY_FROM] = chain.tables.n_layers
    _keep_best(chain)


@compiled
def walk(chain: Chain, n_proposals: int, temperature_ms: float) -> None:
    """Judge `n_proposals` plans that differ from the current one.

    A plan that is slower by d is accepted with probability exp(-d / temperature_ms).
    """
    n_done = 0
    while n_done < n_proposals:
        first, last = propose(chain.tables, chain.trial, chain.random)
        while first <= last and not _differs(chain, first):
            first += 1
        if first > last:
            continue
        n_done += 1
        cost_ms, n_valid = _judge(chain, first, last)
        slower_ms = cost_ms - chain.cost_ms[CURRENT]
        if slower_ms <= 0 or draw_unit(chain.random) < np.exp(-slower_ms / temperature_ms):
            _accept(chain, first, last, cost_ms, n_valid)
        else:
            _take_back(chain, first, last)
    chain.count[N_PROPOSED] += n_done


@compiled
def _differs(chain: Chain, layer: int) -> bool:
    if chain.trial.s[layer] != chain.current.s[layer]:
        return True
    for part in range(count_parts(chain.tables, chain.trial, layer)):
        if chain.trial.devices[layer, part] != chain.current.devices[layer, part]:
            return True
    return False


@compiled
def _judge(chain: Chain, first: int, last: int) -> tuple[float, int]:
    dirty = chain.count[DIRTY_FROM]
    if dirty < first:
        _copy_timeline(chain.tables, chain.current, chain.trial, dirty, first)
    chain.count[DIRTY_FROM] = min(dirty, first)
    for layer in range(first, last + 1):
        synchronise(chain.tables, chain.trial, chain.scratch, layer)
    cost_ms, way, n_valid = simulate_from(
        chain.tables, chain.trial, chain.scratch, first, chain.count[N_VALID]
    )
    chain.count[DIRTY_FROM] = first
    chain.n_by_way[way] += 1
    return cost_ms, n_valid


@compiled
def _accept(chain: Chain, first: int, last: int, cost_ms: float, n_valid: int) -> None:
    for layer in range(first, last + 1):
        _copy_cut(chain.tables, chain.trial, chain.current, layer)
    _copy_timeline(chain.tables, chain.trial, chain.current, first, chain.tables.n_layers)
    chain.cost_ms[CURRENT] = cost_ms
    chain.count[N_VALID] = n_valid
    chain.count[DIRTY_FROM] = chain.tables.n_layers
    chain.count[N_ACCEPTED] += 1
    if cost_ms < chain.cost_ms[BEST]:
        _keep_best(chain)


@compiled
def _take_back(chain: Chain, first: int, last: int) -> None:
    for layer in range(first, last + 1):
        _copy_cut(chain.tables, chain.current, chain.trial, layer)


@compiled
def _keep_best(chain: Chain) -> None:
    if chain.cost_ms[CURRENT] < chain.cost_ms[BEST]:
        chain.cost_ms[BEST] = chain.cost_ms[CURRENT]
        _write(chain.best, chain.current.s, chain.current.devices)


@compiled
def _write(state: State, s: Ints, devices: Ints) -> None:
    for layer in range(s.size):
        state.s[layer] = s[layer]
        for part in range(devices.shape[1]):
            state.devices[layer, part] = devices[layer, part]


@compiled
def _copy_cut(tables: Tables, source: State, target: State, layer: int) -> None:
    target.s[layer] = source.s[layer]
    for part in range(tables.n_devices):
        target.devices[layer, part] = source.devices[layer, part]
    _copy_synchronisation(source, target, layer)


@compiled
def _copy_synchronisation(source: State, target: State, layer: int) -> None:
    target.transfer_ms[layer] = source.transfer_ms[layer]
    target.squared_parts[layer] = source.squared_parts[layer]


@compiled
def _copy_timeline(tables: Tables, source: State, target: State, first: int, end: int) -> None:
    """Copy what layers `first` to `end - 1` did, and what layers `first` to `end` find."""
    for layer in range(first, end):
        for k in range(tables.n_devices):
            target.finish_ms[layer, k] = source.finish_ms[layer, k]
    for layer in range(first, end + 1):
        for k in range(tables.n_devices):
            target.free_ms[layer, k] = source.free_ms[layer, k]
            target.last_ready_ms[layer, k] = source.last_ready_ms[layer, k]
            target.channel_ms[layer, k] = source.channel_ms[layer, k]
