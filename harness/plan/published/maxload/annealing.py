"""Placements without contiguous stages: simulated annealing, compiled. Import this module lazily:
it imports numba.

A move takes an operator, or a cluster of up to 32 of one device that values join, to another
device, half of the time to one that shares a value with it. The energy is the greatest load plus a
part of the mean square of loads, which leads over plateaus, and grows with the bytes above the
memory, so that two operators may change places in two moves.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from harness.plan.compiled import compiled, inlined
from harness.plan.published.maxload.problem import Floats, Integers, Lists, LoadProblem

_COLDEST = 1e-4  # of the load


class Joined(NamedTuple):
    """The problem as arrays: operators by value, values by operator."""

    starts: Integers
    operators: Integers
    touching_starts: Integers
    touching: Integers
    value_s: Floats
    seconds: Floats
    n_bytes: Floats

    @classmethod
    def from_problem(cls, problem: LoadProblem) -> Joined:
        touching: list[list[int]] = [[] for _ in problem.names]
        for v, value in enumerate(problem.values):
            for i in value.operators:
                touching[i].append(v)
        return cls(
            *Lists.from_lists([value.operators for value in problem.values]),
            *Lists.from_lists(touching),
            np.array([value.seconds for value in problem.values], dtype=np.float64),
            np.asarray(problem.seconds, dtype=np.float64),
            np.asarray(problem.n_bytes, dtype=np.float64),
        )


class AnnealingState(NamedTuple):
    """A placement with its sums: load and bytes by device, operators by (value, device)."""

    device_of: Integers
    loads: Floats
    held: Floats
    counts: Integers


def anneal(
    problem: LoadProblem, start: Sequence[int], *, n_moves: int, hottest: float, seed: int
) -> tuple[list[int], float]:
    """The best placement of one chain, and its greatest load.

    Args:
        hottest: temperature at the start, as a part of the load.
    """
    device_of, load_s = _run_chain(
        Joined.from_problem(problem), np.array(start, dtype=np.int64), problem.n_devices,
        problem.memory_bytes, n_moves, hottest, _COLDEST, seed,
    )  # fmt: skip
    return device_of.tolist(), float(load_s)


@compiled
def _run_chain(
    joined: Any, device_of: Any, n_devices: int, memory_bytes: float, n_moves: int,
    hottest: float, coldest: float, seed: int,
) -> Any:  # fmt: skip
    np.random.seed(seed)
    state = AnnealingState(
        device_of.copy(), np.zeros(n_devices), np.zeros(n_devices),
        np.zeros((len(joined.value_s), n_devices), np.int64),
    )  # fmt: skip
    _add_up(joined, state)
    n = len(device_of)
    is_moved, moved = np.zeros(n, np.bool_), np.empty(n, np.int64)
    best, best_s = device_of.copy(), state.loads.max()
    energy = _energy(state, memory_bytes)
    for step in range(n_moves):
        temperature = best_s * hottest * (coldest / hottest) ** (step / n_moves)
        i = np.random.randint(n)
        source, target = state.device_of[i], _target(joined, state, i)
        if source == target:
            continue
        n_moved = _cluster(joined, state, i, moved, is_moved)
        for m in range(n_moved):
            is_moved[moved[m]] = False
            _move(joined, state, moved[m], target)
        found = _energy(state, memory_bytes)
        if found <= energy or np.random.random() < np.exp((energy - found) / temperature):
            energy = found
            is_best = state.loads.max() < best_s * (1 - 1e-9)
            if is_best and state.held.max() <= memory_bytes:
                best_s = state.loads.max()
                best[:] = state.device_of
        else:
            for m in range(n_moved - 1, -1, -1):
                _move(joined, state, moved[m], source)
    return best, best_s


@compiled
def _add_up(joined: Any, state: Any) -> None:
    for i, device in enumerate(state.device_of):
        state.loads[device] += joined.seconds[i]
        state.held[device] += joined.n_bytes[i]
    for v in range(len(joined.value_s)):
        for o in range(joined.starts[v], joined.starts[v + 1]):
            state.counts[v, state.device_of[joined.operators[o]]] += 1
        for device in range(len(state.loads)):
            if 0 < state.counts[v, device] < joined.starts[v + 1] - joined.starts[v]:
                state.loads[device] += joined.value_s[v]


@inlined
def _energy(state: Any, memory_bytes: float) -> Any:
    greatest, squares, excess = 0.0, 0.0, 0.0
    for load in state.loads:
        greatest = max(greatest, load)
        squares += load * load
    for held in state.held:
        excess += max(0.0, held / memory_bytes - 1)
    return greatest * (1 + 2 * excess) + 0.05 * np.sqrt(squares / len(state.loads))


@compiled
def _neighbour(joined: Any, i: int) -> Any:
    """An operator that shares a value with another; itself where it has none."""
    first, last = joined.touching_starts[i], joined.touching_starts[i + 1]
    if first == last:
        return i
    v = joined.touching[np.random.randint(first, last)]
    return joined.operators[np.random.randint(joined.starts[v], joined.starts[v + 1])]


@compiled
def _target(joined: Any, state: Any, i: int) -> Any:
    if np.random.random() < 0.5:
        return np.random.randint(len(state.loads))
    return state.device_of[_neighbour(joined, i)]


@compiled
def _cluster(joined: Any, state: Any, i: int, moved: Any, is_moved: Any) -> int:
    """Write an operator and some that values join with it, all of one device; how many."""
    moved[0], is_moved[i], n_moved = i, True, 1
    if np.random.random() < 0.5:
        return n_moved
    for _ in range(2 ** np.random.randint(1, 6)):
        other = _neighbour(joined, moved[np.random.randint(n_moved)])
        if not is_moved[other] and state.device_of[other] == state.device_of[i]:
            moved[n_moved], is_moved[other] = other, True
            n_moved += 1
    return n_moved


@compiled
def _move(joined: Any, state: Any, i: int, target: int) -> None:
    """Take one operator to another device, and keep all sums."""
    source = state.device_of[i]
    state.loads[source] -= joined.seconds[i]
    state.loads[target] += joined.seconds[i]
    state.held[source] -= joined.n_bytes[i]
    state.held[target] += joined.n_bytes[i]
    for k in range(joined.touching_starts[i], joined.touching_starts[i + 1]):
        v = joined.touching[k]
        size, value_s = joined.starts[v + 1] - joined.starts[v], joined.value_s[v]
        at_source, at_target = state.counts[v, source], state.counts[v, target]
        state.counts[v, source], state.counts[v, target] = at_source - 1, at_target + 1
        if at_source == size:
            state.loads[source] += value_s * (size > 1)
        elif at_source == 1:
            state.loads[source] -= value_s
        if at_target == size - 1:
            state.loads[target] -= value_s * (size > 1)
        elif at_target == 0:
            state.loads[target] += value_s
    state.device_of[i] = target
