"""The costs that a plan can be searched by, and the one way to run them."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

import msgspec

from harness.errors import ConfigError
from harness.measure.peak_rss import peak_rss_bytes
from harness.plan.request import PlanRequest, PlanResult

Planner = Callable[[PlanRequest], PlanResult]


@dataclass(frozen=True)
class Cost:
    """A planner, imported when it is first used, so that `show` does not load compilers.

    Attributes:
        module: where it lives.
        function: its name there; takes a PlanRequest, returns a PlanResult.
        summary: what it is, for --help.
        needs_model: it plans the caller's model; otherwise it brings its own.
        takes_start: its search can start from a strategy.
    """

    module: str
    function: str
    summary: str
    needs_model: bool = True
    takes_start: bool = False

    def load(self) -> Planner:
        return cast(Planner, getattr(importlib.import_module(self.module), self.function))


COSTS = {
    "simulator": Cost(
        "harness.plan.portfolio",
        "plan",
        "the harness's own event-driven simulator, searched by a portfolio",
        takes_start=True,
    ),
    "pipedream": Cost(
        "harness.plan.published.pipedream.planner",
        "plan",
        "PipeDream's published formula with transfers counted, by exact dynamic programming",
    ),
    "flexflow2018": Cost(
        "harness.plan.published.flexflow2018.search",
        "plan",
        "FlexFlow's cost model of 2018, repaired, on its AlexNet, by MCMC",
        needs_model=False,
    ),
}


def run(cost: str, request: PlanRequest) -> PlanResult:
    """Plan, and fill in what it took.

    `search_cpu_s` is the CPU time of this process, all threads, from the request's graph to the
    plan: not the imports, nor reading files, nor writing the explanation where a planner times
    its search itself.

    Raises:
        ConfigError: unknown cost.
        PlanError: no plan exists.
    """
    if cost not in COSTS:
        raise ConfigError(f"--cost {cost!r} is unknown: use {', '.join(COSTS)}")
    planner = COSTS[cost].load()
    start_s, wall_s = time.process_time(), time.perf_counter()
    result = planner(request)
    cpu_s, wall_s = time.process_time() - start_s, time.perf_counter() - wall_s
    rate = result.proposals_per_s or result.n_proposals / max(wall_s, 1e-9)
    return msgspec.structs.replace(
        result,
        search_cpu_s=result.search_cpu_s or cpu_s,
        proposals_per_s=rate,
        peak_rss_bytes=peak_rss_bytes(),
    )
