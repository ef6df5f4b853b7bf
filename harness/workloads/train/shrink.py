"""Plan the model again when its number of frozen layers has changed: `--shrink`, `--replicate`.

freeze | search for the frozen model, beside training | change, if it pays
"""

from __future__ import annotations

import logging

import msgspec

from harness.domain.fingerprint import MadeFor
from harness.domain.strategy import Strategy
from harness.errors import HarnessError
from harness.plan.again import SearchAgain
from harness.plan.autopipe import AutoPipe
from harness.plan.change import is_worth
from harness.runtime.ranks.gather import broadcast_result, gather_numbers
from harness.units import format_duration
from harness.workloads.train.policy import Due, Policy, PolicyInputs
from harness.workloads.train.replan import BesideSearch

_log = logging.getLogger(__name__)

# Seconds that a change stands still beside its transfer: allocation, votes, the first batch.
STILL_S = 0.1
# Most share of the time that is left which a search may take, and least seconds of a search.
_SEARCHED_SHARE, _LEAST_SEARCH_S = 0.05, 2.0


class _Answer(msgspec.Struct, frozen=True):
    """What rank 0 has decided; no change if the strategy of now is as good."""

    due: Due | None


class ShrinkPolicy(Policy):
    """Changes to the plan of the frozen model; all ranks construct it.

    Without `--replicate` no layer gets more replicas than at the start, so freed devices idle.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        case, start = inputs.case, inputs.current.planned.strategy
        self._inputs, self._search = inputs, BesideSearch()
        self._rule: AutoPipe | None = None
        if case.shrink == "pipetransformer":
            self._rule = AutoPipe(start, replicates=case.replicate)
        self._most_replicas = None if case.replicate else _most_replicas(start)
        self._planned_for, self._is_waiting = 0, False

    def due(self, step: int) -> Due | None:
        world, n_frozen = self._inputs.context.world, self._inputs.current.n_frozen
        if n_frozen != self._planned_for:
            self._planned_for, self._is_waiting = n_frozen, True
            if world.is_first and self._rule is None:
                self._search.start(self._request(step))
        if not self._is_waiting:
            return None
        answer = self._answer(step) if world.is_first else None
        if max(gather_numbers(float(answer is not None), world)) == 0:
            return None
        self._is_waiting = False
        decided: _Answer = broadcast_result(lambda: answer or _Answer(None), _Answer, world)
        return decided.due

    def close(self) -> None:
        """End a search that still runs."""
        self._search.close()

    def _request(self, step: int) -> SearchAgain:
        case, current = self._inputs.case, self._inputs.current
        simulator = self._inputs.planner.simulator(current.n_frozen)
        left_s = simulator.step_s(current.planned.strategy) * (self._inputs.n_steps - step)
        return SearchAgain(
            graph=simulator.graph,
            cluster=simulator.cluster,
            profile=simulator.profile,
            options=simulator.options,
            batch=case.batch,
            memory_bytes=case.memory_bytes,
            budget=case.search_budget,
            seconds=min(case.search_seconds, max(_LEAST_SEARCH_S, _SEARCHED_SHARE * left_s)),
            seed=case.seed,
            start=msgspec.structs.replace(current.planned.strategy, made_for=MadeFor()),
            most_replicas=self._most_replicas,
        )

    def _answer(self, step: int) -> _Answer | None:
        """The decision on rank 0; None while the search runs."""
        try:
            strategy = self._found()
            return None if strategy is None else _Answer(self._decide(strategy, step))
        except HarnessError as error:
            _log.warning("the frozen model is not planned again: %s", error)
            return _Answer(None)

    def _found(self) -> Strategy | None:
        """The next strategy; None while the search runs.

        Raises:
            HarnessError: there is none.
        """
        if self._rule is not None:
            return self._rule.next_strategy(self._inputs.planner.simulator(self._planned_for))
        found = self._search.poll()
        if found is None:
            return None
        if found.strategy is None:
            raise HarnessError(found.error)
        return found.strategy

    def _decide(self, strategy: Strategy, step: int) -> Due | None:
        """The change to a strategy, unless the current one stays; PipeTransformer's rule does not
        ask whether a change pays."""
        now, planner = self._inputs.current.planned.strategy, self._inputs.planner
        n_frozen, n_left = self._planned_for, self._inputs.n_steps - step
        if _is_same(strategy, now):
            return None
        planned = planner.planned(strategy, n_frozen)
        before_s, after_s = (planner.step_s(one, n_frozen) for one in (now, strategy))
        cost_s = STILL_S + planner.estimate_change_s(now, strategy, n_frozen)
        told = (
            f"{format_duration(after_s)} instead of {format_duration(before_s)} a step in "
            f"{n_left} steps, a change takes {format_duration(cost_s)}"
        )
        if self._rule is None and not is_worth(before_s, after_s, n_left, cost_s):
            _log.info("%s would not pay: %s", strategy.name, told)
            return None
        return Due(planned=planned, why=f"--shrink {self._inputs.case.shrink}: predicted {told}")


def _most_replicas(strategy: Strategy) -> int:
    """Most devices that share an operator's samples, or have copies of it."""
    return max(len(set(plan.devices)) for plan in strategy.operators.values())


def _is_same(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies train alike, whatever their names."""
    return one == msgspec.structs.replace(other, name=one.name, made_for=one.made_for)
