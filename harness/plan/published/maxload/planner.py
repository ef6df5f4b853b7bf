"""`--cost maxload`: the least load of the busiest device, over stages of any shape."""

import math
from collections.abc import Sequence

from harness.domain.cluster import Cluster
from harness.errors import PlanError
from harness.plan.costs import PlanRequest, PlanResult, RunnerUp, SearchProgress
from harness.plan.published.maxload.problem import LoadProblem, Value
from harness.plan.published.maxload.search import Found, OperatorPlacement, search
from harness.plan.published.pipedream.planner import pipeline_strategy, workload_of
from harness.plan.published.pipedream.problem import (
    STATE_BYTES_PER_PARAMETER_BYTE,
    TICK_S,
    OperatorDag,
)
from harness.plan.published.pipedream.search import DeviceStage
from harness.plan.simulate.network import Network
from harness.units import format_bytes, format_duration

_MOVES = 12_000  # the budget that asks for the usual annealing


def plan(request: PlanRequest) -> PlanResult:
    """Plan one device for each operator; times are per profiled minibatch, in steady state.

    Raises:
        PlanError: as `workload_of`, or no plan fits the memory.
    """
    workload = workload_of(request, "maxload")
    problem = problem_from(workload, request.cluster, request.memory_bytes)

    def report(quick: OperatorPlacement, n_sets: int) -> None:
        progress = SearchProgress(n_proposals=n_sets, best_step_s=quick.load_s, phase="all sets")
        request.progress(progress)

    effort = 1.0 if request.budget is None else request.budget / _MOVES
    found = search(problem, effort=effort, seed=request.seed, report=report)
    if found is None:
        raise PlanError(
            f"no plan of contiguous stages fits {format_bytes(problem.memory_bytes)} on each of "
            f"{problem.n_devices} devices, of {format_bytes(math.fsum(problem.n_bytes))} in all: "
            "raise --memory, or add devices"
        )
    return _result(request, workload, problem, found)


def problem_from(workload: OperatorDag, cluster: Cluster, limit_bytes: int | None) -> LoadProblem:
    """A model on a cluster; the slowest link counts.

    A value costs its bytes there and those of its gradient back. An operator keeps its parameters,
    gradients and momentum, and its output once for each device, since that many minibatches are in
    flight at most. A limit replaces the devices' own memory.
    """
    n_devices = cluster.n_devices
    bandwidth = float(Network(cluster).bandwidth.min())
    kept = zip(workload.parameter_bytes, workload.activation_bytes, strict=True)
    return LoadProblem(
        names=workload.names,
        seconds=[ticks * TICK_S for ticks in workload.compute_ticks],
        n_bytes=[
            float(STATE_BYTES_PER_PARAMETER_BYTE * parameters + n_devices * activations)
            for parameters, activations in kept
        ],
        producers=workload.producers,
        values=[
            Value(2 * workload.activation_bytes[i] / bandwidth, (i, *consumers))
            for i, consumers in enumerate(workload.consumers)
            if consumers
        ],
        n_devices=n_devices,
        memory_bytes=float(limit_bytes or min(d.memory_bytes for d in cluster.devices)),
    )


def stages_in_turn(problem: LoadProblem, device_of: Sequence[int]) -> list[list[int]] | None:
    """A placement as stages that follow the flow, which devices take in turn; None where a device
    would have nothing to do in its turn."""
    used = sorted(set(device_of))
    where = {d: [i for i, own in enumerate(device_of) if own == d] for d in used}
    by_flow = sorted(used, key=lambda d: (sum(where[d]) / len(where[d]), d))
    orders = (_in_turn(problem, device_of, order) for order in (used, by_flow))
    return next((stages for stages in orders if all(stages)), None)


def _in_turn(
    problem: LoadProblem, device_of: Sequence[int], used: Sequence[int]
) -> list[list[int]]:
    """Each operator in the first stage of its device that follows its producers'."""
    turn_of = {device: turn for turn, device in enumerate(used)}
    stage_of: list[int] = []
    for i, producers in enumerate(problem.producers):
        earliest = max((stage_of[p] for p in producers), default=0)
        stage_of.append(earliest + (turn_of[device_of[i]] - earliest) % len(used))
    n_stages = -(-(max(stage_of) + 1) // len(used)) * len(used)
    return [[i for i, s in enumerate(stage_of) if s == stage] for stage in range(n_stages)]


def _result(
    request: PlanRequest, workload: OperatorDag, problem: LoadProblem, found: Found
) -> PlanResult:
    is_free = found.free.load_s < found.contiguous.load_s
    stages = stages_in_turn(problem, found.free.device_of) if is_free else None
    is_written = stages is not None  # the free placement is
    chosen = found.free if is_written else found.contiguous
    stages = stages or stages_in_turn(problem, chosen.device_of)
    assert stages is not None, "contiguous stages have a device each"
    n_used = len(set(chosen.device_of))
    held = [math.fsum(problem.n_bytes[i] for i in stage) for stage in stages]
    n_bytes = [math.ceil(sum(held[d::n_used])) for d in range(n_used)]
    placed = [
        DeviceStage(
            operators=stage,
            devices=[s % n_used],
            in_flight=problem.n_devices,
            memory_bytes=n_bytes[s % n_used],
        )
        for s, stage in enumerate(stages)
    ]
    single_s = math.fsum(problem.seconds)
    names = [device.name for device in request.cluster.devices]
    exact = "over all cuts" if found.is_exact else "over a sample of cuts"
    return PlanResult(
        cost="maxload",
        method="annealing" if is_written else f"dynamic programming {exact}",
        predicted_step_s=chosen.load_s,
        lower_bound_s=found.bound_s if is_written else found.contiguous_bound_s,
        speedup_over_single=single_s / chosen.load_s,
        speedup_over_ddp=math.nan,
        memory_bytes={**dict.fromkeys(names, 0), **dict(zip(names, n_bytes, strict=False))},
        optimizer="momentum",
        strategy=pipeline_strategy(request, workload, placed, name="maxload"),
        explanation=_explain(problem, found, placed),
        runners_up=_runners_up(found, single_s, is_written=is_written),
        n_proposals=found.n_sets,
    )


def _explain(problem: LoadProblem, found: Found, placed: Sequence[DeviceStage]) -> list[str]:
    lines = []
    for number, stage in enumerate(placed):
        own = set(stage.operators)
        compute_s = math.fsum(problem.seconds[i] for i in own)
        values_s = problem.load_s(own) - compute_s
        lines.append(
            f"stage {number}: {len(own)} operators on device {stage.devices[0]}: compute "
            f"{format_duration(compute_s)}, values {format_duration(values_s)}"
        )
    exact = "the least there is" if found.is_exact else "the best found"
    lines.append(
        f"with contiguous stages {format_duration(found.contiguous.load_s)} ({exact}); with a "
        f"device's operators anywhere {format_duration(found.free.load_s)}, and at least "
        f"{format_duration(found.bound_s)}"
    )
    return lines


def _runners_up(found: Found, single_s: float, *, is_written: bool) -> list[RunnerUp]:
    others = [RunnerUp(name="one device", step_s=single_s, note="no communication")]
    if is_written:
        others.append(RunnerUp(name="contiguous stages", step_s=found.contiguous.load_s))
    elif found.free.load_s < found.contiguous.load_s:
        note = "not written: its devices cannot take stages in turn"
        others.append(RunnerUp(name="operators anywhere", step_s=found.free.load_s, note=note))
    return sorted(others, key=lambda other: other.step_s or 0.0)
