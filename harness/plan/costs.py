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


_MODEL = ("model", "profile", "graph", "rates", "dlrm_tables", "dtype")
_HARDWARE = ("bandwidth", "device_kind")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """A planner, imported when it is first used, so that `show` does not load compilers.

    Attributes:
        module: whose function `plan` takes a PlanRequest and returns a PlanResult.
        summary: one line for --help.
        unread: flags that it has no use for, which are refused.
        needs_memory: it plans for no device whose memory is not known.
        most_devices: of a `--topology`.
    """

    module: str
    summary: str
    unread: tuple[str, ...] = ()
    needs_memory: bool = False
    most_devices: int = 1024

    def load(self) -> Planner:
        return cast(Planner, importlib.import_module(self.module).plan)


COSTS = {
    "simulator": Cost(
        module="harness.plan.portfolio",
        summary="the harness's own event-driven simulator, searched by a portfolio",
        needs_memory=True,
    ),
    "layouts": Cost(
        module="harness.plan.layouts.planner",
        summary="tensor x data x pipeline parallelism, recomputation and sharded state on up to "
        "4096 equal devices, all layouts, by classes of devices",
        unread=("start", "search_budget", "search_seconds"),
        needs_memory=True,
        most_devices=4096,
    ),
    "pipedream": Cost(
        module="harness.plan.published.pipedream.planner",
        summary="PipeDream's published formula with transfers counted, by exact dynamic "
        "programming",
        unread=("start", "shard_state"),
    ),
    "maxload": Cost(
        module="harness.plan.published.maxload.planner",
        summary="the busiest device's load, values counted (Tarnawski et al., 2020), by exact "
        "dynamic programming, then annealing",
        unread=("start", "search_seconds", "shard_state"),
    ),
    "flexflow2018": Cost(
        module="harness.plan.published.flexflow2018.search",
        summary="FlexFlow's cost model of 2018, repaired, on its AlexNet, by MCMC",
        unread=(*_MODEL, *_HARDWARE, "start", "shard_state"),
    ),
}


def run(cost: str, request: PlanRequest) -> PlanResult:
    """Plan, and add time and memory of the planning.

    `search_cpu_s` is the CPU time of this process, all threads, from the request to the result:
    loading or compiling kernels counts, importing modules and reading files do not.

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
        search_cpu_s=cpu_s,
        proposals_per_s=rate,
        peak_rss_bytes=peak_rss_bytes(),
    )
