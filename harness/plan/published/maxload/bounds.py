"""Loads that no placement can be below."""

from __future__ import annotations

import math

import numpy as np

from harness.plan.published.maxload.problem import LoadProblem

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
