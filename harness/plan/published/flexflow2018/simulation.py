"""The step of a plan, exactly, by events over all parts and transfers. All compiled.

Every part is a task on its device, and every intersection of a producer's block with a consumer's
input block that crosses devices is a task on the channel (producer part, consumer part). Channels
are keyed by the parts' indices alone, so that transfers between different pairs of layers share
them. Each device and channel serves its tasks in the order in which they become ready; ties go to
the earlier layer, compute before transfers into the next layer, then the lower consumer and
producer part.

A caller that would refuse a plan slower than some limit says so: a plan is refused, unsimulated or
half simulated, when a lower bound is above it. A part that finishes at t proves that the step takes
t, one part of each later layer, and the synchronisation.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.plan.compiled import compiled, pop, push
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

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

INSIDE_RATIO = BETWEEN_BYTES_PER_MS / INSIDE_BYTES_PER_MS
ROUNDING_MS = 1e-6  # far above the rounding of a sum of times, far below any difference that counts


class CostTables(NamedTuple):
    """Costs of a problem. A layer's cut is named by s, the base 2 logarithm of its sample blocks.

    A plan is an array (layer, n_devices + 1): each part's device, and s in the last column.

    Attributes:
        node_shift: device d is in node d >> node_shift.
        is_linear: by layer, 1 or 0.
        part_ms: (layer, s), one part.
        slice_ms: by layer, one weight slice between two nodes; 0 for a layer without weights.
        transfer_ms: (layer, the producer's s, s), one transfer into the layer between nodes.
    """

    node_shift: int
    is_linear: Ints
    part_ms: Floats
    slice_ms: Floats
    transfer_ms: Floats


def build_tables(problem: LayerProblem) -> CostTables:
    """Tabulate every choice of every layer."""
    layers, machine = problem.layers, problem.machine
    n_choices = machine.n_devices.bit_length()
    transfer_ms = np.zeros((len(layers), n_choices, n_choices))
    for k, producer in enumerate(layers[:-1]):
        for source, (_, n_features) in enumerate(problem.choices(producer)):
            for target in range(n_choices):
                n_common = machine.batch >> max(source, target)
                n_bytes = ELEMENT_BYTES * n_common * (producer.n_out // n_features)
                transfer_ms[k + 1, source, target] = n_bytes / BETWEEN_BYTES_PER_MS
    n_slices = [machine.n_devices if layer.kind == LINEAR else 1 for layer in layers]
    return CostTables(
        node_shift=machine.devices_per_node.bit_length() - 1,
        is_linear=np.array([layer.kind == LINEAR for layer in layers], dtype=np.int64),
        part_ms=np.array([[problem.part_ms(x, *c) for c in problem.choices(x)] for x in layers]),
        slice_ms=np.array(
            [
                ELEMENT_BYTES * layer.n_weights / n / BETWEEN_BYTES_PER_MS
                if layer.kind in (CONV, LINEAR)
                else 0.0
                for layer, n in zip(layers, n_slices, strict=True)
            ]
        ),
        transfer_ms=transfer_ms,
    )


def encode(plan: Plan, n_devices: int) -> Ints:
    """The plan as an array."""
    encoded = np.zeros((len(plan), n_devices + 1), dtype=np.int64)
    for index, cut in enumerate(plan):
        encoded[index, : len(cut.devices)] = cut.devices
        encoded[index, -1] = cut.n_samples.bit_length() - 1
    return encoded


def decode(tables: CostTables, encoded: Ints) -> Plan:
    """The plan that an array holds."""
    cuts = []
    for layer, row in enumerate(encoded.tolist()):
        n_samples = 1 << row[-1]
        n_features = (len(row) - 1) // n_samples if tables.is_linear[layer] else 1
        cuts.append(LayerCut(n_samples, n_features, tuple(row[: n_samples * n_features])))
    return tuple(cuts)


def step_ms(problem: LayerProblem, plan: Plan) -> float:
    """Predicted milliseconds of a training step: the last task, then all synchronisation."""
    encoded = encode(plan, problem.machine.n_devices)
    return float(simulate(build_tables(problem), encoded, np.inf))


@compiled
def count_parts(tables: CostTables, plan: Ints, layer: int) -> int:
    """Parts of a layer."""
    if tables.is_linear[layer]:
        return int(plan.shape[1] - 1)
    return int(1 << plan[layer, -1])


@compiled
def simulate(tables: CostTables, plan: Ints, limit_ms: float) -> float:
    """The step in ms; infinite when surely above the limit."""
    n_layers = plan.shape[0]
    sync_ms, squared = 0.0, 0
    tail_ms = np.zeros(n_layers + 1)  # one part of the layer and of each later one
    for layer in range(n_layers - 1, -1, -1):
        own_ms, own_squared = _synchronise(tables, plan, layer)
        sync_ms += own_ms
        squared += own_squared
        tail_ms[layer] = tail_ms[layer + 1] + tables.part_ms[layer, plan[layer, -1]]
    limit_ms += ROUNDING_MS - sync_ms + GIVE_BACK_MS * squared
    if tail_ms[0] > limit_ms:
        return np.inf
    return _run_events(tables, plan, limit_ms, tail_ms) + sync_ms - GIVE_BACK_MS * squared


@compiled
def _synchronise(tables: CostTables, plan: Ints, layer: int) -> tuple[float, int]:
    """Ms of summing a layer's gradients, and the squared parts for which it gives time back.

    All slices of a feature block are held by the same devices, so one count serves them all.
    """
    if tables.slice_ms[layer] == 0.0:
        return 0.0, 0
    n_samples, n = 1 << plan[layer, -1], plan.shape[1] - 1
    n_features = count_parts(tables, plan, layer) // n_samples
    transfers, squared = 0.0, 0
    for block in range(n_features):
        on_device, on_node = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        n_nodes, most = 0, 0
        for i in range(n_samples):
            device = plan[layer, i * n_features + block]
            node = device >> tables.node_shift
            if on_device[device] == 0:
                n_nodes += on_node[node] == 0
                on_node[node] += 1
                most = max(most, on_node[node])
            squared += 2 * on_device[device] + 1  # (n + 1)^2 - n^2
            on_device[device] += 1
        transfers += (most - 1) * INSIDE_RATIO + (n_nodes - 1)
    n_slices = n_samples if tables.is_linear[layer] else 1
    return tables.slice_ms[layer] * transfers * n_slices, squared * n_slices * tables.is_linear[
        layer
    ]


@compiled
def _group_of(tables: CostTables, plan: Ints, layer: int, part: int, other: int) -> tuple[int, int]:
    """First part of the layer `other`, before or after, that shares samples with a part; how many.

    Cuts are powers of two, so both layers fall into groups of consecutive parts, in which every
    producer sends an equally large block to every consumer.
    """
    n_groups = 1 << min(plan[layer, -1], plan[other, -1])
    n_others = count_parts(tables, plan, other) // n_groups
    return part * n_groups // count_parts(tables, plan, layer) * n_others, n_others


@compiled
def _transfer_ms(tables: CostTables, plan: Ints, layer: int, source: int, to: int) -> float:
    """From a part to a part of `layer`; 0 on one device."""
    a, b = plan[layer - 1, source], plan[layer, to]
    if a == b:
        return 0.0
    between_ms = tables.transfer_ms[layer, plan[layer - 1, -1], plan[layer, -1]]
    is_inside = a >> tables.node_shift == b >> tables.node_shift
    return float(between_ms * INSIDE_RATIO if is_inside else between_ms)


@compiled
def _run_events(tables: CostTables, plan: Ints, limit_ms: float, tail_ms: Floats) -> float:
    """When the last part ends; infinite when surely above the limit.

    A task is numbered so that numbers settle ties: by layer, parts before transfers into the
    layer, then consumer, then producer.
    """
    n_layers, n = plan.shape[0], plan.shape[1] - 1
    stride = n * (1 + n)
    free_ms, channel_free_ms = np.zeros(n), np.zeros((n, n))
    ready_ms, n_waits = np.zeros((n_layers, n)), np.zeros((n_layers, n), dtype=np.int64)
    keys, tasks, size = np.zeros(n_layers * stride), np.zeros(n_layers * stride, np.int64), 0
    for part in range(count_parts(tables, plan, 0)):
        push(keys, tasks, size, 0.0, part)
        size += 1
    end_ms = 0.0
    while size > 0:
        now_ms = keys[0]
        task = pop(keys, tasks, size)
        size -= 1
        layer, place = task // stride, task % stride
        if place < n:  # a part
            device = plan[layer, place]
            end_of_part_ms = max(free_ms[device], now_ms) + tables.part_ms[layer, plan[layer, -1]]
            free_ms[device] = end_of_part_ms
            end_ms = max(end_ms, end_of_part_ms)
            if end_of_part_ms + tail_ms[layer + 1] > limit_ms:
                return np.inf
            if layer + 1 == n_layers:
                continue
            layer, source = layer + 1, place
            first, n_targets = _group_of(tables, plan, layer - 1, source, layer)
            last = first + n_targets
            for to in range(first, last):
                if plan[layer, to] != device:
                    push(keys, tasks, size, end_of_part_ms, layer * stride + n + to * n + source)
                    size += 1
            arrival_ms = end_of_part_ms
        else:  # a transfer into the layer
            first, source = (place - n) // n, (place - n) % n
            last, device = first + 1, plan[layer, first]
            arrival_ms = max(channel_free_ms[source, first], now_ms)
            arrival_ms += _transfer_ms(tables, plan, layer, source, first)
            channel_free_ms[source, first] = arrival_ms
        for to in range(first, last):  # arrived
            if plan[layer, to] == device:
                ready_ms[layer, to] = max(ready_ms[layer, to], arrival_ms)
                n_waits[layer, to] += 1
                if n_waits[layer, to] == _group_of(tables, plan, layer, to, layer - 1)[1]:
                    push(keys, tasks, size, ready_ms[layer, to], layer * stride + to)
                    size += 1
    return end_ms
