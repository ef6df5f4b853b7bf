"""A planner's input (`PlanRequest`) and output (`PlanResult`); families of strategies."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.strategy import ShardState, Strategy
from harness.errors import PlanError


@dataclass(frozen=True, kw_only=True)
class SearchProgress:
    """How far a search is; sent to `PlanRequest.progress` now and then.

    Attributes:
        n_proposals: proposals judged so far.
        best_step_s: predicted seconds of the best plan so far.
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
        explanation: lines for people: breakdown, which link or device binds.
        runners_up: plans that lost, cheapest first.
        n_proposals: plans or states judged.
        proposals_per_s: of the search proper, without compilation; 0 when it does not propose.
        search_cpu_s: CPU seconds of this process; filled by `harness.plan.costs.run`.
        peak_rss_bytes: of this process; filled by `harness.plan.costs.run`.
        interrupted: the search was ended early, by Ctrl-C.
    """

    cost: str
    method: str
    predicted_step_s: float
    speedup_over_single: float
    speedup_over_ddp: float
    memory_bytes: dict[str, int]
    strategy: Strategy
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
    """The family of a standard strategy."""
    return _FAMILIES[name.split()[0].rstrip(",")]
