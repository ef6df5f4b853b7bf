"""Shared parts of searches: judging a trial, the best so far, budget, time and progress."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

from harness.domain.partition import Cut
from harness.domain.sharding import weight_cuts
from harness.domain.strategy import OperatorPlan, Strategy
from harness.plan.costs import SearchProgress, ignore_progress
from harness.plan.simulate.simulator import Simulator, Trial
from harness.plan.simulate.tables import Tables

_PROGRESS_EVERY_S = 0.25


@dataclass(frozen=True)
class Candidate:
    """A strategy that fits; all are named alike, so that equal plans are equal strategies."""

    method: str
    step_s: float
    strategy: Strategy

    @property
    def n_devices(self) -> int:
        plans = self.strategy.operators.values()
        return len({device for plan in plans for device in plan.devices})


class Objective:
    """Judges trials of one request and remembers the best.

    Args:
        seconds: most of them by `clock`.

    Attributes:
        best: of all searches so far; None until something fits.
        best_of: of each search, by its name.
        least_excess: of all proposals: how much memory was lacking at least.
    """

    def __init__(
        self,
        simulator: Simulator,
        *,
        seconds: float | None = None,
        clock: Callable[[], float] = time.monotonic,
        progress: Callable[[SearchProgress], None] = ignore_progress,
    ) -> None:
        self.simulator = simulator
        self.best: Candidate | None = None
        self.best_of: dict[str, Candidate] = {}
        self.least_excess = math.inf
        self._least_unfit_s = math.inf
        self.n_proposals = 0
        self.judging_s = 0.0
        self._method = ""
        self._until = math.inf
        self._of_budget = 0
        self._clock = clock
        began = clock()
        self._deadline = began + seconds if seconds is not None else math.inf
        self._progress = progress
        self._last_shown = began

    def start(self, method: str, *, budget: int | None = None) -> None:
        """Begin a search of that name with so many proposals."""
        self._method = method
        self._of_budget = budget or 0
        self._until = self.n_proposals + budget if budget is not None else math.inf

    def is_over(self) -> bool:
        """Whether the current search has used up its budget or the request its time."""
        return self.n_proposals >= self._until or self.is_out_of_time()

    def is_out_of_time(self) -> bool:
        """Whether the request's time is used up."""
        return self._clock() > self._deadline

    @property
    def spent(self) -> float:
        """Share of the current search's budget that is used up, 0 to 1."""
        if not self._of_budget:
            return 0.0
        return min(1.0, 1 - (self._until - self.n_proposals) / self._of_budget)

    @property
    def memory_binds(self) -> bool:
        """Whether nothing fits yet, or something faster than the best does not."""
        return self.best is None or self._least_unfit_s < self.best.step_s

    def ranked(self) -> list[Candidate]:
        """The fastest plan of each search; no plan twice; fastest first."""
        distinct: list[Candidate] = []
        for candidate in sorted(self.best_of.values(), key=lambda c: c.step_s):
            if not any(candidate.strategy == other.strategy for other in distinct):
                distinct.append(candidate)
        return distinct

    def judge(self, trial: Trial, most_s: float = math.inf) -> float:
        """Simulate the trial as it is now; its step, longer the more memory its fullest device
        lacks, and the more operators are planned unlike others which share a batch norm or a weight
        with them.

        Args:
            most_s: of a step, to be remembered.
        """
        began = time.process_time()
        out = trial.outcome()
        limits = self.simulator.limits
        excess = max(0.0, float((out.memory_bytes / limits).max()) - 1)
        self.n_proposals += 1
        n_unlike = self._n_unlike(trial.tables)
        self.least_excess = min(self.least_excess, excess)
        if n_unlike:
            excess += n_unlike
        elif excess == 0:
            if out.step_s <= most_s:
                self._remember(trial, out.step_s)
        else:
            self._least_unfit_s = min(self._least_unfit_s, out.step_s)
        self.judging_s += time.process_time() - began
        self.tick()
        return out.step_s if excess == 0 else out.step_s * (2 + 10 * excess)

    def _n_unlike(self, tables: Tables) -> int:
        """Number of operators that share a batch norm or a written buffer with another and are
        planned unlike it, which the executor refuses, and of uses of a weight that cut it
        otherwise than the first, which it computes whole."""
        plans = tables.plans
        n_unlike = sum(plans[a] != plans[b] for a, b in self.simulator.alike)
        for users in tables.tied.values():
            cuts = [self.cuts_of(op, plans[op]) for op in users if op in plans]
            n_unlike += sum(one != cuts[0] for one in cuts)
        return n_unlike

    def cuts_of(self, op: int, plan: OperatorPlan) -> dict[int, Cut]:
        """How a plan cuts the weight of an operator."""
        return weight_cuts(self.simulator.graph.operators[op], plan.partition)

    def tick(self) -> bool:
        """Show progress when it is time to; whether the request's time is used up."""
        now = self._clock()
        if now - self._last_shown > _PROGRESS_EVERY_S:
            self._last_shown = now
            self._progress(
                SearchProgress(
                    n_proposals=self.n_proposals,
                    best_step_s=self.best.step_s if self.best is not None else math.inf,
                    phase=self._method,
                    fraction=self.spent if self._of_budget else None,
                )
            )
        return now > self._deadline

    def _remember(self, trial: Trial, step_s: float) -> None:
        own = self.best_of.get(self._method)
        if own is not None and own.step_s <= step_s:
            return
        found = Candidate(self._method, step_s, trial.current("searched"))
        self.best_of[self._method] = found
        if self.best is None or step_s < self.best.step_s:
            self.best = found
