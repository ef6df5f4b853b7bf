"""The search: which cuts to consider, a bound from a few of them, the exact program, refinement.

With all cuts listed the result is exact. A graph with too many has its parallel branches merged,
or its cuts sampled by a beam; then the cuts around those of the best plan are added at full
resolution, until nothing improves.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from harness.plan.published.pipedream.cost import Level, Stage
from harness.plan.published.pipedream.cuts import Cuts, Floats
from harness.plan.published.pipedream.dynamic import (
    DeviceStages,
    Placed,
    StageTimes,
    Surroundings,
    Workers,
    best_chain,
)
from harness.plan.published.pipedream.lattice import Cut, Lattice, merge_branches
from harness.plan.published.pipedream.nested import GroupStages, all_pairs
from harness.plan.published.pipedream.workload import Workload

_BEAM_WIDTH = 12
_COARSE_PARTS, _FINE_PARTS = 4, 32  # a merged branch is at most this part of a device's share
_MAX_ROUNDS = 6
_FLAT_CUTS = 3000
_PAIR_OPERATIONS = 3e9  # element operations that one solution over pairs may take: some seconds
_COARSE_CUTS = 96


@dataclass(frozen=True)
class Found:
    """A plan by PipeDream's formula.

    Attributes:
        step_s: seconds per minibatch.
        stages: of the outermost level, in order.
        n_cuts: cuts considered.
        is_exact: all cuts were considered, so that no plan is better.
        interrupted: ended by Ctrl-C.
    """

    step_s: float
    stages: list[Stage]
    n_cuts: int
    is_exact: bool
    interrupted: bool = False


@dataclass(frozen=True)
class Problem:
    """A workload on levels of equal devices, or on one level of unlike ones.

    Attributes:
        levels: innermost first.
        memory: bytes per device; infinite for no limit.
        unlike: the devices in order when they differ; then there is one level, and `memory` is
            not read.
    """

    workload: Workload
    levels: Sequence[Level]
    memory: float = math.inf
    unlike: Workers | None = None

    @property
    def n_devices(self) -> int:
        return math.prod(level.n_workers for level in self.levels)

    @property
    def most_cuts(self) -> int:
        """As many as the program can take in a few seconds."""
        if len(self.levels) == 1:
            return _FLAT_CUTS
        n_products = sum(level.n_workers**2 / 2 for level in self.levels[:-1])
        if self.memory < math.inf:
            n_products *= 2 * self.levels[-1].n_workers ** 2
        return int((_PAIR_OPERATIONS * 3 / n_products) ** (1 / 3))


def search(
    problem: Problem,
    lattice: Lattice,
    *,
    report: Callable[[float, str, int], None] = lambda best_s, phase, n_cuts: None,
    deadline_s: float | None = None,
) -> Found | None:
    """Find the best plan; None when no plan fits the memory.

    Args:
        lattice: of the problem's workload.
        report: called with the best seconds so far, what comes next, and the cuts considered.
        deadline_s: on the monotonic clock; no refinement begins after it.
    """
    best: Found | None = None
    try:
        for found in _improve(lattice, problem):
            if best is None or found.is_exact or found.step_s < best.step_s:
                best = found
            if found.is_exact or (deadline_s is not None and time.monotonic() > deadline_s):
                break
            report(best.step_s, "refining", found.n_cuts)
    except KeyboardInterrupt:
        if best is None:
            raise
        return replace(best, interrupted=True)
    return best


def _improve(lattice: Lattice, problem: Problem) -> Iterator[Found]:
    """Better and better plans: over a few cuts, over all listed ones, and over those nearby."""
    listed, is_exact = _list_cuts(lattice, problem)
    if listed is None:
        quick = solve(Cuts.from_cuts(lattice.line()).thin(_COARSE_CUTS, 1), problem)
        if quick is not None:
            yield quick
        listed = _sample_cuts(lattice, problem)
    cuts = Cuts.from_cuts(listed)
    if len(cuts) > problem.most_cuts:
        cuts = cuts.thin(max(1, problem.most_cuts // 4), 4)
    bound_s = math.inf
    if len(cuts) > 2 * _COARSE_CUTS:
        coarse = solve(cuts.thin(_COARSE_CUTS // 2, 2), problem)
        if coarse is not None:
            yield coarse
            bound_s = coarse.step_s
    found = solve(cuts, problem, bound_s=bound_s)
    if found is None:
        return
    yield replace(found, is_exact=is_exact)
    for _ in range(_MAX_ROUNDS):
        better = _refine(lattice, problem, listed, found)
        if better is None or better.step_s >= found.step_s * (1 - 1e-6):
            return
        found = better
        yield found


def _list_cuts(lattice: Lattice, problem: Problem) -> tuple[list[Cut] | None, bool]:
    """All cuts when there are few (then True), else those of the graph with merged branches."""
    every = lattice.every(problem.most_cuts)
    if every is not None:
        return every, True
    return _merged(lattice, problem, _COARSE_PARTS).every(problem.most_cuts), False


def _sample_cuts(lattice: Lattice, problem: Problem) -> list[Cut]:
    """Cuts that are cheap to cross, of a graph with too many to list."""
    fine = _merged(lattice, problem, _FINE_PARTS)
    return [*fine.beam(_BEAM_WIDTH), *fine.principal()]


def _merged(lattice: Lattice, problem: Problem, n_parts: int) -> Lattice:
    share = sum(lattice.workload.compute_ticks) / problem.n_devices
    return Lattice(*merge_branches(lattice, share / n_parts))


def _refine(lattice: Lattice, problem: Problem, listed: list[Cut], found: Found) -> Found | None:
    """Solve again with the cuts near the plan's, at full resolution."""
    ends = _ends(found.stages)
    per_end = problem.most_cuts // (2 * len(ends))
    near = [cut for end in ends for cut in lattice.around(end, per_end)]
    coarse = Cuts.from_cuts(listed).thin(max(1, problem.most_cuts // 4), 2)
    members = set(coarse.members)
    cuts = Cuts.from_cuts([*(cut for cut in listed if cut.covers in members), *near])
    return solve(cuts, problem, bound_s=found.step_s)


def _ends(stages: Sequence[Stage]) -> list[int]:
    """Cuts of a plan on all levels."""
    found: list[int] = []
    for stage in stages:
        found.extend(_ends(stage.inner))
        found.append(stage.end)
    return list(dict.fromkeys(found))


def solve(cuts: Cuts, problem: Problem, *, bound_s: float = math.inf) -> Found | None:
    """Best plan over the given cuts that is at most as slow as the bound."""
    best = _Solver(problem).chain(_within_bound(cuts, problem, bound_s), bound_s)
    if best is None:
        return None
    step_s, stages = best
    return Found(step_s, stages, len(cuts), is_exact=False)


def _within_bound(cuts: Cuts, problem: Problem, bound_s: float) -> Cuts:
    """The cuts that a plan can use if no device is busier than the bound.

    If w devices work before a cut, they and the others each get through their part in time.
    """
    if bound_s == math.inf:
        return cuts
    n = problem.n_devices
    speeds = np.ones(n) if problem.unlike is None else problem.unlike.rate[:, 1]
    before_s = np.concatenate([[0.0], np.cumsum(speeds)]) * bound_s * (1 + 1e-9) + 1e-12
    after_s = before_s[-1] - before_s
    whole_s = cuts.compute_s[-1]
    # Fewest devices that can do what is before; then the others are as many as they can be.
    fewest = np.searchsorted(before_s, cuts.compute_s, side="left")
    kept = (fewest <= n) & (whole_s - cuts.compute_s <= after_s[np.minimum(fewest, n)] + 1e-12)
    kept[[0, -1]] = True
    return cuts.take(np.flatnonzero(kept))


class _Solver:
    """Nests the levels: the compute of a stage is the best time of the level below."""

    def __init__(self, problem: Problem) -> None:
        self._memory = problem.memory
        self._unlike = problem.unlike
        self._levels = list(problem.levels)

    def chain(self, cuts: Cuts, bound_s: float) -> tuple[float, list[Stage]] | None:
        """Best time and stages on the outermost level."""
        return self._chain(cuts, len(self._levels) - 1, Surroundings(), bound_s)

    def _workers(self, depth: int) -> Workers:
        if self._unlike is not None:
            return self._unlike
        return Workers.uniform(self._levels[depth], self._memory if depth == 0 else math.inf)

    def _stages(self, cuts: Cuts, depth: int, around: Surroundings) -> StageTimes:
        workers = self._workers(depth)
        if depth == 0:
            return DeviceStages(cuts, workers, around)
        known: dict[Surroundings, Floats] = {}
        limited = self._memory < math.inf

        def inner_s(inside: Surroundings) -> Floats:
            # Without a memory limit, what lies around a group does not change its time.
            key = inside if limited else Surroundings()
            if key not in known:
                stages = self._stages(cuts, depth - 1, _within(around, key))
                known[key] = all_pairs(cuts, self._workers(depth - 1), stages, limited=limited)
            return known[key]

        rate = float(np.prod([level.n_workers for level in self._levels[:depth]]))
        return GroupStages(cuts, workers, inner_s, rate)

    def _chain(
        self, cuts: Cuts, depth: int, around: Surroundings, bound_s: float
    ) -> tuple[float, list[Stage]] | None:
        stages = self._stages(cuts, depth, around)
        best = best_chain(cuts, self._workers(depth), stages, bound_s=bound_s)
        if best is None:
            return None
        step_s, chain = best
        return step_s, [self._stage(cuts, depth, around, placed, stages) for placed in chain]

    def _stage(
        self, cuts: Cuts, depth: int, around: Surroundings, placed: Placed, stages: StageTimes
    ) -> Stage:
        inner: tuple[Stage, ...] = ()
        if isinstance(stages, GroupStages):
            inside = _within(around, stages.surroundings(placed.first, placed.r))
            between = cuts.between(placed.start, placed.end)
            solved = self._chain(between, depth - 1, inside, math.inf)
            assert solved is not None, "the outer stage was costed by this very chain"
            inner = tuple(solved[1])
        start, end = cuts.members[placed.start], cuts.members[placed.end]
        return Stage(start, end, placed.first, placed.r, inner)


def _within(outer: Surroundings, inner: Surroundings) -> Surroundings:
    """Surroundings of a group inside a group."""
    return Surroundings(
        n_copies=outer.n_copies * inner.n_copies,
        n_after=inner.n_after * outer.n_copies + outer.n_after,
    )
