"""The costs that a plan can be searched by: their input and output, and the one way to run them."""

import importlib
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.shard_state import ShardState
from harness.domain.strategy import Strategy
from harness.errors import ConfigError, PlanError
from harness.measure.peak_rss import peak_rss_bytes


@dataclass(frozen=True, kw_only=True)
class SearchProgress:
    """How far a search is; sent to `PlanRequest.progress` now and then.

    Attributes:
        phase: of the search, such as `seed 3 of 5`.
        fraction: share of the budget used, 0 to 1; None when unknown.
    """

    n_proposals: int
    best_step_s: float
    phase: str = ""
    fraction: float | None = None


def ignore_progress(progress: SearchProgress) -> None:
    """The progress callback of a caller that does not care."""


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """The problem of spreading a model over a cluster.

    Attributes:
        graph, profile: of the model; None for a planner that brings a model of its own.
        cluster: devices in rank order; `--topology` becomes one by `Cluster.uniform`.
        batch: global batch, samples; None where the cost does not need it.
        memory_bytes: limit per device that replaces the cluster's; None keeps the cluster's.
        budget: proposals of the searches (see the cost's page); None for the planner's default.
        seconds: most wall seconds; None for no limit.
        start: a strategy that the search starts from too, such as an imported one; only for costs
            that take one.
        most_replicas: most devices of a stage, in which case pipelines alone are searched; None
            for no limit.
        shard_state: what every plan shards of its training state; None: what memory needs.
        shards_for_speed: without `shard_state`, also the optimizer's, where a step is faster so.
        optimizer: one of OPTIMIZER_STEPS; None for the one that the profile has timed.
        reduce_dtype: fp32, or bf16 if gradients are rounded for their sum over devices.
        seed: equal requests with equal seeds give equal plans (unless `seconds` ends the search).
        progress: called at most a few times a second, from the planning thread. An interrupt
            (KeyboardInterrupt) inside a search must end it with the best plan found.
    """

    cluster: Cluster
    graph: Graph | None = None
    profile: Profile | None = None
    batch: int | None = None
    memory_bytes: int | None = None
    budget: int | None = None
    seconds: float | None = None
    start: Strategy | None = None
    most_replicas: int | None = None
    shard_state: ShardState | None = None
    shards_for_speed: bool = True
    optimizer: str | None = None
    reduce_dtype: str = "fp32"
    seed: int = 0
    progress: Callable[[SearchProgress], None] = ignore_progress

    def model(self) -> tuple[Graph, Profile]:
        """The model to plan and its times.

        Raises:
            PlanError: there is none.
        """
        if self.graph is None or self.profile is None:
            raise PlanError("there is no model to plan: give a graph and its profile")
        return self.graph, self.profile


class RunnerUp(msgspec.Struct, frozen=True, kw_only=True):
    """Another plan that was considered, by name; `step_s` is None when it does not fit."""

    name: str
    step_s: float | None
    note: str = ""


class PlanResult(msgspec.Struct, frozen=True, kw_only=True):
    """The best plan found, what it costs, and why it was chosen.

    Attributes:
        predicted_step_s: seconds per step of the global batch, by the request's cost.
        lower_bound_s: no plan of the searched kind is faster; `predicted_step_s` where the plan is
            optimal, None where the cost knows no bound.
        speedup_over_single: predicted step of one device over this plan's.
        speedup_over_ddp: the same against data parallel on all devices; not a number (null in JSON)
            where there are fewer samples than devices, or `seconds` ended the search before it.
        method: which search found it, such as `pipeline dynamic programming`.
        memory_bytes: predicted peak per device name.
        optimizer: one of OPTIMIZER_STEPS, whose state counts; empty where none does.
        explanation: lines for people: breakdown, which link or device binds.
        runners_up: plans that lost, cheapest first.
        n_proposals: plans or states judged.
        proposals_per_s: of the search proper, without compilation; 0 when it does not propose.
        search_cpu_s: CPU seconds of this process; filled by `run`.
        peak_rss_bytes: of this process; filled by `run`.
        interrupted: the search was ended early, by Ctrl-C.
    """

    cost: str
    method: str
    predicted_step_s: float
    speedup_over_single: float
    speedup_over_ddp: float
    memory_bytes: dict[str, int]
    strategy: Strategy
    optimizer: str = ""
    explanation: list[str] = []
    runners_up: list[RunnerUp] = []
    n_proposals: int = 0
    proposals_per_s: float = 0.0
    search_cpu_s: float = 0.0
    peak_rss_bytes: int = 0
    interrupted: bool = False
    lower_bound_s: float | None = None


# By the first word of a standard strategy's name.
_FAMILIES = {
    "single": "single",
    "ddp": "ddp",
    "tensor": "tensor",
    "hybrid": "hybrid",
    "tables": "hybrid",
    "pipeline": "pipeline",
    "interleaved": "pipeline",
}
FAMILIES = (*dict.fromkeys(_FAMILIES.values()), "searched")


def family_of(name: str) -> str:
    return _FAMILIES[name.split()[0].rstrip(",")]


_MODEL = ("model", "profile", "graph", "rates", "dlrm_tables", "dtype")
_HARDWARE = ("bandwidth", "device_kind")
_ENGINE = ("start", "shard_state", "reduce_dtype", "optimizer", "momentum")


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


COSTS = {
    "simulator": Cost(
        module="harness.plan.portfolio",
        summary="the harness's own event-driven simulator, searched by a portfolio",
        needs_memory=True,
    ),
    "layouts": Cost(
        module="harness.plan.layouts.planner",
        summary="all layouts of tensor x data x pipeline parallelism, with recomputation and "
        "sharded state, on up to 4096 equal devices, by classes of devices",
        unread=("start", "search_budget", "search_seconds"),
        needs_memory=True,
        most_devices=4096,
    ),
    "pipedream": Cost(
        module="harness.plan.published.pipedream.planner",
        summary="PipeDream's published formula, transfers included, searched by exact dynamic "
        "programming",
        unread=(*_ENGINE, "search_budget"),
    ),
    "maxload": Cost(
        module="harness.plan.published.maxload.planner",
        summary="the load of the busiest device, transfers included (Tarnawski et al., 2020), "
        "searched by exact dynamic programming, then annealing",
        unread=(*_ENGINE, "search_seconds"),
    ),
    "flexflow2018": Cost(
        module="harness.plan.published.flexflow2018.search",
        summary="FlexFlow's cost model of 2018, with bugs repaired, for its AlexNet, searched by "
        "MCMC",
        unread=(*_MODEL, *_HARDWARE, *_ENGINE),
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
    planner = importlib.import_module(COSTS[cost].module)
    start_s = time.process_time()
    result: PlanResult = planner.plan(request)
    cpu_s = time.process_time() - start_s
    rate = result.proposals_per_s or result.n_proposals / max(cpu_s, 1e-9)
    return msgspec.structs.replace(
        result, search_cpu_s=cpu_s, proposals_per_s=rate, peak_rss_bytes=peak_rss_bytes()
    )
