"""The default planner: standard strategies, exact programmes, MCMC and descent under the simulator.

Every search judges by the same simulator and what is returned is the best that any has seen, so
that the result is never worse than the best standard strategy. Equal requests give equal plans,
unless `seconds` or an interrupt ends the search.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from harness.domain.fingerprint import fingerprint
from harness.domain.strategy import OperatorPlan, Stage, Strategy, check_fresh, validate
from harness.errors import PlanError
from harness.plan.describe import describe_strategy
from harness.plan.request import PlanRequest, PlanResult, RunnerUp
from harness.plan.search.exhaustive import search_exhaustively
from harness.plan.search.mcmc import Chain, closest, descend
from harness.plan.search.objective import Candidate, Objective
from harness.plan.search.pipelines import PipelineSearch, schedules_for
from harness.plan.search.space import Space
from harness.plan.search.standard import microbatch_counts, standard_strategies
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import explain
from harness.plan.simulate.simulator import Simulation, Simulator, Trial
from harness.units import format_bytes, format_duration

MOST_PROPOSALS, LEAST_PROPOSALS = 12_000, 400
WORK_PER_SEARCH = 1.5e7  # operator-device passes of all proposals: some seconds
N_CHAINS = 3
PIPELINES = "pipeline dynamic programming"
ALL_STRATEGIES_UP_TO = 20_000  # a space that small is searched exhaustively


@dataclass(frozen=True)
class Standing:
    """How a standard strategy fared."""

    strategy: Strategy
    simulation: Simulation


def plan(request: PlanRequest) -> PlanResult:
    """Find the fastest strategy that fits into memory.

    Raises:
        PlanError: nothing fits, or the request lacks graph or profile.
    """
    return plan_with_simulator(request)


@dataclass(frozen=True, kw_only=True)
class Searched:
    """What a search has seen: the fastest plan by the simulator, and the fastest of each kind.

    Attributes:
        interrupted: the search was ended early, by Ctrl-C.
    """

    simulator: Simulator
    objective: Objective
    standings: list[Standing]
    interrupted: bool

    @property
    def best(self) -> Candidate:
        """By prediction."""
        assert self.objective.best is not None, "a search without any plan raises"
        return self.objective.best

    def ranked(self) -> list[Candidate]:
        """The fastest plan of each standard strategy and each search that fits into memory; no
        plan twice; fastest first."""
        distinct: list[Candidate] = []
        for candidate in sorted(self.objective.best_of.values(), key=lambda c: c.step_s):
            if not any(candidate.is_same_plan(other) for other in distinct):
                distinct.append(candidate)
        return distinct

    def strategy(self, candidate: Candidate) -> Strategy:
        """A plan as a file has it, named for what it does."""
        simulator = self.simulator
        strategy = candidate.to_strategy(simulator.graph, "searched")
        return msgspec.structs.replace(
            strategy,
            name=describe_strategy(strategy, simulator.graph),
            made_for=fingerprint(simulator.graph, simulator.cluster, simulator.profile),
        )

    def result(self, chosen: Candidate | None = None) -> PlanResult:
        """The answer.

        Args:
            chosen: another plan of `ranked` than the best by prediction.
        """
        return _result(self, chosen or self.best)


def plan_with_simulator(
    request: PlanRequest,
    *,
    options: SimulatorOptions | None = None,
    start: Strategy | None = None,
    exhaustive_up_to: int = ALL_STRATEGIES_UP_TO,
) -> PlanResult:
    """As `plan`, with more to say; arguments and errors as for `search_portfolio`."""
    found = search_portfolio(
        request, options=options, start=start, exhaustive_up_to=exhaustive_up_to
    )
    return found.result()


def search_portfolio(
    request: PlanRequest,
    *,
    options: SimulatorOptions | None = None,
    start: Strategy | None = None,
    exhaustive_up_to: int = ALL_STRATEGIES_UP_TO,
) -> Searched:
    """Search, and keep what each search found.

    Args:
        options: what the simulator assumes of the engine.
        start: a strategy to start from too, such as an imported one.
        exhaustive_up_to: largest space that is enumerated; 0 leaves it to the other searches.

    Raises:
        PlanError: nothing fits, or the request lacks graph or profile.
        StrategyError: `start` is stale or does not fit.
    """
    if request.graph is None or request.profile is None:
        raise PlanError("the simulator plans a model: give a graph and its profile")
    batch = request.batch or request.graph.batch
    if batch is None:
        raise PlanError(f"graph {request.graph.name!r} has no batch: give --batch")
    graph = request.graph
    if graph.batch is None:  # its numbers are for a whole minibatch: take it to be this one
        graph = msgspec.structs.replace(graph, batch=batch)
    simulator = Simulator(
        graph,
        request.profile,
        request.cluster,
        options=options,
        memory_bytes=request.memory_bytes,
    )
    objective = Objective(simulator, seconds=request.seconds, progress=request.progress)
    standings: list[Standing] = []
    interrupted = False
    try:
        standings += _judge_standards(simulator, batch, start, objective)
        _Searches(simulator, batch, request, objective, exhaustive_up_to).run()
    except KeyboardInterrupt:
        if objective.best is None:
            raise
        interrupted = True
    if objective.best is None:
        raise PlanError(_nothing_fits(simulator, objective))
    return Searched(
        simulator=simulator, objective=objective, standings=standings, interrupted=interrupted
    )


def _nothing_fits(simulator: Simulator, objective: Objective) -> str:
    limit = format_bytes(float(simulator.limits.max()))
    return (
        f"no strategy of {simulator.graph.name!r} fits: of {objective.n_proposals} tried, the "
        "closest "
        f"needs {1 + objective.least_excess:.2f} times the memory of its fullest device "
        "(largest device "
        f"{limit}): add devices or memory, or lower the batch"
    )


def _judge_standards(
    simulator: Simulator, batch: int, start: Strategy | None, objective: Objective
) -> Iterator[Standing]:
    objective.start("standard strategies")
    strategies = list(standard_strategies(simulator, batch))
    if start is not None:
        check_fresh(start, simulator.graph, simulator.cluster, simulator.profile)
        strategies.append(start)
    for strategy in strategies:
        validate(strategy, simulator.graph, simulator.cluster)
        objective.start(strategy.name)
        trial = Trial.from_strategy(simulator, strategy)
        objective.judge(trial)
        yield Standing(strategy, Simulation(simulator, strategy, trial.outcome()))


class _Searches:
    """The portfolio proper."""

    def __init__(
        self,
        simulator: Simulator,
        batch: int,
        request: PlanRequest,
        objective: Objective,
        exhaustive_up_to: int,
    ) -> None:
        self.simulator, self.batch, self.objective = simulator, batch, objective
        self.seed = request.seed
        self.exhaustive_up_to = exhaustive_up_to
        work = len(simulator.placed) * simulator.cluster.n_devices * 4
        default = min(MOST_PROPOSALS, max(LEAST_PROPOSALS, int(WORK_PER_SEARCH / work)))
        self.budget = default if request.budget is None else max(1, request.budget)
        self.counts = microbatch_counts(simulator, batch)
        self._spaces: dict[int, Space] = {}

    def run(self) -> None:
        """Pipelines, then per-operator searches for the most promising flows."""
        if self.simulator.cluster.n_devices > 1:
            self._pipelines(self.budget // 4)
        flows = self._flows()
        for n_microbatches, stage in flows[:1]:
            self._exhaust(n_microbatches, stage)
        for k, (n_microbatches, stage) in enumerate(flows):
            share = self.budget // 2 if k == 0 else self.budget // (4 * max(1, len(flows) - 1))
            self._chains(n_microbatches, stage, share)

    def _flows(self) -> list[tuple[int, Stage]]:
        """(microbatches, recomputation) for single-stage strategies: whole batches first."""
        flows = [(n, Stage()) for n in self.counts[:3]]
        if self.objective.best is None or self._memory_binds():
            flows += [(n, Stage(recompute=True)) for n in (self.counts[0], self.counts[-1])]
        return flows

    def _memory_binds(self) -> bool:
        return self.objective.least_excess > 0

    def _pipelines(self, budget: int) -> None:
        """Simulate the programme's best pipelines for each number of microbatches."""
        self.objective.start(PIPELINES, budget=budget)
        each = max(4, budget // (3 * len(self.counts)))
        for n_microbatches in self.counts:
            search = PipelineSearch(self.simulator, self.batch, n_microbatches)
            # The bound leaves out most of what makes pipelines slower, so above the best it is
            # hopeless; it counts a tensor that skips a stage at both cuts, hence the slack.
            best = self.objective.best
            limit_s = 1.1 * best.step_s if best is not None else math.inf
            candidates = search.candidates(each, limit_s=limit_s, is_over=self.objective.tick)
            before = self.objective.best_of.get(PIPELINES)
            for pipeline in candidates:
                for schedule in schedules_for(n_microbatches):
                    if self.objective.is_over():
                        return
                    search.judge(pipeline, self.objective, schedule)
                if self.objective.best is None:
                    search.judge(pipeline, self.objective, recompute=True)
            if candidates and self.objective.best_of.get(PIPELINES) is not before:
                scores = [search.judge(pipeline, self.objective) for pipeline in candidates[:8]]
                search.refine(candidates[scores.index(min(scores))], self.objective)

    def _space(self, n_microbatches: int) -> Space:
        samples = -(-self.batch // n_microbatches)
        smallest = self.batch // n_microbatches
        if n_microbatches not in self._spaces:
            costs = self.simulator.costs(min(samples, smallest))
            self._spaces[n_microbatches] = Space(
                costs, self.simulator.cluster, self.simulator.placed
            )
        return self._spaces[n_microbatches]

    def _trial(self, n_microbatches: int, stage: Stage) -> Trial:
        space = self._space(n_microbatches)
        plans: dict[int, OperatorPlan] = {op: menu[0] for op, menu in space.menus.items()}
        return Trial(
            self.simulator, plans, batch=self.batch, n_microbatches=n_microbatches, stages=[stage]
        )

    def _exhaust(self, n_microbatches: int, stage: Stage) -> None:
        space = self._space(n_microbatches)
        if space.size <= min(self.exhaustive_up_to, self.budget):
            self.objective.start("exhaustive search")
            search_exhaustively(self._trial(n_microbatches, stage), space.menus, self.objective)

    def _chains(self, n_microbatches: int, stage: Stage, budget: int) -> None:
        """MCMC from the best single-stage strategies, each chain followed by a descent.

        What the descents leave of the budget goes to chains from random starts.
        """
        space = self._space(n_microbatches)
        trial = self._trial(n_microbatches, stage)
        name = f"MCMC, {n_microbatches} microbatches" if n_microbatches > 1 else "MCMC"
        starts = self._starts(space)
        objective, end = self.objective, self.objective.n_proposals + max(1, budget)
        # A small space is better served by many short chains than by few long ones.
        n_choices = sum(map(len, space.menus.values()))
        each = max(1, min(budget // (2 * N_CHAINS), max(200, 10 * n_choices)))
        draw = random.Random(self.seed)
        k = 0
        while objective.n_proposals < end:
            start = (
                starts[k]
                if k < len(starts)
                else {op: draw.choice(menu) for op, menu in space.menus.items()}
            )
            objective.start(name, budget=min(each, end - objective.n_proposals))
            chain = Chain(trial, space, objective, seed=1000 * self.seed + 10 * k, turn=k)
            reached = chain.run(start)
            objective.start(name, budget=min(each, max(1, end - objective.n_proposals)))
            descend(trial, space, objective, reached)
            k += 1
            if objective.is_out_of_time():
                return

    def _starts(self, space: Space) -> list[dict[int, OperatorPlan]]:
        """The best single-stage strategies so far, as far as the space has their plans."""
        known = [c for c in self.objective.best_of.values() if len(c.stages) == 1]
        ranked = sorted(known, key=lambda c: c.step_s)[:N_CHAINS]
        starts = [_project(candidate, space) for candidate in ranked]
        if not starts:  # nothing fits yet: spread everything as far as it goes
            starts = [{op: menu[-1] for op, menu in space.menus.items()}]
        return starts


def _project(candidate: Candidate, space: Space) -> dict[int, OperatorPlan]:
    """A candidate's plans where the space's shapes allow them, else the nearest of the menu."""
    return {op: closest(menu, candidate.plans[op]) for op, menu in space.menus.items()}


def _result(found: Searched, chosen: Candidate) -> PlanResult:
    objective, standings = found.objective, found.standings
    strategy = found.strategy(chosen)
    simulation = found.simulator.simulate(strategy)
    by_name = {s.strategy.name: s.simulation.step_s for s in standings}
    single = by_name.get("single", math.nan)
    ddp = by_name.get("ddp", single)
    return PlanResult(
        cost="simulator",
        method=chosen.method,
        predicted_step_s=simulation.step_s,
        speedup_over_single=single / simulation.step_s,
        speedup_over_ddp=ddp / simulation.step_s,
        memory_bytes=simulation.memory_bytes,
        strategy=strategy,
        explanation=[strategy.name, *explain(simulation), *_compare(simulation, standings)],
        runners_up=_runners_up(found, chosen),
        n_proposals=objective.n_proposals,
        proposals_per_s=objective.n_proposals / max(objective.judging_s, 1e-9),
        interrupted=found.interrupted,
    )


def _compare(simulation: Simulation, standings: list[Standing]) -> list[str]:
    """How much better than data parallel, and what data parallel spends its step on."""
    ddp = next((s.simulation for s in standings if s.strategy.name == "ddp"), None)
    if ddp is None:
        return []
    fits = "" if ddp.fits else " (and does not fit into memory)"
    lines = [
        f"data parallel takes {format_duration(ddp.step_s)}, "
        f"{ddp.step_s / simulation.step_s:.2f} times "
        f"as long{fits}:"
    ]
    return lines + [f"  {line}" for line in explain(ddp)[:-1]]


def _runners_up(found: Searched, chosen: Candidate) -> list[RunnerUp]:
    lost = [
        RunnerUp(
            name=standing.strategy.name,
            step_s=standing.simulation.step_s if standing.simulation.fits else None,
            note="" if standing.simulation.fits else _lacks(standing.simulation),
        )
        for standing in found.standings
        if standing.strategy.name != chosen.method
    ]
    standard = {standing.strategy.name for standing in found.standings}
    lost += [
        RunnerUp(
            name=candidate.method, step_s=candidate.step_s, note=found.strategy(candidate).name
        )
        for candidate in found.ranked()
        if candidate.method not in standard and not candidate.is_same_plan(chosen)
    ]
    return sorted(lost, key=lambda r: (r.step_s is None, r.step_s or 0.0, r.name))


def _lacks(simulation: Simulation) -> str:
    out, simulator = simulation.outcome, simulation.simulator
    worst = int((out.memory_bytes - simulator.limits).argmax())
    return (
        f"out of memory: {format_bytes(float(out.memory_bytes[worst]))} on "
        f"{simulator.network.names[worst]}, which has "
        f"{format_bytes(float(simulator.limits[worst]))}"
    )
