"""Plan the model again when its number of frozen layers has changed: `--shrink`, `--replicate`.

freeze | search for the frozen model, beside training | change, if it pays
"""

import logging
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec

from harness.domain.strategy import Strategy
from harness.errors import HarnessError
from harness.plan.again import SearchAgain, is_worth
from harness.plan.autopipe import AutoPipe
from harness.runtime.ranks.gather import broadcast_result, gather_numbers
from harness.units import format_duration
from harness.workloads.train.next_plan import BesideSearch
from harness.workloads.train.plan import Planned
from harness.workloads.train.policy import Due, Policy, PolicyInputs

_log = logging.getLogger(__name__)

# Most share of the time that is left which a search may take, and least seconds of a search.
_SEARCHED_SHARE, _LEAST_SEARCH_S = 0.05, 2.0
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class _Offer:
    """Another strategy for the frozen model.

    Attributes:
        before_s, after_s: predicted steps by the strategy of now and by the other.
        cost_s: predicted seconds of the change.
    """

    planned: Planned
    before_s: float
    after_s: float
    cost_s: float


class ShrinkPolicy(Policy):
    """Changes to the plan of the frozen model; all ranks construct it.

    Without `--replicate` no layer gets more replicas than at the start, so freed devices idle. A
    thread of rank 0 plans, so that training does not wait for it.
    """

    def __init__(self, inputs: PolicyInputs) -> None:
        case, start = inputs.case, inputs.current.planned.strategy
        self._inputs, self._search = inputs, BesideSearch()
        self._rule: AutoPipe | None = None
        if inputs.context.world.is_first and case.shrink == "search":
            self._search.warm_up()
        if case.shrink == "pipetransformer":
            self._rule = AutoPipe(start, replicates=case.replicate)
        self._most_replicas = None if case.replicate else _most_replicas(start)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="frozen model")
        self._planning: Future[_Offer | None] | None = None
        self._is_cancelled = threading.Event()
        self._planned_for, self._is_waiting = 0, False

    def due(self, step: int) -> Due | None:
        world, n_frozen = self._inputs.context.world, self._inputs.current.n_frozen
        if n_frozen != self._planned_for:
            self._planned_for, self._is_waiting = n_frozen, True
            if world.is_first:
                self._start_planning(self._inputs.training.n_steps - step)
        if not self._is_waiting:
            return None
        is_done = self._planning is not None and has_ended(self._planning)
        if max(gather_numbers(float(is_done), world)) == 0:
            return None
        self._is_waiting = False
        return broadcast_result(lambda: self._answer(step), Due | None, world)

    def close(self) -> None:
        """End a search that still runs."""
        self._is_cancelled.set()
        self._pool.shutdown(wait=True)
        self._search.close()

    def _start_planning(self, n_left: int) -> None:
        self._is_cancelled.set()
        self._is_cancelled = threading.Event()
        now, n_frozen = self._inputs.current.planned.strategy, self._planned_for
        self._planning = self._pool.submit(self._plan, now, n_frozen, n_left, self._is_cancelled)

    def _plan(
        self, now: Strategy, n_frozen: int, n_left: int, is_cancelled: threading.Event
    ) -> _Offer | None:
        """Plan the frozen model; None if the strategy of now is the answer."""
        planner, n_skipped = self._inputs.planner, self._inputs.current.n_skipped
        if self._rule is not None:
            strategy: Strategy | None = self._rule.next_strategy(planner.simulator(n_frozen))
        else:
            self._search.start(self._request(now, n_frozen, n_left))
            strategy = self._searched(is_cancelled)
        if strategy is None or _is_same(strategy, now):
            return None
        return _Offer(
            planned=planner.planned(strategy, n_frozen),
            before_s=planner.step_s(now, n_frozen, n_skipped),
            after_s=planner.step_s(strategy, n_frozen, n_skipped),
            cost_s=self._inputs.current.still_s
            + planner.estimate_change_s(now, strategy, n_frozen),
        )

    def _request(self, now: Strategy, n_frozen: int, n_left: int) -> SearchAgain:
        planner, n_skipped = self._inputs.planner, self._inputs.current.n_skipped
        request = planner.search_again(n_frozen, now, n_skipped)
        left_s = planner.step_s(now, n_frozen, n_skipped) * n_left
        most_s = max(_LEAST_SEARCH_S, _SEARCHED_SHARE * left_s)
        return msgspec.structs.replace(
            request,
            seconds=min(request.seconds or most_s, most_s),
            most_replicas=self._most_replicas,
        )

    def _searched(self, is_cancelled: threading.Event) -> Strategy | None:
        """The plan of the search that runs; None if it is not wanted any more."""
        while not is_cancelled.is_set():
            found = self._search.poll()
            if found is not None and found.strategy is None:
                raise HarnessError(found.error)
            if found is not None:
                return found.strategy
            time.sleep(_POLL_S)
        return None

    def _answer(self, step: int) -> Due | None:
        """The decision on rank 0; None if the strategy of now is as good. PipeTransformer's rule
        does not ask whether a change pays."""
        assert self._planning is not None
        try:
            offer = self._planning.result()
        except HarnessError as error:
            _log.warning("the frozen model is not planned again: %s", error)
            return None
        if offer is None:
            return None
        n_left, flags = self._inputs.training.n_steps - step, f"--shrink {self._inputs.case.shrink}"
        reason = (
            f"predicted {format_duration(offer.after_s)} instead of "
            f"{format_duration(offer.before_s)} a step, {n_left} steps left"
        )
        is_paying = is_worth(offer.before_s, offer.after_s, n_left, offer.cost_s)
        if self._rule is None and not is_paying:
            _log.info(
                "%s does not pay: %s, the change takes %s",
                offer.planned.strategy.name, reason, format_duration(offer.cost_s),
            )  # fmt: skip
            return None
        return Due(planned=offer.planned, why=f"{flags}: {reason}")


def has_ended(work: Future[Any]) -> bool:
    """Whether a plan, or the next engine, is there."""
    return work.done()


def _most_replicas(strategy: Strategy) -> int:
    """Most devices that share an operator's samples, or have copies of it."""
    return max(len(set(plan.devices)) for plan in strategy.operators.values())


def _is_same(one: Strategy, other: Strategy) -> bool:
    """Whether two strategies train alike, whatever their names."""
    return one == msgspec.structs.replace(other, name=one.name, made_for=one.made_for)
