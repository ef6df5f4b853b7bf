"""The search on FlexFlow's 2018 cost model: annealed rounds of a chain, from the best so far.

The first round starts, as FlexFlow does, from data parallel. Every further round starts from the
best plan known, hot enough to leave it, and cools. Equal seeds and budgets give equal plans.

The Markov chain is compiled: propose, simulate, accept or take back. FlexFlow draws a layer, a cut
and a device for every part at random. Almost all of those scatter neighbouring samples over all
nodes. Most proposals here keep parts that talk near each other:

    segment     consecutive layers take one layer's cut and devices, which may first be spread anew:
                over an aligned range of devices, blockwise, cyclic or transposed
    move        one part to another device
    random      FlexFlow's own, so that every plan can be reached
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.errors import PlanError
from harness.plan.compiled import compiled
from harness.plan.costs import PlanRequest, PlanResult, RunnerUp, SearchProgress
from harness.plan.published.flexflow2018.model import (
    LayerProblem,
    Machine,
    Plan,
    format_plan,
    memory_bytes,
    to_strategy,
)
from harness.plan.published.flexflow2018.simulation import (
    CostTables,
    Floats,
    Ints,
    build_tables,
    count_parts,
    decode,
    encode,
    simulate,
    step_ms,
)
from harness.units import format_bytes, format_duration

Random = NDArray[np.uint64]  # (1,), the generator's state

# Percent of the proposals up to and including each kind.
SEGMENT, MOVE = 80, 95


@compiled
def draw_bits(random: Random) -> np.uint64:
    """The next 64 random bits (splitmix64; Steele, Lea and Flood, OOPSLA 2014)."""
    random[0] += np.uint64(0x9E3779B97F4A7C15)
    z = random[0]
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.uint64(z ^ (z >> np.uint64(31)))


@compiled
def draw_below(random: Random, n: int) -> int:
    """A whole number from 0 to n - 1."""
    high = draw_bits(random) >> np.uint64(32)
    return int(np.int64((high * np.uint64(n)) >> np.uint64(32)))


@compiled
def propose(tables: CostTables, plan: Ints, random: Random) -> tuple[int, int]:
    """Change the plan in `plan`; returns the first and last layer that it wrote."""
    layer = draw_below(random, len(plan))
    kind = draw_below(random, 100)
    if kind < SEGMENT:
        return _write_segment(tables, plan, random, layer)
    n_devices = plan.shape[1] - 1
    if kind < MOVE:
        part = draw_below(random, count_parts(tables, plan, layer))
        plan[layer, part] = draw_below(random, n_devices)
    else:
        plan[layer, -1] = draw_below(random, tables.part_ms.shape[1])
        for part in range(count_parts(tables, plan, layer)):
            plan[layer, part] = draw_below(random, n_devices)
    return layer, layer


@compiled
def _write_segment(tables: CostTables, plan: Ints, random: Random, layer: int) -> tuple[int, int]:
    length = 2 + draw_below(random, len(plan) - 1)
    first = max(0, layer - length + 1) if draw_below(random, 2) else layer
    last = min(len(plan), first + length) - 1
    leader = first + draw_below(random, last - first + 1)
    if draw_below(random, 2):
        plan[leader, -1] = draw_below(random, tables.part_ms.shape[1])
        _spread(tables, plan, random, leader)
    n_theirs = count_parts(tables, plan, leader)
    for follower in range(first, last + 1):
        if follower != leader:
            plan[follower, -1] = plan[leader, -1]
            n_parts = count_parts(tables, plan, follower)
            for part in range(n_parts):
                plan[follower, part] = plan[leader, part * n_theirs // n_parts]
    return first, last


@compiled
def _spread(tables: CostTables, plan: Ints, random: Random, layer: int) -> None:
    """Put the parts on an aligned power of two of consecutive devices."""
    n_parts = count_parts(tables, plan, layer)
    n_samples = 1 << plan[layer, -1]
    n_features = n_parts // n_samples
    width = 1 << draw_below(random, tables.part_ms.shape[1])
    base = width * draw_below(random, (plan.shape[1] - 1) // width)
    cyclic, transposed = draw_below(random, 2), draw_below(random, 2)
    for part in range(n_parts):
        place = part
        if transposed:
            place = part % n_features * n_samples + part // n_features
        offset = place % width if cyclic or n_parts < width else place * width // n_parts
        plan[layer, part] = base + offset


CURRENT, BEST = 0, 1
N_PROPOSED, N_BOUNDED = 0, 1


class MarkovChain(NamedTuple):
    """A search in progress. Plans are arrays as in `CostTables`.

    Attributes:
        trial: equals current outside of a proposal.
        cost_ms: (2,), of CURRENT and BEST.
        tally: (2,), proposals, and those of them that a lower bound refused.
    """

    tables: CostTables
    current: Ints
    trial: Ints
    best: Ints
    random: Random
    cost_ms: Floats
    tally: Ints


def new_chain(tables: CostTables, plan: Ints, seed: int) -> MarkovChain:
    """A chain with a plan that `restart` has yet to cost."""
    return MarkovChain(
        tables=tables,
        current=plan.copy(),
        trial=plan.copy(),
        best=plan.copy(),
        random=np.array([seed % 2**64], dtype=np.uint64),
        cost_ms=np.full(2, np.inf),
        tally=np.zeros(2, dtype=np.int64),
    )


@compiled
def restart(chain: MarkovChain, plan: Ints) -> float:
    """Make a plan the current one, and the best if it is; returns its cost in ms."""
    chain.current[:] = plan
    chain.trial[:] = plan
    chain.cost_ms[CURRENT] = simulate(chain.tables, plan, np.inf)
    _keep_best(chain)
    return float(chain.cost_ms[CURRENT])


@compiled
def walk(chain: MarkovChain, n_proposals: int, temperature_ms: float, use_bound: bool) -> None:
    """Judge `n_proposals` plans that differ from the current one.

    A plan that is slower by d is accepted with probability exp(-d / temperature_ms). The random
    number is drawn first, so that the slowest acceptable step is known before the simulation,
    which may then end early (`use_bound`); decisions are the same either way.
    """
    current, trial = chain.current, chain.trial
    n_done = 0
    while n_done < n_proposals:
        first, last = propose(chain.tables, trial, chain.random)
        if not _differ(chain.tables, trial, current, first, last):
            continue
        n_done += 1
        unit = float(draw_bits(chain.random) >> np.uint64(11)) * 2.0**-53  # 0 up to, without, 1
        limit_ms = chain.cost_ms[CURRENT] - temperature_ms * np.log(1.0 - unit)
        cost_ms = simulate(chain.tables, trial, limit_ms if use_bound else np.inf)
        chain.tally[N_BOUNDED] += cost_ms == np.inf
        if cost_ms <= limit_ms:
            current[first : last + 1] = trial[first : last + 1]
            chain.cost_ms[CURRENT] = cost_ms
            _keep_best(chain)
        else:
            trial[first : last + 1] = current[first : last + 1]
    chain.tally[N_PROPOSED] += n_done


@compiled
def _differ(tables: CostTables, a: Ints, b: Ints, first: int, last: int) -> bool:
    """Whether two plans differ from layer `first` to layer `last`; what lies beyond a layer's
    parts is not read."""
    for layer in range(first, last + 1):
        n_parts = count_parts(tables, a, layer)
        if a[layer, -1] != b[layer, -1] or (a[layer, :n_parts] != b[layer, :n_parts]).any():
            return True
    return False


@compiled
def _keep_best(chain: MarkovChain) -> None:
    if chain.cost_ms[CURRENT] < chain.cost_ms[BEST]:
        chain.cost_ms[BEST] = chain.cost_ms[CURRENT]
        chain.best[:] = chain.current


DEFAULT_BUDGET = 250_000
ROUND_PROPOSALS = 12_500
CHUNK_PROPOSALS = 625  # between them the temperature falls, and interrupts and progress happen
HOT, COLD = 0.02, 0.0002  # temperatures as shares of the best step
PROGRESS_INTERVAL_S = 0.25


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
    needed = {name: memory_bytes(problem, named[name]) for name in ranked}
    method = _first_that_fits(request, needed)
    best, best_ms = named[method], cost_ms[method]
    names = [device.name for device in request.cluster.devices]
    return PlanResult(
        cost="flexflow2018",
        method=method,
        predicted_step_s=best_ms / 1e3,
        speedup_over_single=cost_ms["single device"] / best_ms,
        speedup_over_ddp=cost_ms["data parallel"] / best_ms,
        memory_bytes=dict(zip(names, needed[method], strict=True)),
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
    start_s, shown_s = time.monotonic(), -math.inf
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
    left = math.inf if budget is None else budget
    round_size = int(min(ROUND_PROPOSALS, left))
    n_chunks = max(2, round_size // CHUNK_PROPOSALS)
    round_ = 0
    while left > 0:
        for k in range(n_chunks):
            size = round_size * (k + 1) // n_chunks - round_size * k // n_chunks
            size = int(min(size, left))
            yield round_, size, HOT * (COLD / HOT) ** (k / (n_chunks - 1))
            left -= size
        round_ += 1
