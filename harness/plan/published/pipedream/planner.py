"""`--cost pipedream`: the best pipeline with replication by PipeDream's published formula."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import msgspec

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import fingerprint
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.strategy import OperatorPlan, Strategy
from harness.domain.strategy import Stage as StrategyStage
from harness.errors import PlanError
from harness.plan.published.pipedream.cluster_levels import Machines, machines_of
from harness.plan.published.pipedream.cost import (
    STATE_BYTES_PER_PARAMETER_BYTE,
    Stage,
    data_parallel_s,
    memory_bytes,
)
from harness.plan.published.pipedream.evaluate import (
    DeviceStage,
    StageCost,
    device_stages,
    stage_costs,
)
from harness.plan.published.pipedream.lattice import Lattice
from harness.plan.published.pipedream.search import Found, Problem, search
from harness.plan.published.pipedream.workload import TICK_S, Workload, workload_from
from harness.plan.request import PlanRequest, PlanResult, Progress, RunnerUp
from harness.units import format_bandwidth, format_bytes, format_duration


def plan(request: PlanRequest) -> PlanResult:
    """Plan by PipeDream's formula; times are per profiled minibatch, in steady state.

    Raises:
        PlanError: no plan fits the memory, no operator takes time, or the profile lacks an operator
            or device kind.
    """
    graph, profile, cluster = request.graph, request.profile, request.cluster
    if graph is None or profile is None:
        raise PlanError("--cost pipedream needs a profile: give --profile FILE or --model NAME")
    start_cpu_s = time.process_time()
    workload = workload_from(graph, profile, cluster.devices[0].kind)
    lattice = Lattice(workload)
    speeds = _speeds(graph, profile, cluster, workload)
    machines = machines_of(cluster, request.memory_bytes, speeds)
    memory = math.inf if machines.memory >= _most_memory(workload, cluster) else machines.memory
    problem = Problem(workload, machines.levels, memory, machines.unlike)
    deadline_s = None if request.seconds is None else time.monotonic() + request.seconds

    def report(best_s: float, phase: str, n_cuts: int) -> None:
        request.progress(Progress(n_proposals=n_cuts, best_step_s=best_s, phase=phase))

    found = search(problem, lattice, report=report, deadline_s=deadline_s)
    if found is None:
        is_certain = lattice.every(problem.most_cuts) is not None
        raise PlanError(_nothing_fits(workload, machines, is_certain))
    cpu_s = time.process_time() - start_cpu_s
    result = _result(graph, profile, request, problem, machines, lattice, found)
    return msgspec.structs.replace(result, search_cpu_s=cpu_s)


def _speeds(graph: Graph, profile: Profile, cluster: Cluster, workload: Workload) -> list[float]:
    """Each device's speed relative to the first device's kind at speed 1.

    Raises:
        PlanError: no operator takes time on one kind.
    """
    totals = {cluster.devices[0].kind: sum(workload.compute_ticks)}
    for kind in {device.kind for device in cluster.devices} - totals.keys():
        totals[kind] = sum(workload_from(graph, profile, kind).compute_ticks)
    base = totals[cluster.devices[0].kind]
    idle = [kind for kind, total in totals.items() if total == 0]
    if idle:
        raise PlanError(
            f"all operators of {graph.name!r} take 0 s on {idle[0]!r}: give FLOPs or a profile"
        )
    return [device.speed * base / totals[device.kind] for device in cluster.devices]


def _most_memory(workload: Workload, cluster: Cluster) -> float:
    """No plan needs more on any device; a limit above it is none."""
    kept = sum(workload.activation_bytes) + sum(workload.output_bytes)
    return memory_bytes(sum(workload.parameter_bytes), kept, cluster.n_devices)


def _nothing_fits(workload: Workload, machines: Machines, is_certain: bool) -> str:
    memory = machines.memory
    if machines.unlike is not None:
        memory = float(machines.unlike.memory_bytes.min())
    largest = max(range(workload.n_operators), key=lambda i: workload.parameter_bytes[i])
    state = STATE_BYTES_PER_PARAMETER_BYTE * workload.parameter_bytes[largest]
    n = math.prod(level.n_workers for level in machines.levels)
    what = "no plan" if is_certain else "no plan over the sampled cuts"
    return (
        f"{what} fits {format_bytes(memory)} on each of {n} devices: the model keeps "
        f"{format_bytes(STATE_BYTES_PER_PARAMETER_BYTE * sum(workload.parameter_bytes))} of "
        f"parameters, gradients and momentum (operator {workload.names[largest]!r} alone "
        f"{format_bytes(state)}) and {format_bytes(sum(workload.activation_bytes))} of activations "
        "per minibatch: raise --memory, add devices, or profile a smaller minibatch"
    )


def _result(
    graph: Graph,
    profile: Profile,
    request: PlanRequest,
    problem: Problem,
    machines: Machines,
    lattice: Lattice,
    found: Found,
) -> PlanResult:
    costs = stage_costs(lattice, found.stages, machines.levels, machines.unlike)
    placed = device_stages(lattice, found.stages, machines.levels)
    single_s = sum(problem.workload.compute_ticks) * TICK_S
    ddp_s = _data_parallel_s(problem, machines)
    strategy = _strategy(graph, profile, request, problem.workload, placed)
    names = [device.name for device in request.cluster.devices]
    memory: dict[str, int] = dict.fromkeys(names, 0)
    for stage in placed:
        memory.update({names[device]: stage.memory_bytes for device in stage.devices})
    exact = "over all cuts" if found.is_exact else "over a sample of cuts, refined"
    return PlanResult(
        cost="pipedream",
        method=f"pipeline dynamic programming {exact}",
        predicted_step_s=found.step_s,
        speedup_over_single=single_s / found.step_s,
        speedup_over_ddp=ddp_s / found.step_s,
        memory_bytes=memory,
        strategy=strategy,
        explanation=_explain(found, costs, placed, machines, names)
        + _batch_note(request.batch or graph.batch, strategy.batch),
        runners_up=[
            _runner_up("data parallel", ddp_s, problem, "every device holds all operators"),
            _runner_up("one device", single_s, problem, "no communication"),
        ],
        n_proposals=found.n_cuts,
        interrupted=found.interrupted,
    )


def _runner_up(name: str, step_s: float, problem: Problem, note: str) -> RunnerUp:
    """A plan in which a device holds the whole model, if its memory lets it."""
    work, limit = problem.workload, problem.memory
    if problem.unlike is not None:
        limit = float(problem.unlike.memory_bytes[0, problem.unlike.n])
    needed = memory_bytes(sum(work.parameter_bytes), sum(work.activation_bytes), 1)
    if needed > limit:
        return RunnerUp(name=name, step_s=None, note=f"does not fit: {format_bytes(needed)}")
    return RunnerUp(name=name, step_s=step_s, note=note)


def _data_parallel_s(problem: Problem, machines: Machines) -> float:
    compute_s = sum(problem.workload.compute_ticks) * TICK_S
    parameters = sum(problem.workload.parameter_bytes)
    workers = machines.unlike
    if workers is None:
        return data_parallel_s(compute_s, parameters, machines.levels)
    everyone = 0, workers.n
    rate, sync = float(workers.rate[everyone]), float(workers.sync_s_per_byte[everyone])
    return compute_s / rate + sync * parameters


def _strategy(
    graph: Graph,
    profile: Profile,
    request: PlanRequest,
    workload: Workload,
    placed: Sequence[DeviceStage],
) -> Strategy:
    """The plan as a strategy: replicas split the samples of each microbatch of one step.

    PipeDream streams minibatches without a flush; here a step's batch is cut into as many
    microbatches as there are pipeline stages. Where the batch is unknown, or too small for every
    replica to get a sample, the smallest that every stage can split evenly stands in for it.
    """
    stage_of = {workload.names[i]: s for s, stage in enumerate(placed) for i in stage.operators}
    for operator in graph.operators:  # what the formula leaves out goes where its input is
        if operator.name not in stage_of and operator.inputs and operator.kind != "input":
            stage_of[operator.name] = max(stage_of.get(name, 0) for name in operator.inputs)
    n_microbatches = len(placed)
    smallest = math.lcm(*(len(stage.devices) for stage in placed)) * n_microbatches
    batch = request.batch or graph.batch or smallest
    widest = max(len(stage.devices) for stage in placed)
    batch = batch if batch >= widest else smallest
    n_microbatches = max(1, min(n_microbatches, batch // widest))
    return Strategy(
        name="pipedream",
        batch=batch,
        operators={
            operator.name: OperatorPlan(
                partition={"sample": len(placed[stage_of[operator.name]].devices)},
                devices=placed[stage_of[operator.name]].devices,
                stage=stage_of[operator.name],
            )
            for operator in graph.operators
            if operator.name in stage_of
        },
        n_microbatches=n_microbatches,
        schedule="1f1b" if n_microbatches > 1 else "gpipe",
        stages=[StrategyStage() for _ in placed],
        made_for=fingerprint(graph, request.cluster, profile),
    )


def _explain(
    found: Found,
    costs: Sequence[StageCost],
    placed: Sequence[DeviceStage],
    machines: Machines,
    names: Sequence[str],
) -> list[str]:
    lines = []
    for number, (stage, cost) in enumerate(zip(found.stages, costs, strict=True)):
        workers = "group" if stage.inner else "device"
        inner = f" of {_replicas(stage.inner)} inside" if stage.inner else ""
        parts = {
            "compute": cost.compute_s,
            "gradients": cost.sync_s,
            "activations in": cost.receive_s,
            "activations out": cost.send_s,
        }
        times = ", ".join(f"{name} {format_duration(s)}" for name, s in parts.items() if s > 0)
        lines.append(
            f"stage {number}: {(stage.end & ~stage.start).bit_count()} operators on "
            f"{stage.n_replicas} {workers}{'s' if stage.n_replicas > 1 else ''}{inner}: {times}"
        )
    slowest = max(range(len(costs)), key=lambda i: costs[i].total_s)
    lines.append(f"stage {slowest} sets the pace, by {costs[slowest].binding}")
    n_idle = len(names) - sum(len(stage.devices) for stage in placed)
    if n_idle:
        lines.append(f"{n_idle} of {len(names)} devices stay idle: more replicas would not help")
    fullest = max(placed, key=lambda stage: stage.memory_bytes)
    lines.append(
        f"memory is fullest on {names[fullest.devices[0]]}: {format_bytes(fullest.memory_bytes)} "
        f"with {fullest.in_flight} minibatches in flight"
    )
    for depth, level in enumerate(machines.levels):
        if level.n_workers > 1:
            where = "inside nodes" if depth < len(machines.levels) - 1 else "between workers"
            lines.append(f"links {where}: {format_bandwidth(level.bandwidth)} (the slowest counts)")
    return lines


def _batch_note(asked: int | None, written: int) -> list[str]:
    if asked == written:
        return []
    if asked is None:
        return [
            "times are of the profiled minibatch, whose size is not known: the strategy is written "
            f"for a batch of {written} (--batch B sets it)"
        ]
    return [f"a batch of {asked} leaves replicas without a sample: the strategy is for {written}"]


def _replicas(stages: Sequence[Stage]) -> str:
    return "-".join(str(stage.n_replicas) for stage in stages)
