"""The search on FlexFlow's 2018 cost model: annealed rounds of the chain, from the best so far.

The first round starts, as FlexFlow does, from data parallel. Every further round starts from the
best plan known, hot enough to leave it, and cools. Equal seeds and budgets give equal plans.
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

from harness.domain.fingerprint import MadeFor
from harness.domain.strategy import OperatorPlan, Strategy
from harness.errors import PlanError
from harness.plan.costs import PlanRequest, PlanResult, RunnerUp, SearchProgress
from harness.plan.published.flexflow2018.chain import (
    BEST,
    N_BOUNDED,
    N_PROPOSED,
    MarkovChain,
    new_chain,
    restart,
    walk,
)
from harness.plan.published.flexflow2018.model import (
    ELEMENT_BYTES,
    LINEAR,
    LayerProblem,
    Machine,
    Plan,
)
from harness.plan.published.flexflow2018.simulation import build_tables, decode, encode, step_ms
from harness.units import format_bytes, format_duration

DEFAULT_BUDGET = 250_000
ROUND_PROPOSALS = 12_500
CHUNK_PROPOSALS = 625  # between them the temperature falls, and interrupts and progress happen
HOT, COLD = 0.02, 0.0002  # temperatures as shares of the best step
PROGRESS_INTERVAL_S = 0.25
_MODEL_NAME = "alexnet of flexflow2018"


@dataclass(frozen=True, kw_only=True)
class ChainResult:
    """The result of a search.

    Attributes:
        n_proposals: distinct changes judged.
        n_bounded: of these, refused by the lower bound before the simulation's end.
        cpu_s: CPU seconds of the proposals.
    """

    plan: Plan
    n_proposals: int
    n_bounded: int
    cpu_s: float
    interrupted: bool


def plan(request: PlanRequest) -> PlanResult:
    """Plan AlexNet at 64 samples a device. The cluster gives nodes and devices, no speeds.

    Raises:
        PlanError: unequal nodes, not a power of two of devices, another batch or model, or a
            memory limit that no plan at hand fits.
    """
    problem = problem_of(request)
    found = search(problem, request)
    named = {
        "MCMC over all cuts and placements": found.plan,
        "data parallel": problem.data_parallel(),
        "convolutions by sample, linear layers by feature": problem.linear_by_feature(),
        "single device": problem.single_device(),
    }
    cost_ms = {name: step_ms(problem, candidate) for name, candidate in named.items()}
    ranked = sorted(named, key=lambda name: cost_ms[name])
    method = _first_that_fits(
        request, {name: memory_bytes(problem, named[name]) for name in ranked}
    )
    best, best_ms = named[method], cost_ms[method]
    names = [device.name for device in request.cluster.devices]
    return PlanResult(
        cost="flexflow2018",
        method=method,
        predicted_step_s=best_ms / 1e3,
        speedup_over_single=cost_ms["single device"] / best_ms,
        speedup_over_ddp=cost_ms["data parallel"] / best_ms,
        memory_bytes=dict(zip(names, memory_bytes(problem, best), strict=True)),
        strategy=to_strategy(problem, best),
        explanation=[
            "plan in FlexFlow's notation of 2018, dims (samples features):",
            *format_plan(problem, best),
            f"{found.n_proposals} proposals in {format_duration(found.cpu_s)} of CPU, "
            f"{found.n_bounded} of them refused by a lower bound before their simulation's end",
        ],
        runners_up=[
            RunnerUp(name=name, step_s=cost_ms[name] / 1e3) for name in ranked if name != method
        ],
        n_proposals=found.n_proposals,
        proposals_per_s=found.n_proposals / found.cpu_s if found.n_proposals else 0.0,
        interrupted=found.interrupted,
    )


def problem_of(request: PlanRequest) -> LayerProblem:
    """The cost model's problem for a request.

    Raises:
        PlanError: see `plan`.
    """
    if request.graph is not None:
        raise PlanError(
            f"flexflow2018 plans its own AlexNet, not {request.graph.name!r}: leave out the model "
            "and profile, or choose another cost"
        )
    sizes = {len(node.devices) for node in request.cluster.nodes}
    if len(sizes) != 1:
        raise PlanError(
            f"flexflow2018 knows equal nodes only, these have {min(sizes)} to {max(sizes)} "
            "devices: give --topology NODESxDEVICES"
        )
    machine = Machine(len(request.cluster.nodes), sizes.pop())
    if request.batch not in (None, machine.batch):
        raise PlanError(
            f"flexflow2018 trains 64 samples a device, {machine.batch} on {machine.n_devices} "
            f"devices, not {request.batch}: leave out the batch"
        )
    return LayerProblem(machine)


def _first_that_fits(request: PlanRequest, needed: dict[str, list[int]]) -> str:
    """The first of the plans within memory, which the cost model itself does not know."""
    limits = [request.memory_bytes or device.memory_bytes for device in request.cluster.devices]
    for name, own in needed.items():
        if all(need <= limit for need, limit in zip(own, limits, strict=True)):
            return name
    raise PlanError(
        f"no plan fits: the leanest needs {format_bytes(min(map(max, needed.values())))} on a "
        f"device, the limit is {format_bytes(min(limits))}: use more devices or more memory"
    )


def search(problem: LayerProblem, request: PlanRequest) -> ChainResult:
    """Run the chain until the budget, the time or an interrupt ends it."""
    budget = request.budget
    if budget is None and request.seconds is None:
        budget = DEFAULT_BUDGET
    n_devices = problem.machine.n_devices
    if n_devices == 1:  # one plan only
        budget = 0
    tables, start = build_tables(problem), problem.data_parallel()
    chain, interrupted = new_chain(tables, encode(start, n_devices), request.seed), False
    search_s = time.process_time()
    try:
        request.progress(
            SearchProgress(
                n_proposals=0,
                best_step_s=math.nan,
                phase="loading kernels (the first time on a machine they are compiled)",
                fraction=0.0,
            )
        )
        restart(chain, chain.best.copy())
        walk(chain, 0, 1.0, True)
        search_s = time.process_time()
        _run_rounds(chain, request, budget)
    except KeyboardInterrupt:
        interrupted = True
    end_s = time.process_time()
    return ChainResult(
        plan=decode(tables, chain.best),
        n_proposals=int(chain.tally[N_PROPOSED]),
        n_bounded=int(chain.tally[N_BOUNDED]),
        cpu_s=end_s - search_s,
        interrupted=interrupted,
    )


def _run_rounds(chain: MarkovChain, request: PlanRequest, budget: int | None) -> None:
    """Walk through the schedule; show progress and look at the clock between its chunks."""
    start_s = shown_s = time.monotonic()
    shown_s -= PROGRESS_INTERVAL_S
    for round_, size, temperature in schedule(budget):
        now_s = time.monotonic()
        if request.seconds is not None and now_s - start_s >= request.seconds:
            return
        if temperature == HOT and round_ > 0:
            restart(chain, chain.best.copy())
        walk(chain, size, temperature * float(chain.cost_ms[BEST]), True)
        now_s = time.monotonic()
        if now_s - shown_s >= PROGRESS_INTERVAL_S:
            shown_s = now_s
            n_done = int(chain.tally[N_PROPOSED])
            shares = [n_done / budget] if budget else []
            shares += [(now_s - start_s) / request.seconds] if request.seconds else []
            request.progress(
                SearchProgress(
                    n_proposals=n_done,
                    best_step_s=float(chain.cost_ms[BEST]) / 1e3,
                    phase=f"round {round_ + 1}",
                    fraction=min(1.0, max(shares)) if shares else None,
                )
            )


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


def memory_bytes(problem: LayerProblem, plan: Plan) -> list[int]:
    """Weights, their gradients, and the outputs that are kept for the backward pass, per device.

    FlexFlow's model of 2018 has no memory; this is the least that the plan needs.
    """
    needed = [0] * problem.machine.n_devices
    for layer, cut in zip(problem.layers, plan, strict=True):
        block_bytes = ELEMENT_BYTES * problem.machine.batch * layer.n_out // len(cut.devices)
        for device in cut.devices:
            needed[device] += block_bytes
        held = {(device, part % cut.n_features) for part, device in enumerate(cut.devices)}
        for device in set(cut.devices):
            n_blocks = sum(holder == device for holder, _ in held)
            needed[device] += 2 * ELEMENT_BYTES * layer.n_weights * n_blocks // cut.n_features
    return needed


def format_plan(problem: LayerProblem, plan: Plan) -> list[str]:
    """One line per layer in FlexFlow's notation of 2018.

    dims are samples first, then features; later versions print them the other way round.
    """
    lines = []
    for index, (layer, cut) in enumerate(zip(problem.layers, plan, strict=True)):
        dims = (cut.n_samples, cut.n_features) if layer.kind == LINEAR else (cut.n_samples,)
        dim_text, gpu_text = ("".join(f"{n} " for n in each) for each in (dims, cut.devices))
        lines.append(f"op[{index}] {layer.name}:\tdim({dim_text}) gpu({gpu_text})")
    return lines


def to_strategy(problem: LayerProblem, plan: Plan) -> Strategy:
    """The plan as the strategy that it is."""
    operators = {}
    for layer, cut in zip(problem.layers, plan, strict=True):
        parts = {"sample": cut.n_samples, "feature": cut.n_features}
        operators[layer.name] = OperatorPlan(
            partition={dim: n for dim, n in parts.items() if n > 1}, devices=list(cut.devices)
        )
    return Strategy(
        name="flexflow2018",
        batch=problem.machine.batch,
        operators=operators,
        made_for=MadeFor(model=_MODEL_NAME),
    )
