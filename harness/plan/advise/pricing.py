"""The fastest strategy on one set of machines, by the simulator."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from statistics import median

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.strategy import Strategy
from harness.errors import PlanError, StrategyError
from harness.plan import builders
from harness.plan.advise.measured import KnownPlan
from harness.plan.costs import FAMILIES, PlanRequest, family_of
from harness.plan.portfolio import options_of, search_portfolio
from harness.plan.report import describe_strategy, memory_saved
from harness.plan.search.space import leaner, standard_strategies
from harness.plan.simulate.simulator import Simulation, Simulator

# Of a search where something fits; it ends by them, not by time, so that equal calls are alike.
_N_PROPOSALS = 300
_MOST_ACCUMULATED = 64
_MOST_BATCH = 2**20

Build = Callable[[Simulator, int], Strategy]


@dataclass(frozen=True, kw_only=True)
class AdviceRequest:
    """The model to place, and the assumptions.

    Attributes:
        batch: global batch; None where each device gets `per_device_batch`.
        families: of strategies that may be used.
        overlap: gradients are synchronised during the backward pass.
        reduce_dtype: in which gradients are summed over devices, fp32, bf16 or int8.
        sync_every: steps between two averages of a parameter's replicas; 1: gradients are summed.
        known: plans that earlier runs have found or tried, on these machines or some.
        factor: on predictions of several devices, by the plans that were tried.
    """

    graph: Graph
    profile: Profile
    batch: int | None
    per_device_batch: int | None = None
    memory_bytes: int | None = None
    families: tuple[str, ...] = FAMILIES
    optimizer: str = "momentum"
    overlap: bool = True
    reduce_dtype: str = "fp32"
    sync_every: int = 1
    known: tuple[KnownPlan, ...] = ()
    factor: float = 1.0

    def batch_on(self, n_devices: int) -> int:
        """The global batch on so many devices."""
        if self.per_device_batch is not None:
            return self.per_device_batch * n_devices
        assert self.batch is not None, "one of both is given"
        return self.batch

    def known_on(self, cluster: Cluster) -> list[KnownPlan]:
        batch = self.batch_on(cluster.n_devices)
        return [one for one in self.known if one.cluster == cluster and one.batch == batch]

    def untried(self) -> AdviceRequest:
        """The same without measured steps."""
        known = tuple(replace(one, step_s=None, is_raced=False) for one in self.known)
        return replace(self, known=known)

    def measured_s(self, strategy: Strategy, cluster: Cluster) -> float | None:
        """Seconds of its step on these machines; None where it was not tried there."""
        known = [one for one in self.known_on(cluster) if one.step_s is not None]
        name = describe_strategy(strategy, self.graph) if known else ""
        return next((one.step_s for one in known if one.name == name), None)

    def simulator(self, cluster: Cluster) -> Simulator:
        options = options_of(self.profile, cluster, self.reduce_dtype, self.optimizer)
        options = replace(options, overlap=self.overlap).averaging(self.sync_every)
        return Simulator(
            self.graph, self.profile, cluster, options=options, memory_bytes=self.memory_bytes
        )


@dataclass(frozen=True, kw_only=True)
class Priced:
    """A set of machines with its fastest strategy.

    Attributes:
        step_s: measured, or predicted and multiplied by the request's factor.
        fullest: device with the largest share of its memory in use, its bytes and its limit.
    """

    cluster: Cluster
    strategy: Strategy
    label: str
    batch: int
    predicted_s: float
    step_s: float
    is_measured: bool
    fullest: tuple[str, int, int]

    @property
    def name(self) -> str:
        """The label without the ways in which the strategy saves memory."""
        return self.label.removesuffix(memory_saved(self.strategy))

    @property
    def family(self) -> str:
        """One of FAMILIES."""
        return "searched" if self.label.startswith("searched") else family_of(self.label)

    @property
    def samples_per_s(self) -> float:
        return self.batch / self.step_s

    def at(self, factor: float) -> Priced:
        """With another factor on the prediction; a measured step and one device's stay."""
        is_kept = self.is_measured or self.cluster.n_devices == 1
        return self if is_kept else replace(self, step_s=factor * self.predicted_s)

    @property
    def node_names(self) -> list[str]:
        return [node.name for node in self.cluster.nodes]


def price(request: AdviceRequest, cluster: Cluster, *, search_cpu_s: float = 0.0) -> Priced | None:
    """The fastest strategy that fits and is for the set, or of those the one that trial steps
    chose; None without one.

    Args:
        search_cpu_s: most processor seconds in which to search, too; 0 does not search.
    """
    batch = request.batch_on(cluster.n_devices)
    simulator = request.simulator(cluster)
    found: list[Priced] = []
    known = request.known_on(cluster)
    for strategy in (one.strategy for one in known if "searched" in request.families):
        if strategy is not None and (simulation := simulator.simulate(strategy)).fits:
            found.append(_priced(request, simulation, f"searched: {strategy.name}"))
    is_raced = any(one.is_raced for one in known)
    if not (is_raced and any(one.is_measured for one in found)):
        found += [_priced(request, one) for one in _standards(request, simulator, batch)]
        if search_cpu_s > 0 and "searched" in request.families:
            budget = _N_PROPOSALS if found else None
            found += _searched(request, simulator, batch, search_cpu_s, budget)
    tried = [one for one in found if one.is_measured] if is_raced else []
    return min(tried or found, key=_rounded_s, default=None)


def _rounded_s(priced: Priced) -> float:
    """The step without rounding errors, so that the simplest of equal strategies comes first."""
    return float(f"{priced.step_s:.12g}")


def _standards(request: AdviceRequest, simulator: Simulator, batch: int) -> Iterator[Simulation]:
    is_one = simulator.cluster.n_devices == 1
    for strategy in _named(simulator, batch):
        family = family_of(strategy.name)
        if family == "pipeline" and family not in request.families:
            return  # they come last, and take time to balance
        if (family == "single") != is_one or not (is_one or family in request.families):
            continue
        if not _is_for(strategy, simulator.cluster):
            continue
        simulation = simulator.simulate(strategy)
        if simulation.fits:
            yield simulation
            continue
        for found in map(simulator.simulate, leaner(strategy, simulator)):
            if found.fits:
                yield found
                if len(strategy.stages) > 1:  # segments of stages take longer
                    break


def _named(simulator: Simulator, batch: int) -> Iterator[Strategy]:
    """The standard strategies; on one device also with microbatches, whose gradients add up."""
    if simulator.cluster.n_devices > 1:
        yield from standard_strategies(simulator, batch)
        return
    single = builders.single(simulator.graph, batch)
    yield single
    n = 2
    while simulator.graph.mixing_operator() is None and n <= min(batch, _MOST_ACCUMULATED):
        name = f"single, {n} microbatches"
        yield msgspec.structs.replace(single, name=name, n_microbatches=n, schedule="1f1b")
        n *= 2


def _is_for(strategy: Strategy, cluster: Cluster) -> bool:
    """Whether it uses every node, and more than one of several devices, which is another set."""
    node_of = cluster.node_of()
    used = {k for devices in strategy.stage_devices() for k in devices}
    is_alone = len(used) == 1 < cluster.n_devices
    return not is_alone and len({node_of[k] for k in used}) == len(cluster.nodes)


def _searched(
    request: AdviceRequest,
    simulator: Simulator,
    batch: int,
    search_cpu_s: float,
    budget: int | None,
) -> Iterator[Priced]:
    plan_request = PlanRequest(
        cluster=simulator.cluster,
        graph=request.graph,
        profile=request.profile,
        batch=batch,
        memory_bytes=request.memory_bytes,
        budget=budget,
        seconds=search_cpu_s,
    )
    try:
        found = search_portfolio(plan_request, options=simulator.options, clock=time.process_time)
    except PlanError:  # nothing fits
        return
    standard = {s.strategy.name for s in found.standards}
    for candidate in found.ranked():
        strategy = found.strategy(candidate)
        if candidate.method not in standard and _is_for(strategy, simulator.cluster):
            yield _priced(request, simulator.simulate(strategy), f"searched: {strategy.name}")
            return


def _priced(request: AdviceRequest, simulation: Simulation, label: str = "") -> Priced:
    simulator, out = simulation.simulator, simulation.outcome
    worst = int((out.memory_bytes / simulator.limits).argmax())
    measured_s = request.measured_s(simulation.strategy, simulator.cluster)
    found = Priced(
        cluster=simulator.cluster,
        strategy=simulation.strategy,
        label=label or simulation.strategy.name,
        batch=simulation.strategy.batch,
        predicted_s=simulation.step_s,
        step_s=simulation.step_s if measured_s is None else measured_s,
        is_measured=measured_s is not None,
        fullest=(
            simulator.network.names[worst],
            round(float(out.memory_bytes[worst])),
            round(float(simulator.limits[worst])),
        ),
    )
    return found.at(request.factor)


def factor_of(request: AdviceRequest, sets: Iterable[Priced]) -> float:
    """Median over the tried sets of several devices of the measured step over the best prediction
    there, because predictions of untried sets are as optimistic; 1 without any."""
    ratios, plain = [], request.untried()
    for one in sets:
        if one.is_measured and one.cluster.n_devices > 1:
            best = price(plain, one.cluster) or one
            ratios.append(one.step_s / min(one.predicted_s, best.predicted_s))
    return median(ratios) if ratios else 1.0


def largest_batch(request: AdviceRequest, cluster: Cluster, build: Build, least: int = 1) -> int:
    """The largest batch that fits, to a thirty-second and at most 2^20; 0 if not even `least`
    samples do.

    Memory is nearly a line in the batch, so the line through two points finds the next guess.

    Args:
        build: a strategy at a batch.
        least: samples below which the strategy does not exist.
    """
    simulator = request.simulator(cluster)

    def excess(batch: int) -> float:
        memory = simulator.simulate(build(simulator, batch)).outcome.memory_bytes
        return float((memory - simulator.limits).max())

    low, high = least, 2 * least
    try:
        under, over = excess(low), excess(high)
    except StrategyError:  # no such strategy of this model
        return 0
    if under > 0:
        return 0
    while over <= 0 and high < _MOST_BATCH:
        slope = (over - under) / (high - low)
        reach = math.ceil(high - 1.02 * over / slope) if slope > 0 else _MOST_BATCH
        low, under, high = high, over, min(_MOST_BATCH, max(high + 1, reach))
        over = excess(high)
    if over <= 0:
        return high
    while high - low > max(1, low // 32):
        middle = round(low + (high - low) * under / (under - over) * 0.99)
        middle = min(max(middle, low + 1), high - 1)
        found = excess(middle)
        low, under, high, over = (
            (middle, found, high, over) if found <= 0 else (low, under, middle, found)
        )
    return low
