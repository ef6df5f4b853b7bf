"""Pipelines on unlike devices and links: dynamic programming over (cut, devices used, last stage).

A stage is a run of consecutive operators on a group of devices, which share each microbatch. With
M microbatches a stage that takes w seconds per microbatch (forward and backward) and is reached
after p seconds of earlier stages and transfers (there and back, a third of it there) ends after

    b = M w + max(p, p/3 + y - 2w/3)

with y its all-reduce, which only the last microbatch's backward pass hides; and a cut whose
microbatch takes t seconds to cross, after p + M t. So every partial pipeline has the pair (p,
largest b so far), both to be kept small: the programme keeps, for each (operators done, devices
used, last group), the pairs that no other one beats, and is exact for the largest b. The best are
then simulated, with what that leaves out: contention, memory, schedules, skips.

On up to four devices every ordered choice of groups is tried; on more, groups are neighbours in a
few orders of the devices (by node, fastest first, slowest first, slow links last).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, islice, permutations
from typing import NamedTuple

import numpy as np

from harness.domain.partition import SAMPLE
from harness.domain.schedule import ScheduleName
from harness.domain.shard_state import ShardState
from harness.domain.sharding import cuttable_dims
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.plan.search.objective import Objective
from harness.plan.search.space import ALL_SUBSETS_UP_TO, proportional_shares
from harness.plan.simulate.costs import Costs
from harness.plan.simulate.simulator import Simulator, Trial, operator_seconds
from harness.plan.simulate.transfers import Floats

MOST_SEGMENTS = 40  # operators are merged into so many runs before the programme
MOST_RUN = 8  # devices: larger groups are multiples of it, or all that are left
MOST_PAIRS = 3  # kept per state, unless there are so few pipelines that all can be kept
ALL_PIPELINES_UP_TO = 20_000
ALIKE = 0.01  # times of devices and links that differ by less are equal
PROBE_BYTES = 1 << 20

Group = tuple[int, ...]


@dataclass(frozen=True)
class Pipeline:
    """Stages as runs of segments, each with its devices.

    Attributes:
        bound_s: the programme's estimate of the step, without contention, memory, schedules and
            skips.
        ends: the segment at which each stage ends.
    """

    bound_s: float
    ends: tuple[int, ...]
    groups: tuple[Group, ...]


class Crossing(NamedTuple):
    """Seconds of one microbatch across a cut, each way."""

    there_s: float
    back_s: float


class StageCost(NamedTuple):
    """Seconds of one microbatch, forward and backward, and of the stage's all-reduce."""

    seconds: float
    sync_s: float


class Partial(NamedTuple):
    """Stages of the first segments: when the next one is reached, and the bound so far."""

    prefix_s: float
    bound_s: float
    ends: tuple[int, ...]
    groups: tuple[Group, ...]

    def extended(
        self, crossing: Crossing, stage: StageCost, n_microbatches: int, end: int, group: Group
    ) -> Partial:
        """With one more stage."""
        reached = self.prefix_s + crossing.there_s + crossing.back_s
        drained = max(reached, reached / 3 + stage.sync_s - 2 / 3 * stage.seconds)
        bound = max(
            self.bound_s,
            n_microbatches * stage.seconds + drained,
            self.prefix_s + n_microbatches * max(crossing.there_s, crossing.back_s),
        )
        return Partial(reached + stage.seconds, bound, (*self.ends, end), (*self.groups, group))


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
        self.segments = merge_operators(simulator.placed, seconds[0])
        self._cut_bytes = self._bytes_at_cuts(simulator.placed)
        self._returned_bytes = self._bytes_at_cuts(np.flatnonzero(simulator.returns).tolist())
        # (n_segments + 1, n_devices): running sum of forward plus backward of whole operators.
        ends = np.cumsum([0, *map(len, self.segments)])
        self._seconds = np.insert(seconds.cumsum(axis=1), 0, 0.0, axis=1)[:, ends].T
        operators, frozen = simulator.graph.operators, simulator.options.frozen
        self._weights = [0]
        for ops in self.segments:
            trained = [operators[op] for op in ops if operators[op].name not in frozen]
            own = sum(operator.parameter_bytes for operator in trained)
            self._weights.append(self._weights[-1] + own)

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

    def _stage_cost(self, a: int, b: int, group: Group) -> StageCost:
        """Segments a..b on a group: replicas share a microbatch by their speed."""
        rates = [float(self._seconds[b, d] - self._seconds[a, d]) for d in group]
        shared = 1 / sum(1 / rate for rate in rates) if min(rates) > 0 else max(rates) / len(group)
        n_bytes = self._weights[b] - self._weights[a]
        if len(group) == 1 or not n_bytes:
            return StageCost(shared, 0.0)
        return StageCost(shared, self.simulator.network.all_reduce(group, n_bytes).duration_s)

    def _crossing(self, start: int, cut: int, before: Group, after: Group) -> Crossing:
        """From a stage to the next, shared by the pairs of devices that join the groups."""
        if not before:
            return Crossing(0.0, 0.0)
        network = self.simulator.network
        lanes = min(len(before), len(after))
        amount = float(self._cut_bytes[start, cut]) / lanes
        there_s = min(network.transfer_s(a, b, amount) for a in before for b in after)
        returned = float(self._returned_bytes[start, cut]) / lanes
        if amount and not returned:  # below the first trained operator
            return Crossing(there_s, 0.0)
        return Crossing(
            there_s, min(network.transfer_s(b, a, returned) for a in before for b in after)
        )

    def candidates(
        self, n_best: int, *, limit_s: float = math.inf, is_over: Callable[[], bool] = lambda: False
    ) -> list[Pipeline]:
        """The pipelines of at least two stages with the least bounds up to limit_s, least first.

        Args:
            is_over: asked now and then; the programme gives up when it says so.
        """
        found = [p for order in self._orders() for p in self._programme(order, limit_s, is_over)]
        first = self._interchangeable()
        unique: dict[object, Pipeline] = {}
        for p in sorted(found, key=lambda p: (p.bound_s, p.ends, p.groups)):
            if len(p.groups) > 1:
                places = tuple(tuple(sorted(first[d] for d in group)) for group in p.groups)
                unique.setdefault((p.ends, places), p)
        return list(islice(unique.values(), n_best))

    def _interchangeable(self) -> list[int]:
        """By device, the first one with which it may change places in any pipeline: as fast, and
        with links as fast to all others. Where groups follow fixed orders, each is its own."""
        n = self.costs.n_devices
        first = list(range(n))
        if n <= ALL_SUBSETS_UP_TO:
            for a, b in combinations(range(n), 2):
                if first[a] == a and first[b] == b and self._is_like(a, b):
                    first[b] = a
        return first

    def _is_like(self, a: int, b: int) -> bool:
        devices, network = self.simulator.cluster.devices, self.simulator.network
        swapped = {a: b, b: a}
        pairs = list(permutations(range(self.costs.n_devices), 2))
        before = [network.transfer_s(c, d, PROBE_BYTES) for c, d in pairs]
        after = [
            network.transfer_s(swapped.get(c, c), swapped.get(d, d), PROBE_BYTES) for c, d in pairs
        ]
        return (
            devices[a].memory_bytes == devices[b].memory_bytes
            and np.allclose(self._seconds[:, a], self._seconds[:, b], rtol=ALIKE, atol=0)
            and np.allclose(before, after, rtol=ALIKE, atol=0)
        )

    def _orders(self) -> list[tuple[int, ...] | None]:
        """Orders of devices from which groups are taken; None for all subsets."""
        n = self.costs.n_devices
        if n <= ALL_SUBSETS_UP_TO:
            return [None]
        plain, seconds = tuple(range(n)), self._seconds[-1].tolist()
        orders = [plain, self.simulator.network.promising(seconds)]
        if len({(d.kind, d.speed, d.memory_bytes) for d in self.simulator.cluster.devices}) > 1:
            fast = tuple(sorted(plain, key=seconds.__getitem__))
            orders += [plain[::-1], fast, fast[::-1]]
        return list(dict.fromkeys(orders))

    def _groups(self, order: tuple[int, ...] | None, used: int) -> Iterator[Group]:
        """Next groups of devices when those of the mask are used."""
        n = self.costs.n_devices
        if order is None:
            free = [d for d in range(n) if not used >> d & 1]
            for k in range(1, len(free) + 1):
                yield from combinations(free, k)
            return
        first = used.bit_count()
        for k in range(1, n - first + 1):
            if k <= MOST_RUN or first + k == n or k % MOST_RUN == 0:
                yield tuple(sorted(order[first : first + k]))

    def _programme(
        self, order: tuple[int, ...] | None, limit_s: float, is_over: Callable[[], bool]
    ) -> list[Pipeline]:
        n, m = len(self.segments), self.n_microbatches
        n_devices = self.costs.n_devices
        n_cuts = math.comb(n + n_devices, n_devices)
        few = n_cuts * (math.factorial(n_devices) if order is None else 2**n_devices)
        keep = None if few <= ALL_PIPELINES_UP_TO else MOST_PAIRS
        # State: (segments done), (mask, last group) -> partial pipelines.
        layers: list[dict[tuple[int, Group], list[Partial]]] = [{} for _ in range(n + 1)]
        layers[0][(0, ())] = [Partial(0.0, 0.0, (), ())]
        stage_cost = lru_cache(maxsize=None)(self._stage_cost)
        crossing = lru_cache(maxsize=None)(self._crossing)
        for a in range(n):
            for (used, last), partials in layers[a].items():
                if is_over():
                    return []
                kept = _undominated(partials, keep)
                if not kept or m * self._rest_s(a, used) > limit_s:
                    continue
                for group in self._groups(order, used):
                    if len(group) > self._most:
                        continue
                    mask = used | sum(1 << d for d in group)
                    starts = [p.ends[-2] if len(p.ends) > 1 else 0 for p in kept]
                    crossings = [crossing(start, a, last, group) for start in starts]
                    least = min(p.prefix_s for p in kept)
                    for b in range(a + 1, n + 1):
                        stage = stage_cost(a, b, group)
                        if least + m * stage.seconds > limit_s:
                            break
                        target = layers[b].setdefault((mask, group), [])
                        target += [
                            partial.extended(c, stage, m, b, group)
                            for partial, c in zip(kept, crossings, strict=True)
                        ]
        finals = [item for partials in layers[n].values() for item in _undominated(partials, keep)]
        return [Pipeline(p.bound_s, p.ends, p.groups) for p in finals if p.bound_s <= limit_s]

    def _rest_s(self, a: int, used: int) -> float:
        """Seconds of the operators left per microbatch, if all free devices shared it perfectly."""
        rest = [
            float(self._seconds[-1, d] - self._seconds[a, d])
            for d in range(self.costs.n_devices)
            if not used >> d & 1
        ]
        if not rest:
            return math.inf
        return 0.0 if min(rest) <= 0 else 1 / sum(1 / seconds for seconds in rest)

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

    def refine(
        self, start: Pipeline, objective: Objective, shard_state: ShardState = "none"
    ) -> None:
        """Move one cut, or one device to the next stage, as long as the simulated step improves."""
        best, score = start, self.judge(start, objective, shard_state=shard_state)
        improved = True
        while improved and not objective.is_over():
            improved = False
            for near in self._neighbours(best):
                if objective.is_over():
                    return
                found = self.judge(near, objective, shard_state=shard_state)
                if found < score:
                    best, score, improved = near, found, True
                    break

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

    def strategy(
        self,
        pipeline: Pipeline,
        schedule: ScheduleName = "1f1b",
        *,
        recompute: bool = False,
        shard_state: ShardState = "none",
    ) -> Strategy:
        """A pipeline as a strategy."""
        return Strategy(
            name="pipeline",
            batch=self.batch,
            operators=self.simulator.by_name(self.plans(pipeline)),
            n_microbatches=self.n_microbatches,
            schedule=schedule,
            stages=[Stage(recompute)] * len(pipeline.groups),
            shard_state=shard_state,
        )

    def judge(
        self,
        pipeline: Pipeline,
        objective: Objective,
        schedule: ScheduleName = "1f1b",
        *,
        recompute: bool = False,
        shard_state: ShardState = "none",
    ) -> float:
        """Simulate one pipeline; the score."""
        strategy = self.strategy(pipeline, schedule, recompute=recompute, shard_state=shard_state)
        return objective.judge(Trial(self.simulator, strategy))


def _undominated(partials: list[Partial], keep: int | None) -> list[Partial]:
    """Those that no other beats in both numbers, at most `keep`; all of them when keep is None."""
    if keep is None:
        return partials
    found: list[Partial] = []
    for item in sorted(partials, key=lambda p: (p.bound_s, p.prefix_s)):
        if not found or item.prefix_s < found[-1].prefix_s:
            found.append(item)
    return found[:keep]


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
