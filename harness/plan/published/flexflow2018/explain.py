"""Why a plan costs what it costs: where its time goes, what binds, what it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.plan.published.flexflow2018.model import (
    ELEMENT_BYTES,
    GIVE_BACK_MS,
    LINEAR,
    Cut,
    Layer,
    Plan,
    Problem,
)
from harness.plan.published.flexflow2018.notation import format_plan
from harness.plan.published.flexflow2018.reference import Task, simulate, synchronise


@dataclass(frozen=True, kw_only=True)
class Breakdown:
    """A step, in ms. The critical path is the chain of tasks without a gap that ends last.

    Attributes:
        compute_ms, inside_ms, between_ms: what the critical path spends on devices, on links
            inside nodes and on links between them; their sum is when the last task ends.
        sync_ms: synchronisation of weights, after the last task.
        give_back_ms: what the cost model deducts for parts that share a device.
        busiest_device, busy_ms: the device with the most work, and how much.
        mean_busy_ms: the same averaged over all devices.
    """

    compute_ms: float
    inside_ms: float
    between_ms: float
    sync_ms: float
    give_back_ms: float
    busiest_device: int
    busy_ms: float
    mean_busy_ms: float

    @property
    def step_ms(self) -> float:
        path_ms = self.compute_ms + self.inside_ms + self.between_ms
        return path_ms + self.sync_ms - self.give_back_ms


def break_down(problem: Problem, plan: Plan) -> Breakdown:
    """Simulate the plan task by task and follow what held up the last one."""
    tasks = simulate(problem, plan)
    spent = {"compute": 0.0, "inside": 0.0, "between": 0.0}
    for task in critical_path(tasks):
        spent[_where(problem, plan, task)] += task.duration_ms
    busy = [0.0] * problem.machine.n_devices
    for task in tasks:
        if isinstance(task.resource, int):
            busy[task.resource] += task.duration_ms
    sync = [synchronise(problem, *pair) for pair in zip(problem.layers, plan, strict=True)]
    return Breakdown(
        compute_ms=spent["compute"],
        inside_ms=spent["inside"],
        between_ms=spent["between"],
        sync_ms=sum(each.transfer_ms for each in sync),
        give_back_ms=GIVE_BACK_MS * sum(each.squared_parts for each in sync),
        busiest_device=busy.index(max(busy)),
        busy_ms=max(busy),
        mean_busy_ms=sum(busy) / len(busy),
    )


def critical_path(tasks: Sequence[Task]) -> list[Task]:
    """Tasks from the start to the last finish, each starting the moment the one before ends."""
    ending: dict[float, list[int]] = {}
    for i, task in enumerate(tasks):
        ending.setdefault(task.finish_ms, []).append(i)
    at = max(range(len(tasks)), key=lambda i: tasks[i].finish_ms)
    path = [tasks[at]]
    while tasks[at].start_ms > 0:
        at = next(
            i
            for i in ending[tasks[at].start_ms]
            if i < at
            and (tasks[i].resource == tasks[at].resource or tasks[at] in tasks[i].followers)
        )
        path.append(tasks[at])
    return path[::-1]


def _where(problem: Problem, plan: Plan, task: Task) -> str:
    if isinstance(task.resource, int):
        return "compute"
    source, to = task.resource
    a, b = plan[task.layer - 1].devices[source], plan[task.layer].devices[to]
    return "inside" if problem.machine.node(a) == problem.machine.node(b) else "between"


def memory_bytes(problem: Problem, plan: Plan) -> list[int]:
    """Weights, their gradients, and the outputs that are kept for the backward pass, per device.

    FlexFlow's model of 2018 has no memory; this is the least that the plan needs.
    """
    needed = [0] * problem.machine.n_devices
    for layer, cut in zip(problem.layers, plan, strict=True):
        block_bytes = ELEMENT_BYTES * problem.machine.batch * layer.n_out // len(cut.devices)
        for device in cut.devices:
            needed[device] += block_bytes
        for device, n_blocks in _count_weight_blocks(layer, cut).items():
            needed[device] += 2 * ELEMENT_BYTES * layer.n_weights * n_blocks // cut.n_features
    return needed


def _count_weight_blocks(layer: Layer, cut: Cut) -> dict[int, int]:
    """Distinct feature blocks of the weights that each device holds."""
    held: dict[int, set[int]] = {}
    for part, device in enumerate(cut.devices):
        held.setdefault(device, set()).add(part % cut.n_features)
    return {device: len(blocks) for device, blocks in held.items()}


def explain(problem: Problem, plan: Plan) -> list[str]:
    """Lines for people: the breakdown, what binds, and the plan in FlexFlow's notation."""
    b = break_down(problem, plan)
    n_nodes = problem.machine.n_nodes
    parts = {
        "arithmetic and memory of the devices": b.compute_ms,
        "transfers inside nodes": b.inside_ms,
        "transfers between nodes": b.between_ms,
        "synchronisation of weights": b.sync_ms,
    }
    binding = max(parts, key=lambda name: parts[name])
    links = "inside and between nodes" if n_nodes > 1 else "inside the node"
    return [
        *summarise(problem, plan),
        f"step {b.step_ms:.3f} ms = {b.compute_ms:.3f} computing + {b.inside_ms:.3f} in transfers "
        f"inside nodes + {b.between_ms:.3f} between nodes (critical path) + {b.sync_ms:.3f} "
        f"synchronising weights {links} - {b.give_back_ms:.3f} given back",
        f"what binds: {binding}, {parts[binding] / b.step_ms:.0%} of the step; device "
        f"{b.busiest_device} works longest, {b.busy_ms:.3f} ms (mean {b.mean_busy_ms:.3f})",
        "plan in FlexFlow's notation of 2018, dims (samples features):",
        *format_plan(problem, plan),
    ]


def summarise(problem: Problem, plan: Plan) -> list[str]:
    """Runs of layers that are cut alike and placed alike, one line each."""
    runs: list[tuple[list[str], str]] = []
    for layer, cut in zip(problem.layers, plan, strict=True):
        text = _describe(layer, cut)
        if runs and runs[-1][1] == text:
            runs[-1][0].append(layer.name)
        else:
            runs.append(([layer.name], text))
    return [
        f"{names[0] if len(names) == 1 else f'{names[0]} to {names[-1]}'}: {text}"
        for names, text in runs
    ]


def _describe(layer: Layer, cut: Cut) -> str:
    n_devices = len(set(cut.devices))
    where = f"on {n_devices} device{'s' if n_devices > 1 else ''}"
    if n_devices == 1:
        where = f"on device {cut.devices[0]}"
    if layer.kind == LINEAR and cut.n_features > 1:
        if cut.n_samples > 1:
            return f"{cut.n_samples} sample blocks x {cut.n_features} feature blocks {where}"
        return f"split by feature into {cut.n_features} {where}"
    if cut.n_samples > 1:
        return f"split by sample into {cut.n_samples} {where}"
    return f"whole {where}"
