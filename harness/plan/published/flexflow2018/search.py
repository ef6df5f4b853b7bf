"""The search on FlexFlow's 2018 cost model: annealed rounds of the chain, from the best so far.

The first round starts, as FlexFlow does, from data parallel. Every further round starts from the
best plan known, hot enough to leave it, and cools. Equal seeds and budgets give equal plans.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from harness.domain.cluster import Cluster
from harness.errors import PlanError
from harness.plan.published.flexflow2018.explain import explain, memory_bytes
from harness.plan.published.flexflow2018.model import Machine, Plan, Problem
from harness.plan.published.flexflow2018.notation import to_strategy
from harness.plan.published.flexflow2018.reference import step_ms
from harness.plan.published.flexflow2018.tables import Tables, build_tables, decode, encode
from harness.plan.published.flexflow2018.timeline import BY_BOUND
from harness.plan.published.flexflow2018.walk import (
    BEST,
    N_BY_WAY,
    N_PROPOSED,
    Chain,
    new_chain,
    restart,
    walk,
)
from harness.plan.request import PlanRequest, PlanResult, Progress, RunnerUp
from harness.units import format_bytes, format_duration

DEFAULT_BUDGET = 250_000
ROUND_PROPOSALS = 12_500
CHUNK_PROPOSALS = 625  # between them the temperature falls, and interrupts and progress happen
HOT, COLD = 0.02, 0.0002  # temperatures as shares of the best step
PROGRESS_INTERVAL_S = 0.25


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a search returns.

    Attributes:
        n_proposals: distinct changes judged.
        n_bounded: of these, refused by the lower bound before the simulation's end.
        cpu_s: CPU seconds of the proposals.
        setup_cpu_s: of loading or compiling the kernels.
    """

    plan: Plan
    n_proposals: int
    n_bounded: int
    cpu_s: float
    setup_cpu_s: float
    interrupted: bool

    @property
    def proposals_per_s(self) -> float:
        return self.n_proposals / self.cpu_s if self.n_proposals else 0.0


def plan(request: PlanRequest) -> PlanResult:
    """Plan AlexNet at 64 samples a device. The cluster gives nodes and devices, no speeds.

    Raises:
        PlanError: unequal nodes, not a power of two of devices, another batch or model, or a
            memory limit that no plan at hand fits.
    """
    problem = problem_of(request)
    found = search(problem, request)
    standard = {
        "data parallel": problem.data_parallel(),
        "convolutions by sample, linear layers by feature": problem.linear_by_feature(),
        "single device": problem.single_device(),
    }
    named = [("MCMC over all cuts and placements", found.plan), *standard.items()]
    costed = sorted(
        ((step_ms(problem, candidate), name, candidate) for name, candidate in named),
        key=lambda each: each[0],
    )
    best_ms, method, best = _first_that_fits(problem, request, costed)
    cost_ms = {name: ms for ms, name, _ in costed}
    names = [device.name for device in request.cluster.devices]
    return PlanResult(
        cost="flexflow2018",
        method=method,
        predicted_step_s=best_ms / 1e3,
        speedup_over_single=cost_ms["single device"] / best_ms,
        speedup_over_ddp=cost_ms["data parallel"] / best_ms,
        memory_bytes=dict(zip(names, memory_bytes(problem, best), strict=True)),
        strategy=to_strategy(problem, best, "flexflow2018"),
        explanation=[*explain(problem, best), _account(found)],
        runners_up=[
            RunnerUp(name=name, step_s=ms / 1e3) for ms, name, _ in costed if name != method
        ],
        n_proposals=found.n_proposals,
        proposals_per_s=found.proposals_per_s,
        search_cpu_s=found.cpu_s,
        interrupted=found.interrupted,
    )


def problem_of(request: PlanRequest) -> Problem:
    """The cost model's problem for a request.

    Raises:
        PlanError: see `plan`.
    """
    if request.graph is not None:
        raise PlanError(
            f"flexflow2018 plans its own AlexNet, not {request.graph.name!r}: leave out the model "
            "and profile, or choose another cost"
        )
    machine = _machine_of(request.cluster)
    if request.batch not in (None, machine.batch):
        raise PlanError(
            f"flexflow2018 trains 64 samples a device, {machine.batch} on {machine.n_devices} "
            f"devices, not {request.batch}: leave out the batch"
        )
    return Problem(machine)


def _machine_of(cluster: Cluster) -> Machine:
    sizes = [len(node.devices) for node in cluster.nodes]
    if len(set(sizes)) != 1:
        raise PlanError(
            f"flexflow2018 knows equal nodes only, these have {min(sizes)} to {max(sizes)} "
            "devices: give --topology NODESxDEVICES"
        )
    return Machine(len(sizes), sizes[0])


def _first_that_fits(
    problem: Problem, request: PlanRequest, costed: list[tuple[float, str, Plan]]
) -> tuple[float, str, Plan]:
    """The fastest candidate within memory, which the cost model itself does not know."""
    limits = [request.memory_bytes or device.memory_bytes for device in request.cluster.devices]
    for candidate in costed:
        needed = memory_bytes(problem, candidate[2])
        if all(need <= limit for need, limit in zip(needed, limits, strict=True)):
            return candidate
    least = min(max(memory_bytes(problem, candidate)) for _, _, candidate in costed)
    raise PlanError(
        f"no plan fits: the leanest needs {format_bytes(least)} on a device, the limit is "
        f"{format_bytes(min(limits))}: use more devices or more memory"
    )


def _account(found: Found) -> str:
    return (
        f"{found.n_proposals} proposals in {format_duration(found.cpu_s)} of CPU, "
        f"{found.n_bounded} of them refused by a lower bound before their simulation's end; "
        f"loading or compiling the kernels took {format_duration(found.setup_cpu_s)} besides"
    )


def search(problem: Problem, request: PlanRequest) -> Found:
    """Run the chain until the budget, the time or the user's patience ends."""
    budget = request.budget
    if budget is None and request.seconds is None:
        budget = DEFAULT_BUDGET
    if problem.machine.n_devices == 1:  # one plan only
        budget = 0
    tables = build_tables(problem)
    chain = new_chain(tables, request.seed)
    chain.best[:] = encode(tables, problem.data_parallel())
    interrupted = False
    start_s = search_s = time.process_time()
    try:
        _load_kernels(problem, tables, request)
        search_s = time.process_time()
        restart(chain, chain.best.copy())
        _run_rounds(chain, request, budget)
    except KeyboardInterrupt:
        interrupted = True
    end_s = time.process_time()
    best = decode(tables, chain.best)
    return Found(
        plan=best if interrupted else tidy(tables, best),
        n_proposals=int(chain.tally[N_PROPOSED]),
        n_bounded=int(chain.tally[N_BY_WAY + BY_BOUND]),
        cpu_s=end_s - search_s,
        setup_cpu_s=search_s - start_s,
        interrupted=interrupted,
    )


def _load_kernels(problem: Problem, tables: Tables, request: PlanRequest) -> None:
    """Compile, or load from the cache, by walking nowhere."""
    data_parallel = problem.data_parallel()
    request.progress(
        Progress(
            n_proposals=0,
            best_step_s=step_ms(problem, data_parallel) / 1e3,
            phase="loading kernels (the first time on a machine they are compiled)",
            fraction=0.0,
        )
    )
    chain = new_chain(tables, request.seed)
    restart(chain, encode(tables, data_parallel))
    walk(chain, 0, 1.0, True)


def tidy(tables: Tables, plan: Plan) -> Plan:
    """Put each layer's devices in ascending order where that costs nothing, for the reader."""
    chain = new_chain(tables, 0)
    best_ms = restart(chain, encode(tables, plan))
    for index, cut in enumerate(plan):
        ordered = replace(cut, devices=tuple(sorted(cut.devices)))
        candidate = (*plan[:index], ordered, *plan[index + 1 :])
        cost_ms = restart(chain, encode(tables, candidate))
        if cost_ms <= best_ms:
            plan, best_ms = candidate, cost_ms
    return plan


@dataclass
class Pace:
    """When a search ends and when it tells; wall clock."""

    request: PlanRequest
    budget: int | None
    start_s: float = field(default_factory=time.monotonic)
    told_s: float = 0.0

    def is_over(self) -> bool:
        limit_s = self.request.seconds
        return limit_s is not None and time.monotonic() - self.start_s >= limit_s

    def tell(self, chain: Chain, round_: int) -> None:
        now_s = time.monotonic()
        if now_s - self.told_s < PROGRESS_INTERVAL_S:
            return
        self.told_s = now_s
        n_done = int(chain.tally[N_PROPOSED])
        shares = [n_done / self.budget] if self.budget else []
        if self.request.seconds:
            shares.append((now_s - self.start_s) / self.request.seconds)
        self.request.progress(
            Progress(
                n_proposals=n_done,
                best_step_s=float(chain.cost_ms[BEST]) / 1e3,
                phase=f"round {round_ + 1}",
                fraction=min(1.0, max(shares)) if shares else None,
            )
        )


def _run_rounds(chain: Chain, request: PlanRequest, budget: int | None) -> None:
    pace = Pace(request, budget)
    for round_, size, temperature in schedule(budget):
        if pace.is_over():
            return
        if temperature == HOT and round_ > 0:
            restart(chain, chain.best.copy())
        walk(chain, size, temperature * float(chain.cost_ms[BEST]), True)
        pace.tell(chain, round_)


def schedule(budget: int | None) -> Iterator[tuple[int, int, float]]:
    """Yield (round, proposals, temperature as a share of the best step), chunk by chunk.

    A budget below one round is spent on one shorter round, which cools all the same.
    """
    left = budget
    round_size = ROUND_PROPOSALS if budget is None else min(ROUND_PROPOSALS, budget)
    n_chunks = max(2, round_size // CHUNK_PROPOSALS)
    round_ = 0
    while left is None or left > 0:
        for k in range(n_chunks):
            size = round_size * (k + 1) // n_chunks - round_size * k // n_chunks
            size = size if left is None else min(size, left)
            yield round_, size, HOT * (COLD / HOT) ** (k / (n_chunks - 1))
            left = None if left is None else left - size
        round_ += 1
