"""The search: exact for contiguous stages where all closed sets can be listed, then annealing.

Contiguous stages are a chain of closed sets, one device each. F[m][J] is the least greatest load of
the operators of J on m devices, the least over closed sets I within J of

    max(F[m - 1][I], seconds of J - I + values that J - I shares with other devices).

The values of J - I are those that I cuts and those that J cuts, each once, without those that pass
it by. A plan over a few sets gives the limit above which the full program looks at nothing; a set
that no plan below the limit can reach, or complete, is left out.

Loads that no placement can be below.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from harness.plan.published.maxload.annealing import anneal
from harness.plan.published.maxload.problem import (
    ClosedSets,
    Floats,
    LoadProblem,
    add_device,
    cuts_of,
    merge_free,
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
    sources, targets, flows = zip(*edges, strict=True)
    network = csr_array(
        (np.array(flows, dtype=np.int32), (sources, targets)), shape=(sink + 1, sink + 1)
    )
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
    quick = best_chain(small, thin(sets, _FEW_SETS), math.inf)
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


def thin(sets: ClosedSets, most: int) -> ClosedSets:
    """The sets cheapest to cut at, of each part of the work."""
    if len(sets) <= most:
        return sets
    positions = cheapest_of_parts(sets.seconds, sets.cut_s, most // 3, 3)
    lengths = np.diff(sets.cut_starts)[positions]
    chosen = np.concatenate(
        [np.arange(sets.cut_starts[k], sets.cut_starts[k + 1]) for k in positions]
    ).astype(np.int64)
    return ClosedSets(
        [sets.members[k] for k in positions],
        sets.words[positions],
        sets.seconds[positions],
        sets.n_bytes[positions],
        sets.cut_s[positions],
        np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        sets.cut_values[chosen],
        sets.cut_inside[chosen],
        is_complete=False,
    )


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
    n_moves = int(effort * max(_LEAST_MOVES, _MOVES_EACH * problem.n_operators * problem.n_devices))
    best = start
    for k, hottest in enumerate(_HOTTEST if problem.n_devices > 1 else ()):
        if n_moves == 0 or best.load_s <= bound_s * _ROUNDING:
            break
        device_of = start.device_of if k % 2 == 0 else best.device_of
        chain = anneal(problem, device_of, n_moves=n_moves, hottest=hottest, seed=8 * seed + k)
        if chain[1] < best.load_s * (1 - 1e-9):
            best = OperatorPlacement(*chain)
    return best
