"""`--cost layouts`: the best degrees of tensor, data and pipeline parallelism on equal nodes.

The price of a layout needs one group's simulation for each size of group and microbatch, so the
cost of planning does not grow with the number of devices, but for the strategy's file.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import msgspec

from harness.domain.checkpoints import MOST_OF_STAGE, segment_numbers, with_recomputation
from harness.domain.cluster import Cluster
from harness.domain.fingerprint import fingerprint
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.shard_state import ShardState, shards_in_nodes
from harness.domain.sharding import has_tasks
from harness.domain.strategy import Strategy
from harness.errors import PlanError, StrategyError
from harness.plan.bottleneck import balance
from harness.plan.costs import PlanRequest, PlanResult, RunnerUp, SearchProgress
from harness.plan.layouts.degrees import ParallelLayout, layout_strategy
from harness.plan.layouts.group import Group, GroupCosts
from harness.plan.layouts.judging import MOST_DEVICES, judged
from harness.plan.layouts.links import NodeLinks, replicas_in_node, transfer_seconds
from harness.plan.layouts.pricing import Choice, price
from harness.plan.portfolio import options_of
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.sharded_state import (
    MOST_COMPARED,
    SHARDING_GAIN,
    may_shard_for_speed,
    useful_states,
)
from harness.plan.simulate.simulator import Simulator
from harness.units import format_bytes

_MOST_RUNNERS_UP = 8


def plan(request: PlanRequest) -> PlanResult:
    """Find the fastest layout that uses all devices.

    Raises:
        PlanError: unlike nodes, no batch, or nothing fits.
    """
    graph, profile = request.model()
    batch = request.batch or graph.batch
    if batch is None:
        raise PlanError(f"graph {graph.name!r} has no batch: give --batch-size")
    limit = request.memory_bytes or request.cluster.devices[0].memory_bytes
    one = request.cluster.part([0])  # groups of any size have the rates of the first device
    search = LayoutSearch(
        graph,
        profile,
        request.cluster,
        batch,
        options_of(profile, one, request.reduce_dtype, request.optimizer),
        limit_bytes=limit,
        shard_state=request.shard_state,
    )
    found: list[Choice] = []
    for choice in search.choices():
        found.append(choice)
        fitting = [each.step_s for each in found if each.memory_bytes <= limit]
        if fitting and len(found) % 16 == 0:
            request.progress(SearchProgress(n_proposals=len(found), best_step_s=min(fitting)))
    if not found:
        raise PlanError(
            f"no layout shares a batch of {batch} among all {request.cluster.n_devices} devices: "
            "give a batch of a multiple of them, or fewer devices"
        )

    def rank(choice: Choice) -> tuple[bool, float, str]:
        return choice.memory_bytes > limit, choice.step_s, choice.name

    found.sort(key=rank)
    affordable = [choice for choice in found if choice.memory_bytes <= limit]
    if affordable and request.cluster.n_devices <= MOST_DEVICES:
        simulator = Simulator(
            graph,
            profile,
            request.cluster,
            options=options_of(profile, request.cluster, request.reduce_dtype, request.optimizer),
            memory_bytes=limit,
        )
        may_shard = request.shards_for_speed and search.may_shard_for_speed
        best = judged(affordable, simulator, search.strategy, may_shard=may_shard)
        found = [*best, *found[len(affordable) :]]
    elif request.shards_for_speed:
        found = sorted([*found, *search.sharded(found)], key=rank)
    if found[0].memory_bytes > limit:
        least = min(choice.memory_bytes for choice in found)
        raise PlanError(
            f"no layout of {graph.name!r} fits: of {len(found)}, the closest needs "
            f"{format_bytes(least)} on a device, which has {format_bytes(float(limit))}: add "
            "devices or memory, or lower the batch"
        )
    return _result(request, search, found, limit)


class LayoutSearch:
    """All layouts of a graph on a cluster of equal nodes.

    Args:
        limit_bytes: of a device. A layout that needs more shards state too.
        shard_state: of all layouts; None: what memory needs.

    Raises:
        PlanError: unlike nodes.
    """

    def __init__(
        self,
        graph: Graph,
        profile: Profile,
        cluster: Cluster,
        batch: int,
        options: SimulatorOptions | None = None,
        *,
        limit_bytes: float = math.inf,
        shard_state: ShardState | None = None,
    ) -> None:
        self.graph, self.profile, self.cluster, self.batch = graph, profile, cluster, batch
        self.limit_bytes, self.shard_state = limit_bytes, shard_state
        self.options = options or SimulatorOptions()
        self.links = NodeLinks.from_cluster(cluster)
        self._placed = [i for i, op in enumerate(graph.operators) if has_tasks(op)]
        self._groups: dict[int, Group] = {}
        self._segments: dict[tuple[int, int], list[int]] = {}
        self._stages: dict[tuple[int, int, int, bool], list[tuple[int, ...]]] = {}

    def choices(self) -> Iterator[Choice]:
        """Every layout, with each size of microbatch that is a power of two."""
        n = self.cluster.n_devices
        for tp in _divisors(self.links.n_each):
            for pp in _divisors(n // tp):
                dp = n // tp // pp
                if pp <= len(self._placed) and self.batch % dp == 0:
                    yield from self._of_degrees(ParallelLayout(tp=tp, dp=dp, pp=pp))

    @property
    def may_shard_for_speed(self) -> bool:
        """Whether a sharded optimizer's state may be tried where memory does not need it."""
        return self.shard_state is None and may_shard_for_speed(self.graph, self.options)

    def sharded(self, ranked: Sequence[Choice]) -> list[Choice]:
        """The first layouts with the optimizer's state sharded, if no state was asked for: those
        that gain enough on the first."""
        if not self.may_shard_for_speed:
            return []
        plain = [one for one in ranked if self._fits(one) and one.shard_state == "none"]
        found = [
            self._price(one.layout, one.n_microbatches, one.segments, "optimizer")
            for one in plain[:MOST_COMPARED]
            if one.layout.dp > 1
        ]
        return [one for one in found if one.step_s <= plain[0].step_s / SHARDING_GAIN]

    def single_s(self) -> float:
        """Of the batch on one device, in the best size of microbatch, whatever it needs."""
        alone = ParallelLayout()
        sizes = self._sizes(self.batch)
        return min(self._price(alone, self.batch // n, 0, "none").step_s for n in sizes)

    def _sizes(self, own: int) -> list[int]:
        """Samples of a replica's microbatch: powers of two, and what makes as many of them; all
        where an operator needs them."""
        if self.graph.mixing_operator() is not None:
            return [own]
        powers = [2**k for k in range(own.bit_length()) if own % 2**k == 0]
        return sorted({*powers, *(own // n for n in powers)})

    def _costs(self, tp: int, samples: int) -> GroupCosts:
        if tp not in self._groups:
            self._groups[tp] = Group(self.graph, self.profile, self.cluster, tp, self.options)
        return self._groups[tp].costs(samples)

    def _price(
        self, layout: ParallelLayout, n_microbatches: int, segments: int, shard_state: ShardState
    ) -> Choice:
        samples = self.batch // layout.dp // n_microbatches
        return price(
            layout,
            n_microbatches,
            segments=segments,
            segment_cuts=self._segment_cuts(layout, segments),
            shard_state=shard_state,
            costs=self._costs(layout.tp, samples),
            links=self.links,
            options=self.options,
        )

    def _of_degrees(self, layout: ParallelLayout) -> Iterator[Choice]:
        own = self.batch // layout.dp
        for samples in self._sizes(own):
            try:
                costs = self._costs(layout.tp, samples)
            except StrategyError:  # a group of this size cannot share an operator
                return
            for segments in (0, 1, MOST_OF_STAGE):
                fit_unsharded = True
                for cut in self._cut(layout, samples, costs, recompute=segments > 0):
                    priced = partial(self._price, cut, own // samples, segments)
                    found = self._in_states(layout, priced)
                    yield from found
                    fit_unsharded &= len(found) == 1 and self._fits(found[0])
                if segments and fit_unsharded:  # segments would take longer
                    break

    def _in_states(self, layout: ParallelLayout, priced: Callable[..., Choice]) -> list[Choice]:
        """Price a layout unsharded, and, if it does not fit, with more and more state sharded until
        it does, over all replicas and within nodes; or as asked.

        Args:
            priced: with some `shard_state`.
        """
        n, n_in_node = layout.dp, replicas_in_node(layout, self.links)
        states = ("none", *useful_states(n, self.options, n_in_node))
        if self.shard_state is not None:
            states = (self.shard_state if n > 1 else "none",)
        found: list[Choice] = []
        for in_nodes in (False, True):
            if found and self._fits(found[0]):
                break
            for state in (state for state in states if shards_in_nodes(state) == in_nodes):
                found.append(priced(shard_state=state))
                if self._fits(found[-1]):
                    break
        return found

    def _fits(self, choice: Choice) -> bool:
        return choice.memory_bytes <= self.limit_bytes

    def _cut(
        self, layout: ParallelLayout, samples: int, costs: GroupCosts, *, recompute: bool
    ) -> list[ParallelLayout]:
        """With stages equal in computing, and with those equal in computing and transfers, which
        have a NIC to themselves or share it."""
        key = (layout.tp, layout.pp, samples, recompute)
        if key not in self._stages:
            again_s = costs.again_s * (costs.returns * recompute)
            seconds = costs.forward_s + again_s + costs.backward_s
            far = layout.n_devices > self.links.n_each
            sent_s, latency_s = transfer_seconds(layout, costs.crossing_bytes, self.links, far)
            sent_s = sent_s.sum(axis=0)
            # Replicas that share a NIC get out of step, and then have nearly all of it in turn.
            n_flows = min(layout.tp * layout.dp, self.links.n_each) if far else 1
            found = [
                balance([seconds.tolist()] * layout.pp, layout.pp, each_s.tolist()).ends[:-1]
                for each_s in (0 * sent_s, *(sent_s / n + 2 * latency_s for n in (n_flows, 1)))
            ]
            self._stages[key] = list(dict.fromkeys(found))
        return [replace(layout, cuts=cuts) for cuts in self._stages[key]]

    def _segment_cuts(self, layout: ParallelLayout, segments: int) -> list[list[int]]:
        """Where the segments of each stage begin but the first, counted from the stage's first
        operator."""
        found = []
        for stage in pairwise((0, *(layout.cuts or ()), len(self._placed))):
            if segments > 1 and stage not in self._segments:
                own = self._placed[slice(*stage)]
                numbers = segment_numbers(self.graph, own, segments)
                self._segments[stage] = [
                    k for k in range(1, len(own)) if numbers[k] > numbers[k - 1]
                ]
            found.append(self._segments[stage] if segments > 1 else [])
        return found

    def strategy(self, choice: Choice) -> Strategy:
        strategy = layout_strategy(
            choice.layout,
            self.graph,
            self.cluster,
            self.batch,
            n_microbatches=choice.n_microbatches,
            schedule=choice.schedule,
        )
        if choice.segments:
            strategy = with_recomputation(strategy, self.graph, choice.segments)
        return msgspec.structs.replace(strategy, shard_state=choice.shard_state)


def _divisors(n: int) -> list[int]:
    return [k for k in range(1, n + 1) if n % k == 0]


def _result(
    request: PlanRequest, search: LayoutSearch, found: list[Choice], limit: int
) -> PlanResult:
    best, cluster, n = found[0], search.cluster, search.cluster.n_devices
    made_for = fingerprint(search.graph, cluster, search.profile)
    strategy = msgspec.structs.replace(search.strategy(best), made_for=made_for)
    single_s = search.single_s()
    explanation = [f"{best.name}, of {len(found)} layouts with their flows"]
    plain = [c for c in found if c.shard_state == "none" and not c.segments]
    ddp = [c for c in plain if c.layout.dp == n]
    fitting = [c for c in ddp if c.memory_bytes <= limit]
    if ddp and not fitting:
        least = format_bytes(min(c.memory_bytes for c in ddp))
        explanation.append(f"data parallel does not fit into memory: it needs {least} or more")
    return PlanResult(
        cost="layouts",
        method="all layouts, by classes of devices",
        predicted_step_s=best.step_s,
        speedup_over_single=single_s / best.step_s,
        speedup_over_ddp=min((c.step_s for c in fitting or ddp), default=math.nan) / best.step_s,
        memory_bytes={device.name: best.memory_bytes for device in cluster.devices},
        optimizer=search.options.optimizer,
        strategy=strategy,
        explanation=explanation,
        runners_up=_runners_up(found, limit, single_s),
        n_proposals=len(found),
    )


def _runners_up(found: list[Choice], limit: int, single_s: float) -> list[RunnerUp]:
    """One device, and the best flow of the best other layouts."""
    best_of: dict[str, Choice] = {}
    for choice in found:
        best_of.setdefault(choice.layout.name, choice)
    others = [
        RunnerUp(
            name=choice.name,
            step_s=choice.step_s if fits else None,
            note="" if fits else f"out of memory: {format_bytes(choice.memory_bytes)}",
        )
        for choice in list(best_of.values())[1 : _MOST_RUNNERS_UP + 1]
        for fits in (choice.memory_bytes <= limit,)
    ]
    single = RunnerUp(name="one device", step_s=single_s, note="whatever memory it needs")
    return sorted([single, *others], key=lambda other: (other.step_s is None, other.step_s or 0.0))
