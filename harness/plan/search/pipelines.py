"""Pipelines on unlike devices and links: the best by a dynamic program, judged by the simulator.

The program (`stage_chains.py`) goes by an estimate of the step. The best pipelines are then
simulated, with what the estimate leaves out: contention, memory, schedules, skips. Every ordered
choice of groups of devices is tried where there are few enough, with devices that are nearly
alike taken for each other; elsewhere groups are neighbours in a few orders of the devices (by
node, fastest first, slowest first, slow links last).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import combinations
from typing import NamedTuple, TypeVar

import msgspec
import numpy as np

from harness.domain.partition import SAMPLE
from harness.domain.schedule import ScheduleName
from harness.domain.shard_state import ShardState
from harness.domain.sharding import cuttable_dims
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.plan.search.objective import Objective
from harness.plan.search.space import balanced_pipeline, proportional_shares
from harness.plan.search.stage_chains import (
    MOST_PAIRS,
    Group,
    GroupChains,
    Links,
    Pipeline,
    StageCosts,
    best_pipelines,
    chain_of,
    chains_along,
    chains_of_classes,
    n_moves,
)
from harness.plan.simulate.costs import Costs
from harness.plan.simulate.network import SLOWER
from harness.plan.simulate.simulator import Simulator, Trial, operator_seconds
from harness.plan.simulate.transfers import Floats

MOST_SEGMENTS = 40  # operators are merged into so many runs before the program
MOST_MOVES = 1 << 15  # of the program: two nodes of eight equal devices, seven unlike devices
ALIKE = (0.01, SLOWER - 1)  # times of devices and links that differ by less count as equal
MOST_SIZES = 24  # of all-reduces that are priced for a group; interpolated between
PROBE_BYTES = 1 << 20
TURNS = (2, 3, 4)  # interleaved stages of each device

T = TypeVar("T")


class Form(NamedTuple):
    """How a pipeline is trained."""

    schedule: ScheduleName = "1f1b"
    recompute: bool = False
    shard_state: ShardState = "none"


PLAIN = Form()


class PipelineSearch:
    """Pipelines of one graph for one number of microbatches, with so many devices a stage at
    most."""

    def __init__(
        self,
        simulator: Simulator,
        batch: int,
        n_microbatches: int,
        most_replicas: int | None = None,
    ) -> None:
        self.simulator, self.batch, self.n_microbatches = simulator, batch, n_microbatches
        self.costs: Costs = simulator.costs(-(-batch // n_microbatches))
        self.fewest = batch // n_microbatches  # samples of the smallest microbatch
        self._most = min(self.fewest, most_replicas or self.fewest)
        seconds = operator_seconds(simulator, batch, n_microbatches)
        self._costs_of = lru_cache(maxsize=None)(self._stage_costs)
        self.segments = merge_operators(simulator.placed, seconds[0])
        self._cut_bytes = self._bytes_at_cuts(simulator.placed)
        self._returned_bytes = self._bytes_at_cuts(np.flatnonzero(simulator.returns).tolist())
        # (n_segments + 1, n_devices): running sum of forward plus backward of whole operators.
        ends = np.cumsum([0, *map(len, self.segments)])
        self._seconds = np.insert(seconds.cumsum(axis=1), 0, 0.0, axis=1)[:, ends].T
        operators, frozen = simulator.graph.operators, simulator.options.frozen
        trained = [
            [operators[op] for op in ops if operators[op].name not in frozen]
            for ops in self.segments
        ]
        own = [round(sum(op.parameter_bytes * op.trained_share for op in ops)) for ops in trained]
        self._weights = np.cumsum([0, *own])

    def _bytes_at_cuts(self, producers: Sequence[int]) -> Floats:
        """[a, b]: bytes of a microbatch that some operators in segments a..b produce and later
        segments read.

        A tensor that skips a stage goes straight to its reader, so only its own stage sends it.
        """
        n = len(self.segments)
        at = {op: k for k, ops in enumerate(self.segments) for op in ops}
        found, made = np.zeros((n + 1, n + 1)), set(producers)
        for p, consumers in enumerate(self.simulator.graph.consumers()):
            places = [at[c] for c in consumers if c in at]
            if p not in made or p not in at or not places:
                continue
            found[: at[p] + 1, at[p] + 1 : max(places) + 1] += self.costs.wire_bytes(p)
        return found

    def _stage_costs(self, group: Group) -> tuple[Floats, Floats]:
        """[a, b]: seconds of a microbatch in segments a..b, which replicas share by their speed,
        and of the all-reduce."""
        of_device = self._seconds.T[list(group)]
        seconds = of_device[:, None, :] - of_device[:, :, None]
        with np.errstate(divide="ignore"):
            shared = 1 / (1 / seconds).sum(axis=0)
        idle = seconds.max(axis=0) / len(group)  # one of them takes no time
        stage_s = np.where(seconds.min(axis=0) > 0, shared, idle)
        if len(group) == 1:
            return stage_s, np.zeros_like(stage_s)
        n_bytes = np.maximum(0, self._weights - self._weights[:, None])
        sizes = np.unique(n_bytes)
        if len(sizes) > MOST_SIZES:
            sizes = np.unique(np.geomspace(max(1, sizes[1]), sizes[-1], MOST_SIZES).astype(int))
        priced = [self.simulator.network.all_reduce(group, n).duration_s for n in sizes.tolist()]
        return stage_s, np.where(n_bytes > 0, np.interp(n_bytes, sizes, priced), 0.0)

    def candidates(
        self,
        n_best: int,
        *,
        limit_s: float = math.inf,
        splits_backward: bool = False,
        is_over: Callable[[], bool] = lambda: False,
    ) -> list[Pipeline]:
        """The pipelines of at least two stages with the least bounds up to limit_s, least first.

        Args:
            splits_backward: whether the schedule does, so that a third of each stage fills bubbles.
            is_over: asked now and then; the program gives up when it says so.
        """
        found = [
            pipeline
            for chains in self._chains()
            for pipeline in self._best(
                chains, n_best, limit_s, 2 / 3 if splits_backward else 1.0, is_over
            )
            if len(pipeline.groups) > 1
        ]
        ordered = sorted(found, key=lambda p: (p.bound_s, p.ends, p.groups))
        return list(dict.fromkeys(ordered))[:n_best]

    def _best(
        self,
        chains: GroupChains,
        n_best: int,
        limit_s: float = math.inf,
        fill_share: float = 1.0,
        is_over: Callable[[], bool] = lambda: False,
    ) -> list[Pipeline]:
        network = self.simulator.network
        node_of = network.node_of
        nic_s = np.where(node_of[:, None] == node_of, 0.0, 1 / network.nic[node_of][:, None])
        costs = [self._costs_of(group) for group in chains.groups]
        stage_s, sync_s = (np.stack(each) for each in zip(*costs, strict=True))
        return best_pipelines(
            chains,
            StageCosts(stage_s, sync_s, self._cut_bytes, self._returned_bytes),
            Links(network.latency_s, network.rates, nic_s, node_of),
            n_microbatches=self.n_microbatches,
            limit_s=limit_s,
            fill_share=fill_share,
            n_each=max(MOST_PAIRS, n_best // len(chains.last)),
            is_over=is_over,
        )

    def _chains(self) -> list[GroupChains]:
        """The sequences of groups of devices to choose from."""
        for classes in (self._classes, self._classes_of(ALIKE[1])):
            if n_moves(classes) <= MOST_MOVES:
                return [chains_of_classes(classes, self._most)]
        plain, seconds = tuple(range(self.costs.n_devices)), self._seconds[-1].tolist()
        orders = [plain, self.simulator.network.promising(seconds)]
        if len({(d.kind, d.speed, d.memory_bytes) for d in self.simulator.cluster.devices}) > 1:
            fast = tuple(sorted(plain, key=seconds.__getitem__))
            orders += [plain[::-1], fast, fast[::-1]]
        return [chains_along(order, self._most) for order in dict.fromkeys(orders)]

    @cached_property
    def _classes(self) -> tuple[Group, ...]:
        return self._classes_of(ALIKE[0])

    def _classes_of(self, most: float) -> tuple[Group, ...]:
        """Devices that may change places in any pipeline: equally fast, and with equally fast links
        to all others, up to a share. One class of all where there are too many to compare."""
        everything = tuple(range(self.costs.n_devices))
        classes: list[list[int]] = []
        if n_moves([everything]) > MOST_MOVES:
            return (everything,)
        for device in everything:
            for own in classes:
                if self._is_like(own[0], device, most):
                    own.append(device)
                    break
            else:
                classes.append([device])
        return tuple(map(tuple, classes))

    def _kinds(self, group: Group) -> list[Group]:
        """The classes of a group's devices."""
        return sorted(own for device in group for own in self._classes if device in own)

    def _is_like(self, a: int, b: int, most: float) -> bool:
        devices, network = self.simulator.cluster.devices, self.simulator.network
        swapped = np.arange(self.costs.n_devices)
        swapped[[a, b]] = b, a
        probe_s = network.latency_s + PROBE_BYTES / network.rates
        return (
            devices[a].memory_bytes == devices[b].memory_bytes
            and np.allclose(self._seconds[:, a], self._seconds[:, b], rtol=most, atol=0)
            and np.allclose(probe_s, probe_s[swapped][:, swapped], rtol=most, atol=0)
        )

    def plans(self, pipeline: Pipeline) -> dict[int, OperatorPlan]:
        """The operators' plans; replicas of unlike speed get samples in proportion."""
        found: dict[int, OperatorPlan] = {}
        start = 0
        for stage, (end, group) in enumerate(zip(pipeline.ends, pipeline.groups, strict=True)):
            seconds = [float(self._seconds[end, d] - self._seconds[start, d]) for d in group]
            shares = proportional_shares(seconds, self.fewest) if len(group) > 1 else None
            for ops in self.segments[start:end]:
                for op in ops:
                    units = self.simulator.costs(self.fewest).units(op)
                    dims = cuttable_dims(self.simulator.graph.operators[op], units)
                    if len(group) > 1 and SAMPLE in dims and units[SAMPLE] >= len(group):
                        cut = shares if shares and units[SAMPLE] == self.fewest else len(group)
                        found[op] = OperatorPlan({SAMPLE: cut}, list(group), stage)
                    else:
                        found[op] = OperatorPlan({}, [group[0]], stage)
            start = end
        return found

    def refine(self, start: Pipeline, form: Form, score: float, objective: Objective) -> Pipeline:
        """Move one cut, or one device to the next stage, or swap the devices of two stages, as long
        as the simulated step improves; the best.

        Args:
            score: of the start.
        """

        def judge(pipeline: Pipeline) -> float:
            return self.judge(pipeline, objective, form)

        return _climb(start, score, self._neighbours, judge, objective)

    def take_turns(
        self, devices: Group, objective: Objective, shard_state: ShardState = "none"
    ) -> None:
        """Judge interleaved stages, two for each of these devices, in this order and in others
        (swap two unlike devices, as long as the simulated step improves); then more for each."""
        n, n_ops = len(devices), len(self.simulator.placed)
        if n < 2 or TURNS[0] * n > n_ops or self.n_microbatches % n:
            return

        def judge(order: Group, turns: int = TURNS[0]) -> float:
            strategy = balanced_pipeline(
                self.simulator,
                self.batch,
                self.n_microbatches,
                n_stages=turns * n,
                schedule="interleaved",
                devices=order,
            )
            strategy = msgspec.structs.replace(strategy, shard_state=shard_state)
            return objective.judge(Trial(self.simulator, strategy))

        def swapped(order: Group) -> Iterator[Group]:
            for a, b in combinations(order, 2):
                if self._kinds((a,)) != self._kinds((b,)):
                    yield tuple({a: b, b: a}.get(d, d) for d in order)

        best = _climb(devices, judge(devices), swapped, judge, objective)
        for turns in TURNS[1:]:
            if turns * n <= n_ops and not objective.is_over():
                judge(best, turns)

    def _neighbours(self, pipeline: Pipeline) -> Iterator[Pipeline]:
        ends, groups = pipeline.ends, pipeline.groups
        for k in range(len(ends) - 1):
            before = ends[k - 1] if k else 0
            for end in (ends[k] - 1, ends[k] + 1):
                if before < end < ends[k + 1]:
                    yield Pipeline(0.0, (*ends[:k], end, *ends[k + 1 :]), groups)
        for a, b in [(k, k + 1) for k in range(len(ends) - 1)]:
            for source, target in ((a, b), (b, a)):
                if len(groups[source]) > 1 and len(groups[target]) < self._most:
                    moved = groups[source][-1 if source == a else 0]
                    changed = list(groups)
                    changed[source] = tuple(d for d in groups[source] if d != moved)
                    changed[target] = tuple(sorted((*groups[target], moved)))
                    yield Pipeline(0.0, ends, tuple(changed))
        for a, b in combinations(range(len(groups)), 2):
            if self._kinds(groups[a]) == self._kinds(groups[b]):
                continue
            changed = list(groups)
            changed[a], changed[b] = groups[b], groups[a]
            yield from self._best(chain_of(tuple(changed)), 1)

    def strategy(self, pipeline: Pipeline, form: Form = PLAIN) -> Strategy:
        return Strategy(
            name="pipeline",
            batch=self.batch,
            operators=self.simulator.by_name(self.plans(pipeline)),
            n_microbatches=self.n_microbatches,
            schedule=form.schedule,
            stages=[Stage(form.recompute)] * len(pipeline.groups),
            shard_state=form.shard_state,
        )

    def judge(self, pipeline: Pipeline, objective: Objective, form: Form = PLAIN) -> float:
        """Simulate one pipeline; the score."""
        return objective.judge(Trial(self.simulator, self.strategy(pipeline, form)))


def _climb(
    start: T,
    score: float,
    neighbours: Callable[[T], Iterator[T]],
    judge: Callable[[T], float],
    objective: Objective,
) -> T:
    """Go to the first neighbour that is better, as long as there is one; the best."""
    best, improved = start, True
    while improved:
        improved = False
        for near in neighbours(best):
            if objective.is_over():
                return best
            found = judge(near)
            if found < score:
                best, score, improved = near, found, True
                break
    return best


def merge_operators(placed: Sequence[int], seconds: Floats) -> list[list[int]]:
    """Operators, in order, as at most MOST_SEGMENTS runs of about equal time."""
    if len(placed) <= MOST_SEGMENTS:
        return [[op] for op in placed]
    target = seconds.sum() / MOST_SEGMENTS
    runs: list[list[int]] = [[]]
    filled = 0.0
    for op, own_s in zip(placed, seconds.tolist(), strict=True):
        runs[-1].append(op)
        filled += own_s
        if filled >= target * len(runs) and len(runs) < MOST_SEGMENTS:
            runs.append([])
    return [run for run in runs if run]


def schedules_for(n_microbatches: int) -> Sequence[ScheduleName]:
    """Schedules worth simulating: with one microbatch all are the same."""
    return ("1f1b",) if n_microbatches == 1 else ("1f1b", "gpipe", "zero_bubble")
