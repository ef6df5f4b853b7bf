"""The default planner: standard strategies, exact programs, MCMC and descent under the simulator.

Every search judges by the same simulator, and the best plan of all is returned, so
that the result is never worse than the best standard strategy. Equal requests give equal plans,
unless `seconds` or an interrupt ends the search.
"""

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import fingerprint
from harness.domain.profile import Profile
from harness.domain.reduce_dtype import REDUCED_BYTES
from harness.domain.strategy import Strategy, check_fresh, validate
from harness.errors import PlanError, StrategyError, naming
from harness.plan.costs import PlanRequest, PlanResult, RunnerUp
from harness.plan.report import describe_strategy, memory_saved
from harness.plan.search.objective import Candidate, Objective
from harness.plan.search.searches import Searches
from harness.plan.search.space import leaner, standard_strategies
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import explain
from harness.plan.simulate.simulator import Simulation, Simulator, Trial, operator_seconds
from harness.units import format_bytes, format_duration


@dataclass(frozen=True, kw_only=True)
class Searched:
    """The best plans of a search: the fastest plan by the simulator, and the fastest of each kind;
    and the steps of the standard strategies."""

    simulator: Simulator
    objective: Objective
    standards: list[Simulation]
    interrupted: bool

    @property
    def best(self) -> Candidate:
        """By prediction."""
        assert self.objective.best is not None, "a search without any plan raises"
        return self.objective.best

    def ranked(self) -> list[Candidate]:
        """The fastest plan of each standard strategy and each search that fits into memory; no
        plan twice; fastest first."""
        return self.objective.ranked()

    def leanest(self, most: float) -> Candidate:
        """The plan on the fewest devices whose step is at most `most` times the best's."""
        limit_s = most * self.best.step_s
        close = [candidate for candidate in self.ranked() if candidate.step_s <= limit_s]
        return min(close, key=lambda candidate: (candidate.n_devices, candidate.step_s))

    def strategy(self, candidate: Candidate) -> Strategy:
        """A plan as a file has it, named by its content."""
        simulator, strategy = self.simulator, candidate.strategy
        return msgspec.structs.replace(
            strategy,
            name=describe_strategy(strategy, simulator.graph),
            made_for=fingerprint(simulator.graph, simulator.cluster, simulator.profile),
        )

    def result(self, chosen: Candidate | None = None) -> PlanResult:
        """The answer: the best by prediction, or another plan of `ranked`."""
        chosen = chosen or self.best
        strategy = self.strategy(chosen)
        simulation = self.simulator.simulate(strategy)
        by_name = {s.strategy.name: s.step_s for s in self.standards}
        n_proposals = self.objective.n_proposals
        return PlanResult(
            cost="simulator",
            method=chosen.method,
            predicted_step_s=simulation.step_s,
            speedup_over_single=by_name.get("single", math.nan) / simulation.step_s,
            speedup_over_ddp=by_name.get("ddp", math.nan) / simulation.step_s,
            memory_bytes=simulation.memory_bytes,
            optimizer=self.simulator.options.optimizer,
            strategy=strategy,
            explanation=[
                strategy.name,
                *explain(simulation),
                *_compare(simulation, self.standards),
            ],
            runners_up=_runners_up(self, chosen),
            n_proposals=n_proposals,
            proposals_per_s=n_proposals / max(self.objective.judging_s, 1e-9),
            interrupted=self.interrupted,
        )


def plan(request: PlanRequest) -> PlanResult:
    """Find the fastest strategy that fits into memory; errors as for `search_portfolio`."""
    return search_portfolio(request).result()


def search_portfolio(
    request: PlanRequest,
    *,
    options: SimulatorOptions | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Searched:
    """Search, and keep the best plans of each search.

    Args:
        options: what the simulator assumes of the engine; by default derived from the profile.
        clock: by which the request's seconds pass.

    Raises:
        PlanError: nothing fits, no operator takes time, or the request lacks graph or profile.
        StrategyError: the request's start is stale or does not fit.
    """
    graph, profile = request.model()
    batch = request.batch or graph.batch
    if batch is None:
        raise PlanError(f"graph {graph.name!r} has no batch: give --batch-size")
    if graph.batch is None:  # its numbers are for a whole minibatch: take it to be this one
        graph = msgspec.structs.replace(graph, batch=batch)
    simulator = Simulator(
        graph,
        profile,
        request.cluster,
        options=options
        or options_of(profile, request.cluster, request.reduce_dtype, request.optimizer),
        memory_bytes=request.memory_bytes,
    )
    check_times(simulator, batch)
    if request.start is not None:
        _check_start(request.start, simulator, batch)
    objective = Objective(
        simulator, seconds=request.seconds, clock=clock, progress=request.progress
    )
    standards: list[Simulation] = []
    interrupted = False
    try:
        standards += _judge_standards(simulator, batch, request, objective)
        searches = Searches(simulator, batch, request, objective)
        searches.run()
        searches.shard_fastest()
    except KeyboardInterrupt:
        if objective.best is None:
            raise
        interrupted = True
    if objective.best is None:
        raise PlanError(_nothing_fits(simulator, objective, request))
    return Searched(
        simulator=simulator, objective=objective, standards=standards, interrupted=interrupted
    )


def options_of(
    profile: Profile,
    cluster: Cluster,
    reduce_dtype: str = "fp32",
    optimizer: str | None = None,
) -> SimulatorOptions:
    """Options that follow from the profile: under autocast fp32 values are sent as its dtype;
    gradients are summed as `reduce_dtype`.

    Args:
        optimizer: one of OPTIMIZER_STEPS; None for the one that the profile has timed.
    """
    dtypes = {point.dtype for point in profile.measurements}
    is_half = bool(dtypes) and dtypes <= {"bfloat16", "float16"}
    options = SimulatorOptions(
        wire_bytes_per_fp32_byte=0.5 if is_half else 1.0,
        reduce_bytes_per_gradient_byte=REDUCED_BYTES[reduce_dtype],
    )
    return options.with_optimizer(optimizer or profile.timed_optimizer, profile, cluster)


def check_times(simulator: Simulator, batch: int) -> None:
    """Raise PlanError if the times of a device say nothing."""
    seconds = operator_seconds(simulator, batch).sum(axis=1)
    for device, whole_s in zip(simulator.cluster.devices, seconds, strict=True):
        if whole_s <= 0:
            raise PlanError(
                f"all operators of {simulator.graph.name!r} take 0 s on {device.kind!r}: give "
                "FLOPs or a profile"
            )


def _check_start(start: Strategy, simulator: Simulator, batch: int) -> None:
    """Refuse a strategy to start from that could not be trained as it is."""
    if start.batch != batch:
        raise StrategyError(
            f"strategy {start.name!r} to start from has a batch of {start.batch}, the search one "
            f"of {batch}: search with its batch, or start from another"
        )
    with naming("--start"):
        check_fresh(start, simulator.graph, simulator.cluster)
        validate(start, simulator.graph, simulator.cluster)


def _nothing_fits(simulator: Simulator, objective: Objective, request: PlanRequest) -> str:
    limit = format_bytes(float(simulator.limits.max()))
    is_early = objective.is_out_of_time()
    return (
        f"no strategy of {simulator.graph.name!r} fits: of {objective.n_proposals} tried"
        f"{' in the time given' if is_early else ''}, the closest needs "
        f"{1 + objective.least_excess:.2f} times the memory of its fullest device (largest device "
        f"{limit}): {'give more --search-seconds, ' if is_early else ''}add devices or "
        f"memory, or lower the batch{', or shard state' if request.shard_state == 'none' else ''}"
    )


def _judge_standards(
    simulator: Simulator, batch: int, request: PlanRequest, objective: Objective
) -> Iterator[Simulation]:
    """One device and the start in any case, the others while there is time and no limit; leaner
    forms of those that do not fit."""

    def is_over() -> bool:
        return request.most_replicas is not None or objective.is_out_of_time()

    start = request.start
    standards = standard_strategies(simulator, batch, request.shard_state)
    for number, strategy in enumerate(standards):
        if number and is_over():
            return
        validate(strategy, simulator.graph, simulator.cluster)
        found = _judge(simulator, strategy, objective)
        yield found
        if number == 0 and start is not None:
            named = msgspec.structs.replace(start, name=f"start: {start.name}")
            yield _judge(simulator, named, objective)
        for form in () if found.fits else leaner(strategy, simulator, request.shard_state):
            if is_over():
                return
            found = _judge(simulator, form, objective)
            yield found
            if found.fits and len(form.stages) > 1:  # segments of stages take longer
                break


def _judge(simulator: Simulator, strategy: Strategy, objective: Objective) -> Simulation:
    objective.start(strategy.name)
    trial = Trial(simulator, strategy)
    objective.judge(trial)
    return Simulation(simulator, strategy, trial.outcome())


def _compare(simulation: Simulation, standards: list[Simulation]) -> list[str]:
    """How much better than data parallel, and the parts of the data-parallel step."""
    ddp = next((s for s in standards if s.strategy.name == "ddp"), None)
    chosen = simulation.strategy
    if ddp is None or (ddp.strategy.operators, ddp.strategy.shard_state) == (
        chosen.operators,
        chosen.shard_state,
    ):
        return []
    fits = "" if ddp.fits else " (and does not fit into memory)"
    lines = [
        f"data parallel takes {format_duration(ddp.step_s)}, {ddp.step_s / simulation.step_s:.2f} "
        f"times as long{fits}:"
    ]
    return lines + [f"  {line}" for line in explain(ddp)[:-1]]


def _runners_up(found: Searched, chosen: Candidate) -> list[RunnerUp]:
    """All but the chosen plan, without leaner forms that do not fit either."""
    lost = [
        RunnerUp(
            name=other.strategy.name,
            step_s=other.step_s if other.fits else None,
            note="" if other.fits else lack_of_memory(other),
        )
        for other in found.standards
        if other.strategy.name != chosen.method
        if other.fits
        or not (saved := memory_saved(other.strategy))
        or not other.strategy.name.endswith(saved)
    ]
    standard = {other.strategy.name for other in found.standards}
    lost += [
        RunnerUp(
            name=candidate.method, step_s=candidate.step_s, note=found.strategy(candidate).name
        )
        for candidate in found.ranked()
        if candidate.method not in standard and candidate.strategy != chosen.strategy
    ]
    return sorted(lost, key=lambda r: (r.step_s is None, r.step_s or 0.0, r.name))


def lack_of_memory(simulation: Simulation) -> str:
    """What a plan that does not fit needs, on the device that lacks most."""
    out, simulator = simulation.outcome, simulation.simulator
    worst = int((out.memory_bytes - simulator.limits).argmax())
    return (
        f"out of memory: {format_bytes(float(out.memory_bytes[worst]))} on "
        f"{simulator.network.names[worst]}, which has "
        f"{format_bytes(float(simulator.limits[worst]))}"
    )
