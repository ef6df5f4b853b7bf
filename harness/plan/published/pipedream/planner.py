"""`--cost pipedream`: the best pipeline with replication by PipeDream's published formula."""

import math
import time
from collections.abc import Sequence

import numpy as np

from harness.domain.cluster import Cluster
from harness.domain.fingerprint import fingerprint
from harness.domain.partition import SAMPLE
from harness.domain.schedule import ScheduleName
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.errors import PlanError
from harness.plan.costs import PlanRequest, PlanResult, RunnerUp, SearchProgress
from harness.plan.published.pipedream.problem import (
    STATE_BYTES_PER_PARAMETER_BYTE,
    TICK_S,
    Level,
    OperatorDag,
    data_parallel_s,
    levels_of,
    memory_bytes,
    workload_from,
)
from harness.plan.published.pipedream.search import (
    DeviceStage,
    FoundPipeline,
    PipelineProblem,
    device_stages,
    list_cuts,
    search,
)
from harness.plan.simulate.network import Network
from harness.units import format_bandwidth, format_bytes, format_count, format_duration


def plan(request: PlanRequest) -> PlanResult:
    """Plan by PipeDream's formula; times are per profiled minibatch, in steady state.

    Raises:
        PlanError: as `workload_of`, or no plan fits the memory.
    """
    workload = workload_of(request, "pipedream")
    levels = levels_for(request.cluster, request.memory_bytes, workload)
    problem = PipelineProblem(workload, levels)
    deadline_s = math.inf if request.seconds is None else time.monotonic() + request.seconds

    def report(quick: FoundPipeline) -> None:
        n_cuts = len(quick.cuts)
        request.progress(
            SearchProgress(n_proposals=n_cuts, best_step_s=quick.step_s, phase="all cuts")
        )

    found = search(problem, report=report, deadline_s=deadline_s)
    if found is None:
        raise PlanError(_nothing_fits(problem))
    return _result(request, problem, found)


def workload_of(request: PlanRequest, cost: str) -> OperatorDag:
    """The model with its times on the cluster's devices, which a published cost cannot tell apart.

    Raises:
        PlanError: unlike devices, another batch than the profiled one, no operator takes time, or
            the profile lacks an operator.
    """
    (graph, profile), cluster = request.model(), request.cluster
    if None not in (request.batch, graph.batch) and request.batch != graph.batch:
        raise PlanError(
            f"--cost {cost} takes times as they were profiled, for a batch of {graph.batch}, and "
            f"--batch-size is {request.batch}: leave it out, or use --cost simulator"
        )
    kinds = {(device.kind, device.speed) for device in cluster.devices}
    if len(kinds) > 1:
        raise PlanError(
            f"--cost {cost} plans for equal devices, and the cluster has {len(kinds)} kinds or "
            "speeds: use --cost simulator"
        )
    [(kind, speed)] = kinds
    workload = workload_from(graph, profile, kind, speed)
    if not any(workload.compute_ticks):
        raise PlanError(f"all operators take 0 s on {kind!r}: give FLOPs or a profile")
    return workload


def levels_for(cluster: Cluster, limit_bytes: int | None, workload: OperatorDag) -> list[Level]:
    """A cluster as the formula sees it: one or two levels of equal workers, innermost first.

    The formula knows one bandwidth per level: the slowest link counts. Nodes of unequal size become
    one level of devices. The least memory of a device counts for all; a limit replaces it.

    Raises:
        ClusterError: several devices but a missing link.
    """
    memory = float(limit_bytes or min(device.memory_bytes for device in cluster.devices))
    # No plan needs more on any device; a limit above it is none.
    kept = 2.0 * sum(workload.activation_bytes)
    if memory >= memory_bytes(float(sum(workload.parameter_bytes)), kept, cluster.n_devices):
        memory = math.inf
    bandwidth, sizes = Network(cluster).bandwidth, {len(node.devices) for node in cluster.nodes}
    if len(sizes) > 1:
        return levels_of([cluster.n_devices], [float(bandwidth.min())], memory)
    node_of = np.array(cluster.node_of())
    apart = ~np.eye(len(node_of), dtype=bool)
    same = (node_of[:, None] == node_of[None, :]) & apart
    inside, between = (
        float(bandwidth[pairs].min()) if pairs.any() else math.inf
        for pairs in (same, apart & ~same)
    )
    levels = ((sizes.pop(), inside), (len(cluster.nodes), between))
    counts, rates = zip(*([one for one in levels if one[0] > 1] or levels[:1]), strict=True)
    return levels_of(counts, rates, memory)


def _nothing_fits(problem: PipelineProblem) -> str:
    workload, parameters = problem.workload, problem.workload.parameter_bytes
    memory = problem.levels[0].memory_bytes
    largest = max(range(workload.n_operators), key=lambda i: parameters[i])
    state, largest_state = (
        format_bytes(STATE_BYTES_PER_PARAMETER_BYTE * n)
        for n in (sum(parameters), parameters[largest])
    )
    what = "no plan" if list_cuts(problem)[1] else "no plan over the sampled cuts"
    return (
        f"{what} fits {format_bytes(memory)} on each of {problem.n_devices} devices: the model "
        f"keeps {state} of parameters, gradients and momentum (operator "
        f"{workload.names[largest]!r} alone {largest_state}) and "
        f"{format_bytes(sum(workload.activation_bytes))} of activations "
        "per minibatch: raise --memory, add devices, or profile a smaller minibatch"
    )


def _result(request: PlanRequest, problem: PipelineProblem, found: FoundPipeline) -> PlanResult:
    placed = device_stages(found, problem.levels)
    single_s = sum(problem.workload.compute_ticks) * TICK_S
    ddp_s = data_parallel_s(single_s, sum(problem.workload.parameter_bytes), problem.levels)
    strategy = pipeline_strategy(request, problem.workload, placed, name="pipedream")
    names = [device.name for device in request.cluster.devices]
    memory: dict[str, int] = dict.fromkeys(names, 0)
    for stage in placed:
        memory.update({names[device]: stage.memory_bytes for device in stage.devices})
    exact = "over all cuts" if found.is_exact else "over a sample of cuts"
    return PlanResult(
        cost="pipedream",
        method=f"pipeline dynamic programming {exact}",
        predicted_step_s=found.step_s,
        lower_bound_s=found.step_s if found.is_exact else single_s / problem.n_devices,
        speedup_over_single=single_s / found.step_s,
        speedup_over_ddp=ddp_s / found.step_s,
        memory_bytes=memory,
        optimizer="momentum",
        strategy=strategy,
        explanation=_explain(found, placed, problem, names)
        + _batch_note(request.batch or request.model()[0].batch, strategy.batch),
        runners_up=[
            _runner_up("data parallel", ddp_s, problem, "every device holds all operators"),
            _runner_up("one device", single_s, problem, "no communication"),
        ],
        n_proposals=len(found.cuts),
        interrupted=found.interrupted,
    )


def _runner_up(name: str, step_s: float, problem: PipelineProblem, note: str) -> RunnerUp:
    """A plan in which a device holds the whole model, if its memory lets it."""
    work = problem.workload
    needed = memory_bytes(sum(work.parameter_bytes), sum(work.activation_bytes), 1)
    if needed > problem.levels[0].memory_bytes:
        return RunnerUp(name=name, step_s=None, note=f"does not fit: {format_bytes(needed)}")
    return RunnerUp(name=name, step_s=step_s, note=note)


def pipeline_strategy(
    request: PlanRequest, workload: OperatorDag, placed: Sequence[DeviceStage], *, name: str
) -> Strategy:
    """The plan as a strategy: replicas split the samples of each microbatch of one step.

    PipeDream streams minibatches without a flush; here a step's batch is cut into as many
    microbatches as there are pipeline stages. Where the batch is unknown, or too small for every
    replica to get a sample, the smallest that every stage can split evenly stands in for it.
    """
    graph, profile = request.model()
    stage_of = {workload.names[i]: s for s, stage in enumerate(placed) for i in stage.operators}
    for operator in graph.operators:  # what the formula leaves out goes where its input is
        if operator.name not in stage_of and operator.inputs and operator.kind != "input":
            stage_of[operator.name] = max(stage_of.get(name, 0) for name in operator.inputs)
    n_microbatches = len(placed)
    smallest = math.lcm(*(len(stage.devices) for stage in placed)) * n_microbatches
    batch = request.batch or graph.batch or smallest
    widest = max(len(stage.devices) for stage in placed)
    batch = batch if batch >= widest else smallest
    n_microbatches = min(n_microbatches, batch // widest)
    return Strategy(
        name=name,
        batch=batch,
        operators={
            operator.name: OperatorPlan({SAMPLE: len(placed[s].devices)}, placed[s].devices, s)
            for operator in graph.operators
            if (s := stage_of.get(operator.name)) is not None
        },
        n_microbatches=n_microbatches,
        schedule=_schedule(placed, n_microbatches),
        stages=[Stage() for _ in placed],
        made_for=fingerprint(graph, request.cluster, profile),
    )


def _schedule(placed: Sequence[DeviceStage], n_microbatches: int) -> ScheduleName:
    n_turns = len({tuple(stage.devices) for stage in placed})
    if n_microbatches == 1:
        return "gpipe"
    if n_turns == len(placed):
        return "1f1b"
    return "gpipe" if n_microbatches % n_turns else "interleaved"


def _explain(
    found: FoundPipeline,
    placed: Sequence[DeviceStage],
    problem: PipelineProblem,
    names: Sequence[str],
) -> list[str]:
    lines = []
    for number, stage in enumerate(found.stages):
        parts = {
            stage.work: stage.compute_s,
            "gradients": stage.sync_s,
            "activations in": stage.receive_s,
            "activations out": stage.send_s,
        }
        times = ", ".join(f"{name} {format_duration(s)}" for name, s in parts.items() if s > 0)
        members = found.cuts.members[stage.end] & ~found.cuts.members[stage.start]
        lines.append(
            f"stage {number}: {format_count(members.bit_count(), 'operator')} on "
            f"{_workers(stage.n_replicas, [each.n_replicas for each in stage.inner])}: {times}"
        )
    slowest = max(range(len(lines)), key=lambda i: found.stages[i].total_s)
    lines.append(f"stage {slowest} sets the pace, by {found.stages[slowest].binding}")
    n_idle = len(names) - sum(len(stage.devices) for stage in placed)
    if n_idle:
        lines.append(f"{n_idle} of {len(names)} devices stay idle: more replicas would not help")
    fullest = max(placed, key=lambda stage: stage.memory_bytes)
    lines.append(
        f"memory is fullest on {names[fullest.devices[0]]}: {format_bytes(fullest.memory_bytes)} "
        f"with {format_count(fullest.in_flight, 'minibatch')} in flight"
    )
    places = ["inside nodes", "between nodes"] if len(problem.levels) > 1 else ["between devices"]
    for where, level in zip(places, problem.levels, strict=True):
        if level.n_workers > 1:
            lines.append(f"links {where}: {format_bandwidth(level.bandwidth)} (the slowest counts)")
    return lines


def _workers(n_replicas: int, inside: Sequence[int]) -> str:
    """The workers of a stage, with the replicas of its stages inside each: `3 nodes of 4 devices`,
    `1 node, in stages on 2-1 devices`."""
    if not inside:
        return format_count(n_replicas, "device")
    devices = "-".join(map(str, inside)) + f" device{'s' if max(inside) + len(inside) > 2 else ''}"
    words = ", in stages on" if len(inside) > 1 else " of"
    return f"{format_count(n_replicas, 'node')}{words} {devices}"


def _batch_note(wanted: int | None, written: int) -> list[str]:
    if wanted == written:
        return []
    if wanted is None:
        return [
            "times are of the profiled minibatch, whose size is not known: the strategy is written "
            f"for a batch of {written} (--batch-size B sets it)"
        ]
    return [f"a batch of {wanted} leaves replicas without a sample: the strategy is for {written}"]
