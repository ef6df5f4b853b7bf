"""Which searches a request gets, and how they share its budget: pipelines and chains."""

import math
import random
from collections.abc import Iterator
from functools import partial

import msgspec

from harness.domain.checkpoints import can_recompute, n_segments_of_least_memory
from harness.domain.schedule import SCHEDULES
from harness.domain.shard_state import ShardState, shards_parameters
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.plan.costs import PlanRequest
from harness.plan.search.mcmc import Chain, closest, descend
from harness.plan.search.objective import Objective
from harness.plan.search.pipelines import Form, PipelineSearch, schedules_for
from harness.plan.search.space import Space, microbatch_counts
from harness.plan.search.stage_chains import Pipeline
from harness.plan.simulate.sharded_state import (
    MOST_COMPARED,
    SHARDING_GAIN,
    may_shard_for_speed,
    useful_states,
)
from harness.plan.simulate.simulator import Simulator, Trial
from harness.units import format_count

MOST_PROPOSALS, LEAST_PROPOSALS = 12_000, 400
WORK_PER_SEARCH = 1.5e7  # operator-device passes of all proposals: some seconds
N_CHAINS = 3
MOST_TURNS = 100  # interleaved pipelines for each number of microbatches


class Searches:
    """The searches of one request, which share its objective."""

    def __init__(
        self,
        simulator: Simulator,
        batch: int,
        request: PlanRequest,
        objective: Objective,
    ) -> None:
        self.simulator, self.batch, self.objective = simulator, batch, objective
        self.seed, self.most_replicas = request.seed, request.most_replicas
        work = len(simulator.placed) * simulator.cluster.n_devices * 4
        default = min(MOST_PROPOSALS, max(LEAST_PROPOSALS, int(WORK_PER_SEARCH / work)))
        self.budget = default if request.budget is None else max(1, request.budget)
        self.counts = microbatch_counts(simulator, batch)
        self._spaces: dict[int, Space] = {}
        self._recomputes = can_recompute(simulator.graph)
        # Of all plans, and of further ones where memory binds.
        self._state: ShardState = request.shard_state or "none"
        network, options = simulator.network, simulator.options
        states = useful_states(network.n_devices, options, network.n_in_node)
        self._states = states if request.shard_state is None else ()
        self._shards_for_speed = request.shard_state is None and request.shards_for_speed

    def run(self) -> None:
        """Pipelines, then per-operator searches for the most promising flows, as time allows."""
        is_limited = self.most_replicas is not None
        if self.simulator.cluster.n_devices > 1:
            self._pipelines(self.budget if is_limited else self.budget // 4)
        if is_limited:
            return
        flows = self._flows()
        for k, flow in enumerate(flows):
            if self.objective.is_out_of_time():
                return
            share = self.budget // 2 if k == 0 else self.budget // (4 * max(1, len(flows) - 1))
            self._chains(flow, share)

    def shard_fastest(self) -> None:
        """Judge the fastest plans again with the optimizer's state sharded, and keep those that
        gain enough on the fastest plan, which is judged even after the request's time."""
        objective, simulator = self.objective, self.simulator
        if not (self._shards_for_speed and may_shard_for_speed(simulator.graph, simulator.options)):
            return
        plain = [one for one in objective.ranked() if one.strategy.shard_state == "none"]
        for k, one in enumerate(plain[:MOST_COMPARED]):
            if k and objective.is_out_of_time():
                return
            sharded = msgspec.structs.replace(one.strategy, shard_state="optimizer")
            trial = Trial(simulator, sharded)
            if any(len(group) > 1 for _, group in trial.slices()):
                objective.start(f"{one.method}, sharded optimizer")
                objective.judge(trial, most_s=plain[0].step_s / SHARDING_GAIN)

    def _flows(self) -> list[Strategy]:
        """Single-stage strategies: whole batches first. Where memory binds, also recomputation and
        two that hold one small microbatch at a time."""
        plans = dict.fromkeys(self.simulator.placed, OperatorPlan({}, [0]))
        whole = Strategy(
            name="whole",
            batch=self.batch,
            operators=self.simulator.by_name(plans),
            shard_state=self._state,
        )
        flow, last = partial(msgspec.structs.replace, whole), self.counts[-1]
        flows = [flow(n_microbatches=n) for n in (1, 2, 4) if n in self.counts]
        if not self.objective.memory_binds:
            return flows
        if self._recomputes:
            flows.append(flow(stages=[self._recomputed()]))
        if last > 1:
            flows.append(flow(n_microbatches=last, schedule="1f1b"))
            if self._recomputes:
                flows.append(flow(n_microbatches=last, stages=[self._recomputed()]))
        if self._states:
            known = {s: self.objective.best_of.get(f"ddp, sharded {s}") for s in self._states}
            fitting = {state: found.step_s for state, found in known.items() if found is not None}
            state = min(fitting, key=fitting.__getitem__, default=self._states[-1])
            flows.append(flow(shard_state=state))
        return flows

    def _recomputed(self) -> Stage:
        """All operators in one stage, with the segments that need the least memory."""
        graph, placed = self.simulator.graph, list(self.simulator.placed)
        return Stage(recompute=True, segments=n_segments_of_least_memory(graph, placed))

    def _pipelines(self, budget: int) -> None:
        """Simulate the program's best pipelines for each number of microbatches, those of the
        least bound first; improve the fastest, and interleave its stages."""
        objective, end = self.objective, self.objective.n_proposals + budget
        objective.start("pipeline dynamic programming")
        each = max(4, budget // (2 * len(self.counts)))
        found: list[tuple[PipelineSearch, list[tuple[Pipeline, Form]]]] = []
        for n_microbatches in self.counts:
            search = PipelineSearch(self.simulator, self.batch, n_microbatches, self.most_replicas)
            choices = list(self._choices(search, each))
            if choices:
                found.append((search, choices))
        fastest_s = math.inf
        for search, choices in sorted(found, key=lambda one: one[1][0][0].bound_s):
            if objective.is_out_of_time():
                return
            count = format_count(search.n_microbatches, "microbatch")
            method = f"pipeline dynamic programming, {count}"
            objective.start(method, budget=min(2 * each, end - objective.n_proposals))
            scores = []
            for pipeline, form in choices:
                if objective.is_over():
                    break
                scores.append(search.judge(pipeline, objective, form))
            best = objective.best_of.get(method)
            if best is None or best.step_s >= fastest_s or objective.is_out_of_time():
                continue
            fastest_s = best.step_s
            score = min(scores)
            refined = search.refine(*choices[scores.index(score)], score, objective)
            left = min(MOST_TURNS, end - objective.n_proposals)
            objective.start(f"interleaved pipeline, {count}", budget=left)
            if not objective.is_over():
                order = [device for group in refined.groups for device in group]
                search.take_turns(tuple(order), objective, self._state)

    def _choices(self, search: PipelineSearch, most: int) -> Iterator[tuple[Pipeline, Form]]:
        """Pipelines to judge, and forms that also save memory where it binds.

        The bound leaves out most of what makes pipelines slower, so above the best step it is
        hopeless; it counts a tensor that skips a stage at both cuts, and computing as with all
        devices at work, hence the slack.
        """
        objective = self.objective
        limit_s = 1.3 * objective.best.step_s if objective.best is not None else math.inf
        schedules = [
            schedule
            for schedule in schedules_for(search.n_microbatches)
            if not (shards_parameters(self._state) and SCHEDULES[schedule].splits_backward)
        ]
        n_best = max(1, most // (len(schedules) + 2 * objective.memory_binds))
        for splits_backward in (False, True):
            own = [s for s in schedules if SCHEDULES[s].splits_backward == splits_backward]
            if not own:
                continue
            candidates = search.candidates(
                n_best, limit_s=limit_s, splits_backward=splits_backward, is_over=objective.tick
            )
            for k, pipeline in enumerate(candidates):
                yield from ((pipeline, Form(s, shard_state=self._state)) for s in own)
                if objective.memory_binds and not splits_backward:
                    if self._recomputes:
                        yield pipeline, Form(recompute=True, shard_state=self._state)
                    if self._states and any(len(group) > 1 for group in pipeline.groups):
                        yield pipeline, Form(shard_state=self._states[k % len(self._states)])

    def _space(self, n_microbatches: int) -> Space:
        """A partition of the smallest microbatch suits all."""
        if n_microbatches not in self._spaces:
            costs = self.simulator.costs(self.batch // n_microbatches)
            simulator = self.simulator
            self._spaces[n_microbatches] = Space(costs, simulator.cluster, simulator.placed)
        return self._spaces[n_microbatches]

    def _chains(self, flow: Strategy, budget: int) -> None:
        """MCMC from the best single-stage strategies, each chain followed by a descent.

        The rest of the budget goes to chains from random starts.
        """
        space = self._space(flow.n_microbatches)
        trial = Trial(self.simulator, flow)
        name = f"MCMC, {flow.n_microbatches} microbatches" if flow.n_microbatches > 1 else "MCMC"
        name += "" if flow.shard_state == "none" else f", sharded {flow.shard_state}"
        starts = self._starts(space)
        objective, end = self.objective, self.objective.n_proposals + max(1, budget)
        # A small space is better served by many short chains than by few long ones.
        n_choices = sum(map(len, space.menus.values()))
        each = max(1, min(budget // (2 * N_CHAINS), max(200, 10 * n_choices)))
        draw = random.Random(self.seed)
        k = 0
        while objective.n_proposals < end and not objective.is_out_of_time():
            start = (
                starts[k]
                if k < len(starts)
                else {op: draw.choice(menu) for op, menu in space.menus.items()}
            )
            objective.start(name, budget=min(each, end - objective.n_proposals))
            chain = Chain(trial, space, objective, seed=1000 * self.seed + 10 * k, turn=k)
            reached = chain.run(start)
            if objective.is_out_of_time():
                return
            objective.start(name, budget=min(each, max(1, end - objective.n_proposals)))
            descend(trial, space, objective, reached)
            k += 1

    def _starts(self, space: Space) -> list[dict[int, OperatorPlan]]:
        """The best single-stage strategies so far, or the nearest that the space has."""
        known = [c for c in self.objective.best_of.values() if len(c.strategy.stages) == 1]
        ranked = sorted(known, key=lambda c: c.step_s)[:N_CHAINS]
        if not ranked:  # nothing fits yet: spread everything as far as it goes
            return [{op: menu[-1] for op, menu in space.menus.items()}]
        operators = self.simulator.graph.operators
        return [
            {op: closest(menu, plans[operators[op].name]) for op, menu in space.menus.items()}
            for plans in (candidate.strategy.operators for candidate in ranked)
        ]
