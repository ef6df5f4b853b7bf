"""The search: exact for contiguous stages where all closed sets can be listed, then annealing.

Contiguous stages are a chain of closed sets, one device each. F[m][J] is the least greatest load of
the operators of J on m devices, the least over closed sets I within J of

    max(F[m - 1][I], seconds of J - I + values that J - I shares with other devices).

The values of J - I are those that I cuts and those that J cuts, each once, without those that pass
it by. A plan over a few sets gives the limit above which the full program looks at nothing; a set
that no plan below the limit can reach, or complete, is left out.

Placements without contiguous stages are found by simulated annealing, compiled. A move takes an
operator, or a cluster of up to 32 of one device that values join, to another device, half of the
time to one that shares a value with it. The energy is the greatest load plus a part of the mean
square of loads, which leads over plateaus, and grows with the bytes above the memory, so that two
operators may change places in two moves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from harness.plan.compiled import compiled, inlined
from harness.plan.published.maxload.problem import (
    ClosedSets,
    Floats,
    Integers,
    Lists,
    LoadProblem,
    add_device,
    cuts_of,
    merge_free,
    tabulate,
)
from harness.plan.published.pipedream.problem import cheapest_of_parts, members_of

_MOST_CUTS = 64
_LARGEST = 2**31 - 1  # scipy's flows are in 32 bits
_WHOLE = 1_000_000_000  # the work of all operators, as a flow


def lower_bound_s(problem: LoadProblem) -> float:
    """The greatest of: the work of all over the devices; for each operator, the least load of any
    device that holds it (a minimum cut, since loads are submodular)."""
    bound_s = max(math.fsum(problem.seconds) / problem.n_devices, max(problem.seconds))
    most_s = np.array(problem.seconds, dtype=np.float64)
    for value in problem.values:
        most_s[list(value.operators)] += value.seconds
    heaviest = np.argsort(-most_s, kind="stable")[:_MOST_CUTS]
    heavy = [int(i) for i in heaviest if most_s[i] > bound_s]
    return max([bound_s, *_least_loads_s(problem, heavy)])


def _least_loads_s(problem: LoadProblem, operators: list[int]) -> list[float]:
    """By operator: the least load of a device with it, rounded down."""
    from scipy.sparse import csr_array
    from scipy.sparse.csgraph import maximum_flow

    total_s = math.fsum(problem.seconds)
    if not operators or total_s <= 0:
        return []
    n = problem.n_operators
    sink = n + 2 * len(problem.values)
    edges = [(i, sink, _flow(s, total_s)) for i, s in enumerate(problem.seconds) if s > 0]
    for v, value in enumerate(problem.values):
        # Cut unless all operators of the value are on one side.
        entry, leave = n + 2 * v, n + 2 * v + 1
        edges.append((entry, leave, _flow(value.seconds, total_s)))
        for i in value.operators:
            edges += [(i, entry, _LARGEST), (leave, i, _LARGEST)]
    sources, targets, flows = np.array(edges, dtype=np.int32).T
    network = csr_array((flows, (sources, targets)), shape=(sink + 1, sink + 1))
    return [float(maximum_flow(network, i, sink).flow_value) / _WHOLE * total_s for i in operators]


def _flow(seconds: float, total_s: float) -> int:
    return min(_WHOLE, int(seconds / total_s * _WHOLE))


MOST_SETS = 60_000
_FEW_SETS = 1500
_ROUNDING = 1 + 1e-12
_LEAST_MOVES, _MOVES_EACH = 1_000_000, 500  # of a chain: at least; for each operator and device
_HOTTEST = (0.02, 0.02, 0.1, 0.02, 0.3, 0.05)  # of the chains


class OperatorPlacement(NamedTuple):
    """The device of each operator, and the greatest load."""

    device_of: list[int]
    load_s: float


class Found(NamedTuple):
    """The best placements.

    Attributes:
        contiguous: devices follow the flow; device d is stage d.
        free: without that condition; the same where nothing better was found.
        n_sets: closed sets that were considered.
        contiguous_bound_s: no contiguous placement is better; its own load where it is optimal.
        bound_s: no placement is better.
    """

    contiguous: OperatorPlacement
    free: OperatorPlacement
    n_sets: int
    contiguous_bound_s: float
    bound_s: float

    @property
    def is_exact(self) -> bool:
        """Whether the contiguous placement is the best one."""
        return self.contiguous_bound_s == self.contiguous.load_s


def search(
    problem: LoadProblem,
    *,
    most_sets: int = MOST_SETS,
    effort: float = 1.0,
    seed: int = 0,
    report: Callable[[OperatorPlacement, int], None] = lambda placement, n_sets: None,
) -> Found | None:
    """Find the best placements; None where no contiguous one fits the memory.

    Args:
        effort: of annealing, times the usual number of moves; 0 for none.
        report: called with the plan over few sets, and the number of all.
    """
    small, members = merge_free(problem)
    sets = cuts_of(small, most_sets)
    quick = best_chain(small, thin(small, sets, _FEW_SETS), math.inf)
    if quick is not None and len(sets) > _FEW_SETS:
        report(quick, len(sets))
    limit_s = math.inf if quick is None else quick.load_s
    contiguous = best_chain(small, sets, limit_s) or quick
    if contiguous is None:
        return None
    bound_s = lower_bound_s(small)
    free = anneal_placement(small, contiguous, bound_s, effort, seed)
    return Found(
        contiguous=_spread(problem, contiguous, members),
        free=_spread(problem, free, members),
        n_sets=len(sets),
        contiguous_bound_s=contiguous.load_s if sets.is_complete else bound_s,
        bound_s=bound_s,
    )


def _spread(
    problem: LoadProblem, placement: OperatorPlacement, members: list[list[int]]
) -> OperatorPlacement:
    """Of the operators that the merged ones stand for."""
    device_of = [0] * problem.n_operators
    for device, own in zip(placement.device_of, members, strict=True):
        for i in own:
            device_of[i] = device
    return OperatorPlacement(device_of, placement.load_s)


def thin(problem: LoadProblem, sets: ClosedSets, most: int) -> ClosedSets:
    """The sets cheapest to cut at, of each part of the work."""
    if len(sets) <= most:
        return sets
    kept = cheapest_of_parts(sets.seconds, sets.cut_s, most // 3, 3)
    return tabulate(problem, [sets.members[k] for k in kept], is_complete=False)


def best_chain(problem: LoadProblem, sets: ClosedSets, limit_s: float) -> OperatorPlacement | None:
    """The best placement over the given sets; None where none is below the limit."""
    value_s = np.array([value.seconds for value in problem.values], dtype=np.float64)
    loads = np.full(len(sets), math.inf)
    loads[0] = 0.0
    sources = []
    for n_after in reversed(range(problem.n_devices)):
        loads, source = add_device(
            loads, limit_s * _ROUNDING, n_after, problem.memory_bytes, sets.words, sets.seconds,
            sets.n_bytes, sets.cut_s, sets.cut_starts, sets.cut_values, sets.cut_inside, value_s,
        )  # fmt: skip
        sources.append(source)
    if not loads[-1] < math.inf:
        return None
    return OperatorPlacement(_devices(problem, sets, sources), float(loads[-1]))


def _devices(problem: LoadProblem, sets: ClosedSets, sources: Sequence[Floats]) -> list[int]:
    """Follow the chain back; devices in the order of the flow, idle ones last."""
    chain = [len(sets) - 1]
    for source in reversed(sources):
        if source[chain[-1]] != chain[-1]:
            chain.append(int(source[chain[-1]]))
    device_of = [0] * problem.n_operators
    for device, (start, end) in enumerate(zip(chain[:0:-1], chain[-2::-1], strict=True)):
        inside = sets.members[end] & ~sets.members[start]
        for i in members_of(inside):
            device_of[i] = device
    return device_of


def anneal_placement(
    problem: LoadProblem, start: OperatorPlacement, bound_s: float, effort: float, seed: int
) -> OperatorPlacement:
    """Improve a placement without keeping stages contiguous."""
    n_each = problem.n_operators * problem.n_devices
    n_placements = problem.n_devices**problem.n_operators
    n_moves = min(int(effort * max(_LEAST_MOVES, _MOVES_EACH * n_each)), 100 * n_placements)
    best, joined = start, Joined.from_problem(problem)
    for k, hottest in enumerate(_HOTTEST if problem.n_devices > 1 else ()):
        if n_moves == 0 or best.load_s <= bound_s * _ROUNDING:
            break
        device_of, load_s = _run_chain(
            joined, np.array((best if k % 2 else start).device_of), problem.n_devices,
            problem.memory_bytes, n_moves, hottest, 8 * seed + k,
        )  # fmt: skip
        if load_s < best.load_s * (1 - 1e-9):
            best = OperatorPlacement(device_of.tolist(), float(load_s))
    return best


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


_COLDEST = 1e-4  # of the load


@compiled
def _run_chain(
    joined: Any, device_of: Any, n_devices: int, memory_bytes: float, n_moves: int,
    hottest: float, seed: int,
) -> Any:  # fmt: skip
    """The best placement of one chain, and its greatest load, of which `hottest` is a part."""
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
        temperature = best_s * hottest * (_COLDEST / hottest) ** (step / n_moves)
        i = np.random.randint(n)
        if np.random.random() < 0.5:
            target = np.random.randint(n_devices)
        else:
            target = state.device_of[_neighbour(joined, i)]
        source = state.device_of[i]
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
