"""Why a plan costs what it costs: where its time goes, what binds, what memory it needs."""

from __future__ import annotations

from collections.abc import Sequence

from harness.domain.fingerprint import MadeFor
from harness.domain.strategy import OperatorPlan, Strategy
from harness.plan.published.flexflow2018.model import (
    ELEMENT_BYTES,
    GIVE_BACK_MS,
    LINEAR,
    Layer,
    LayerCut,
    LayerProblem,
    Plan,
    TimedTask,
    simulate,
    synchronise,
)

MODEL_NAME = "alexnet of flexflow2018"
COMPUTE, INSIDE, BETWEEN, SYNC = (
    "arithmetic and memory of the devices",
    "transfers inside nodes",
    "transfers between nodes",
    "synchronisation of weights",
)


def break_down(problem: LayerProblem, plan: Plan) -> tuple[dict[str, float], float]:
    """Milliseconds of a step: what the critical path and the synchronisation spend, and what the
    model gives back for parts that share a device."""
    spent = dict.fromkeys((COMPUTE, INSIDE, BETWEEN, SYNC), 0.0)
    for task in critical_path(simulate(problem, plan)):
        where = COMPUTE
        if not isinstance(task.resource, int):
            source, to = task.resource
            ends = plan[task.layer - 1].devices[source], plan[task.layer].devices[to]
            where = INSIDE if len({*map(problem.machine.node, ends)}) == 1 else BETWEEN
        spent[where] += task.duration_ms
    spent[SYNC], squared_parts = synchronise(problem, plan)
    return spent, GIVE_BACK_MS * squared_parts


def critical_path(tasks: Sequence[TimedTask]) -> list[TimedTask]:
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


def explain(problem: LayerProblem, plan: Plan) -> list[str]:
    """Lines for people: the breakdown, what binds, and the plan in FlexFlow's notation."""
    spent, given_back_ms = break_down(problem, plan)
    step_ms = sum(spent.values()) - given_back_ms
    busy_ms = [0.0] * problem.machine.n_devices
    for layer, cut in zip(problem.layers, plan, strict=True):
        for device in cut.devices:
            busy_ms[device] += problem.part_ms(layer, cut.n_samples, cut.n_features)
    binding = max(spent, key=lambda name: spent[name])
    links = "inside and between nodes" if problem.machine.n_nodes > 1 else "inside the node"
    return [
        *_summarise(problem, plan),
        f"step {step_ms:.3f} ms = {spent[COMPUTE]:.3f} computing + {spent[INSIDE]:.3f} in "
        f"transfers inside nodes + {spent[BETWEEN]:.3f} between nodes (critical path) + "
        f"{spent[SYNC]:.3f} synchronising weights {links} - {given_back_ms:.3f} given back",
        f"what binds: {binding}, {spent[binding] / step_ms:.0%} of the step; device "
        f"{busy_ms.index(max(busy_ms))} works longest, {max(busy_ms):.3f} ms (mean "
        f"{sum(busy_ms) / len(busy_ms):.3f})",
        "plan in FlexFlow's notation of 2018, dims (samples features):",
        *format_plan(problem, plan),
    ]


def _summarise(problem: LayerProblem, plan: Plan) -> list[str]:
    """Runs of layers that are cut alike and placed alike, one line each."""
    runs: list[tuple[list[str], str]] = []
    for layer, cut in zip(problem.layers, plan, strict=True):
        text = _describe(layer, cut)
        if runs and runs[-1][1] == text:
            runs[-1][0].append(layer.name)
        else:
            runs.append(([layer.name], text))
    return [f"{' to '.join(dict.fromkeys((names[0], names[-1])))}: {text}" for names, text in runs]


def _describe(layer: Layer, cut: LayerCut) -> str:
    n_devices = len(set(cut.devices))
    where = f"on {n_devices} devices" if n_devices > 1 else f"on device {cut.devices[0]}"
    if layer.kind == LINEAR and cut.n_features > 1:
        if cut.n_samples > 1:
            return f"{cut.n_samples} sample blocks x {cut.n_features} feature blocks {where}"
        return f"split by feature into {cut.n_features} {where}"
    return (
        f"split by sample into {cut.n_samples} {where}" if cut.n_samples > 1 else f"whole {where}"
    )


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
        made_for=MadeFor(model=MODEL_NAME),
    )
