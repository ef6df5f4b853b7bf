"""The search: which cuts to consider, the dynamic program on each level, the devices of a plan.

With all cuts listed the result is exact. A graph with too many has its parallel branches merged; if
there are too many still, the cuts of one topological order are taken.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from harness.plan.bottleneck import Floats, all_pairs, best_chain
from harness.plan.published.pipedream.problem import (
    Cuts,
    Level,
    OperatorDag,
    list_closed_sets,
    members_of,
    memory_bytes,
    merged_sets,
    n_in_flight,
)

_MERGED_PARTS = (16, 8, 4, 2, 1)  # a merged branch is at most this part of a device's share
_FLAT_CUTS = 3000
_FEW_CUTS = 96
_PAIR_OPERATIONS = 6e9  # element operations that one solution over pairs may take: some seconds


@dataclass(frozen=True, kw_only=True)
class ReplicatedStage:
    """Consecutive operators on consecutive workers of one level.

    Attributes:
        start, end: positions of the cuts where it begins and ends.
        first: its workers are first, ..., first + n_replicas - 1 of its level's.
        n_replicas: each takes every n_replicas-th minibatch.
        compute_s: seconds per minibatch of one replica's share; for groups of devices, of their
            pipeline's bottleneck.
        sync_s: gradient synchronisation among the replicas.
        receive_s, send_s: activations and their gradients; 0 where the formula leaves them out.
        inner: how each worker, itself a group of workers, runs it; empty on the innermost level.
    """

    start: int
    end: int
    first: int
    n_replicas: int
    compute_s: float
    sync_s: float
    receive_s: float
    send_s: float
    inner: tuple[ReplicatedStage, ...] = ()

    @property
    def total_s(self) -> float:
        return max(self.compute_s + self.sync_s, self.receive_s, self.send_s)

    @property
    def work(self) -> str:
        """The name of `compute_s`, which of groups contains what they send each other."""
        return "work inside nodes" if self.inner else "compute"

    @property
    def binding(self) -> str:
        """The resource that bounds the stage."""
        if self.total_s > self.compute_s + self.sync_s:
            return f"{'receiving' if self.receive_s >= self.send_s else 'sending'} activations"
        return "gradient synchronisation" if self.sync_s > self.compute_s else self.work


@dataclass(frozen=True, kw_only=True)
class DeviceStage:
    """A stage as devices see it, all levels taken apart.

    Attributes:
        operators: positions in the workload.
        devices: one per replica, in order.
        in_flight: minibatches that a replica holds activations of.
        memory_bytes: of each replica.
    """

    operators: list[int]
    devices: list[int]
    in_flight: int
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class FoundPipeline:
    """A plan by PipeDream's formula.

    Attributes:
        step_s: seconds per minibatch.
        stages: of the outermost level, in order.
        cuts: that were considered; positions in stages are theirs.
        is_exact: they were all, so that no plan is better.
    """

    step_s: float
    stages: list[ReplicatedStage]
    cuts: Cuts
    is_exact: bool
    interrupted: bool = False


@dataclass(frozen=True)
class PipelineProblem:
    """A workload on levels of equal workers, innermost first."""

    workload: OperatorDag
    levels: Sequence[Level]

    @property
    def n_devices(self) -> int:
        return math.prod(level.n_workers for level in self.levels)

    @property
    def is_limited(self) -> bool:
        """Whether memory is."""
        return self.levels[0].memory_bytes < math.inf

    @property
    def most_cuts(self) -> int:
        """As many as the program can take in a few seconds."""
        if len(self.levels) == 1:
            return _FLAT_CUTS
        n_products = sum(level.n_workers**2 for level in self.levels[:-1])
        if self.is_limited:
            n_products *= self.levels[-1].n_workers ** 2
        return int((_PAIR_OPERATIONS * 3 / n_products) ** (1 / 3))


def search(
    problem: PipelineProblem,
    *,
    report: Callable[[FoundPipeline], None] = lambda found: None,
    deadline_s: float = math.inf,
) -> FoundPipeline | None:
    """Find the best plan; None when no plan over the cuts considered fits the memory.

    Args:
        report: called with the best plan over few cuts, where there are many.
        deadline_s: on the monotonic clock; that plan is returned where it has passed by then, or
            when the search is interrupted after it.
    """
    cuts, is_exact = list_cuts(problem)
    quick: FoundPipeline | None = None
    try:
        if len(cuts) > 2 * _FEW_CUTS:
            quick = solve(problem, cuts.thin(_FEW_CUTS // 2, 2))
            if quick is not None:
                report(quick)
                if time.monotonic() > deadline_s:
                    return quick
        return solve(problem, cuts, is_exact=is_exact)
    except KeyboardInterrupt:
        if quick is None:
            raise
        return replace(quick, interrupted=True)


def solve(problem: PipelineProblem, cuts: Cuts, *, is_exact: bool = False) -> FoundPipeline | None:
    """The best plan over the given cuts."""
    depth, everything = len(problem.levels) - 1, range(len(cuts))
    solved = _chain(problem, cuts, everything, depth, Surroundings())
    if solved is None:
        return None
    return FoundPipeline(step_s=solved[0], stages=solved[1], cuts=cuts, is_exact=is_exact)


def list_cuts(problem: PipelineProblem) -> tuple[Cuts, bool]:
    """The cuts to consider, and whether they are all."""
    workload, most = problem.workload, problem.most_cuts
    every = list_closed_sets(workload.producers, most)
    if every is not None:
        return Cuts.at(workload, every), True
    share = sum(workload.compute_ticks) / problem.n_devices
    for n_parts in _MERGED_PARTS:
        some = merged_sets(workload, share / n_parts, most)
        if some is not None:
            return Cuts.at(workload, some), False
    cuts = Cuts.at(workload, [(1 << i) - 1 for i in range(workload.n_operators + 1)])
    return (cuts if len(cuts) <= most else cuts.thin(max(1, most // 4), 4)), False


@dataclass(frozen=True)
class Surroundings:
    """The surroundings of one group of workers that is a replica of an outer stage.

    Attributes:
        n_copies: groups that replicate the outer stage.
        n_after: devices behind the outer stage.
    """

    n_copies: int = 1
    n_after: int = 0


@dataclass(frozen=True, eq=False)
class Stages:
    """Stages between cuts on the workers of one level (`bottleneck.StageSeconds`).

    Attributes:
        around: surroundings of the level's workers.
        group_s: best time of one worker between any two cuts, given its surroundings, where
            workers are groups of the level below; None where they are devices.
    """

    cuts: Cuts
    level: Level
    n_devices_each: int = 1
    around: Surroundings = Surroundings()
    group_s: Callable[[Surroundings], Floats] | None = None

    @property
    def n_cuts(self) -> int:
        return len(self.cuts)

    @property
    def n_workers(self) -> int:
        return self.level.n_workers

    def inside(self, first: int, r: int) -> Surroundings:
        """The surroundings of one worker of a stage."""
        n_copies, n_after = self.around.n_copies, self.around.n_after
        behind = (self.n_workers - first - r) * self.n_devices_each
        return Surroundings(r * n_copies, behind * n_copies + n_after)

    def block(self, first: int, r: int, rows: slice) -> Floats:
        cuts, cols = self.cuts, slice(rows.start, None)
        sync_s = cuts.parameter_bytes * self.level.sync_s_per_byte(r)
        block: Floats
        if self.group_s is not None:
            block = self.group_s(self.inside(first, r))[rows, cols] / r
            block += np.subtract.outer(-sync_s[rows], -sync_s[cols])
            return block
        whole_s = cuts.compute_s / r + sync_s
        block = np.subtract.outer(-whole_s[rows], -whole_s[cols])
        np.copyto(block, math.inf, where=cuts.blocked[rows, cols])
        if self.level.memory_bytes < math.inf:
            inside = self.inside(first, r)
            in_flight = n_in_flight(inside.n_copies, inside.n_after)
            held = memory_bytes(cuts.parameter_bytes, cuts.activation_bytes, in_flight)
            received = in_flight * cuts.crossing_bytes
            needed = np.subtract.outer(received[rows] - held[rows], -held[cols])
            block[needed > self.level.memory_bytes] = math.inf
        return block

    def transfers(self, first: int, r: int) -> tuple[Floats, Floats]:
        seconds = 2 / (self.level.bandwidth * r) * self.cuts.crossing_bytes
        return seconds, seconds


def _stages(problem: PipelineProblem, cuts: Cuts, depth: int, around: Surroundings) -> Stages:
    """Stages of the workers of one level, whose seconds are those of the level below."""
    inner = math.prod(level.n_workers for level in problem.levels[:depth])
    stages = Stages(cuts, problem.levels[depth], inner, around)
    if depth == 0:
        return stages

    @cache
    def solved_s(inside: Surroundings) -> Floats:
        return all_pairs(_stages(problem, cuts, depth - 1, inside))

    def group_s(inside: Surroundings) -> Floats:
        # Without a memory limit, what lies around a group does not change its time.
        return solved_s(inside if problem.is_limited else Surroundings())

    return replace(stages, group_s=group_s)


def _chain(
    problem: PipelineProblem, cuts: Cuts, positions: Sequence[int], depth: int, around: Surroundings
) -> tuple[float, list[ReplicatedStage]] | None:
    """Best time and stages of the workers of one level, by cuts with their positions among all of
    the problem."""
    stages = _stages(problem, cuts, depth, around)
    best = best_chain(stages)
    if best is None:
        return None
    found = []
    for k, (start, end, first, r) in enumerate(best[1]):
        compute_s = float(cuts.compute_s[end] - cuts.compute_s[start])
        inner: list[ReplicatedStage] = []
        if depth > 0:
            own = cuts.between(start, end)
            within = stages.inside(first, r)
            solved = _chain(problem, cuts.take(own), [positions[i] for i in own], depth - 1, within)
            assert solved is not None, "the outer stage was costed by this very chain"
            compute_s, inner = solved
        parameters = float(cuts.parameter_bytes[end] - cuts.parameter_bytes[start])
        receive_s, send_s = stages.transfers(first, r)
        pays = k > 0  # the formula charges no transfers to the first stage of a level
        found.append(
            ReplicatedStage(
                start=positions[start],
                end=positions[end],
                first=first,
                n_replicas=r,
                compute_s=compute_s / r,
                sync_s=stages.level.sync_s_per_byte(r) * parameters,
                receive_s=pays * float(receive_s[start]),
                send_s=pays * float(send_s[end]),
                inner=tuple(inner),
            )
        )
    return best[0], found


def device_stages(found: FoundPipeline, levels: Sequence[Level]) -> list[DeviceStage]:
    """Take the levels apart; stages in order of flow."""
    cuts, placed = found.cuts, []
    for stage, devices, n_after in _flatten(found.stages, levels, [0], 0):
        start, end = stage.start, stage.end
        in_flight = n_in_flight(len(devices), n_after)
        held = (
            cuts.activation_bytes[end] - cuts.activation_bytes[start] + cuts.crossing_bytes[start]
        )
        parameters = cuts.parameter_bytes[end] - cuts.parameter_bytes[start]
        placed.append(
            DeviceStage(
                operators=list(members_of(cuts.members[end] & ~cuts.members[start])),
                devices=devices,
                in_flight=in_flight,
                memory_bytes=math.ceil(memory_bytes(float(parameters), float(held), in_flight)),
            )
        )
    return placed


def _flatten(
    stages: Sequence[ReplicatedStage], levels: Sequence[Level], bases: list[int], n_after: int
) -> Iterator[tuple[ReplicatedStage, list[int], int]]:
    """Innermost stages with their devices and how many devices lie behind them.

    Args:
        bases: first device of each replica of the surrounding stage.
        n_after: devices behind the surrounding stage.
    """
    width = math.prod(level.n_workers for level in levels[:-1])
    for stage in stages:
        end = stage.first + stage.n_replicas
        starts = [base + w * width for base in bases for w in range(stage.first, end)]
        behind = (levels[-1].n_workers - end) * width * len(bases) + n_after
        if stage.inner:
            yield from _flatten(stage.inner, levels[:-1], starts, behind)
        else:
            yield stage, starts, behind
