"""The cost model in plain Python, task by task: slow and short; the kernels must equal it.

Every part is a task on its device, and every intersection of a producer's block with a consumer's
input block that crosses devices is a task on the channel (producer part, consumer part). Channels
are keyed by the parts' indices alone, so that transfers between different pairs of layers share
them. Each device and channel serves its tasks in the order in which they become ready; ties go to
the earlier layer, compute before transfers into the next layer, then the lower consumer and
producer part.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

from harness.plan.published.flexflow2018.model import (
    BETWEEN_BYTES_PER_MS,
    CONV,
    ELEMENT_BYTES,
    GIVE_BACK_MS,
    INSIDE_BYTES_PER_MS,
    LINEAR,
    LayerCut,
    LayerProblem,
    Plan,
)

Resource = int | tuple[int, int]  # a device, or a channel between part indices
Span = tuple[int, int]


@dataclass(eq=False)
class TimedTask:
    """A part's computation or a transfer. `order` breaks ties; `n_waits` counts producers left."""

    order: tuple[int, ...]
    resource: Resource
    duration_ms: float
    layer: int
    ready_ms: float = 0.0
    start_ms: float = 0.0
    n_waits: int = 0
    followers: list[TimedTask] = field(default_factory=list)

    @property
    def finish_ms(self) -> float:
        return self.start_ms + self.duration_ms

    def then(self, follower: TimedTask) -> None:
        self.followers.append(follower)
        follower.n_waits += 1


def step_ms(problem: LayerProblem, plan: Plan) -> float:
    """Predicted milliseconds of a training step: the last task, then all synchronisation."""
    end_ms = max(task.finish_ms for task in simulate(problem, plan))
    transfer_ms, squared_parts = synchronise(problem, plan)
    return end_ms + transfer_ms - GIVE_BACK_MS * squared_parts


def simulate(problem: LayerProblem, plan: Plan) -> list[TimedTask]:
    """All tasks with their times, in the order in which they became ready."""
    tasks = build_tasks(problem, plan)
    ready = [(task.ready_ms, task.order, task) for task in tasks if task.n_waits == 0]
    heapq.heapify(ready)
    free_ms: dict[Resource, float] = {}
    done: list[TimedTask] = []
    while ready:
        _, _, task = heapq.heappop(ready)
        task.start_ms = max(free_ms.get(task.resource, 0.0), task.ready_ms)
        free_ms[task.resource] = task.finish_ms
        done.append(task)
        for follower in task.followers:
            follower.ready_ms = max(follower.ready_ms, task.finish_ms)
            follower.n_waits -= 1
            if follower.n_waits == 0:
                heapq.heappush(ready, (follower.ready_ms, follower.order, follower))
    return done


def build_tasks(problem: LayerProblem, plan: Plan) -> list[TimedTask]:
    """One task per part and per transfer, wired producer to consumer."""
    tasks: list[TimedTask] = []
    before: list[TimedTask] = []
    for index, (layer, cut) in enumerate(zip(problem.layers, plan, strict=True)):
        duration_ms = problem.part_ms(layer, cut.n_samples, cut.n_features)
        parts = [
            TimedTask((index, 0, part), device, duration_ms, index)
            for part, device in enumerate(cut.devices)
        ]
        tasks += parts
        if index > 0:
            tasks += _connect(problem, index, plan[index - 1], cut, before, parts)
        before = parts
    return tasks


def _connect(
    problem: LayerProblem,
    index: int,
    source: LayerCut,
    target: LayerCut,
    before: list[TimedTask],
    parts: list[TimedTask],
) -> list[TimedTask]:
    transfers: list[TimedTask] = []
    for to, consumer in enumerate(parts):
        wanted = _sample_span(problem, target, to)
        for producer_index, producer in enumerate(before):
            held = _sample_span(problem, source, producer_index)
            n_common = min(wanted[1], held[1]) - max(wanted[0], held[0])
            if n_common <= 0:
                continue
            a, b = source.devices[producer_index], target.devices[to]
            if a == b:
                producer.then(consumer)
                continue
            features = problem.layers[index - 1].n_out // source.n_features
            same_node = problem.machine.node(a) == problem.machine.node(b)
            bytes_per_ms = INSIDE_BYTES_PER_MS if same_node else BETWEEN_BYTES_PER_MS
            duration_ms = ELEMENT_BYTES * n_common * features / bytes_per_ms
            transfer = TimedTask(
                (index, 1, to, producer_index), (producer_index, to), duration_ms, index
            )
            producer.then(transfer)
            transfer.then(consumer)
            transfers.append(transfer)
    return transfers


def _sample_span(problem: LayerProblem, cut: LayerCut, part: int) -> Span:
    size = problem.machine.batch // cut.n_samples
    block = part // cut.n_features
    return block * size, (block + 1) * size


def synchronise(problem: LayerProblem, plan: Plan) -> tuple[float, int]:
    """Milliseconds of summing all weight gradients over their holders, slice by slice; and the
    squared parts, for each of which the model gives back GIVE_BACK_MS."""
    transfer_ms, squared_parts = 0.0, 0
    for layer, cut in zip(problem.layers, plan, strict=True):
        if layer.kind == CONV:
            n_bytes = float(ELEMENT_BYTES * layer.n_weights)
            transfer_ms += n_bytes * _ms_per_byte(problem, set(cut.devices))
        for slice_ in range(problem.machine.n_devices) if layer.kind == LINEAR else ():
            block = slice_ // cut.n_samples
            holders = cut.devices[block :: cut.n_features]
            n_bytes = ELEMENT_BYTES * layer.n_in * layer.n_out / problem.machine.n_devices
            transfer_ms += n_bytes * _ms_per_byte(problem, set(holders))
            squared_parts += sum(holders.count(device) ** 2 for device in set(holders))
    return transfer_ms, squared_parts


def _ms_per_byte(problem: LayerProblem, devices: set[int]) -> float:
    nodes = [problem.machine.node(device) for device in devices]
    most_in_a_node = max(nodes.count(node) for node in nodes)
    return (most_in_a_node - 1) / INSIDE_BYTES_PER_MS + (len(set(nodes)) - 1) / BETWEEN_BYTES_PER_MS
