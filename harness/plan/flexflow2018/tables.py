"""The cost model as arrays, and the arrays that a simulation works in; what the kernels read."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.plan.flexflow2018.model import (
    BETWEEN_BYTES_PER_MS,
    CONV,
    ELEMENT_BYTES,
    INSIDE_BYTES_PER_MS,
    LINEAR,
    Cut,
    Plan,
    Problem,
)

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


class Tables(NamedTuple):
    """Costs of a problem. A layer's cut is named by s, the base 2 logarithm of its sample blocks.

    Attributes:
        n_feature_blocks: (layer, s).
        part_ms: (layer, s), duration of one part.
        between_ms: (layer, s of the producer, s of the consumer), one transfer into the layer
            between nodes.
        inside_ratio: a transfer inside a node takes this share of `between_ms`.
        slice_ms: (layer,), one weight slice between two nodes; 0 without weights.
        is_linear: (layer,), 1 for a linear layer.
        node: (device,), its node.
    """

    n_layers: int
    n_devices: int
    n_nodes: int
    n_feature_blocks: Ints
    part_ms: Floats
    between_ms: Floats
    inside_ratio: float
    slice_ms: Floats
    is_linear: Ints
    node: Ints


class State(NamedTuple):
    """A plan and its timeline. Rows are layers; row l of `free_ms`, `last_ready_ms` and
    `channel_ms` is what layer l finds, so that simulation can go on from any layer.

    Attributes:
        s: (layer,), the cut of each layer.
        devices: (layer, part).
        finish_ms: (layer, part), as found layer by layer.
        free_ms: (layer + 1, device), when the device has done all earlier layers' parts.
        last_ready_ms: (layer + 1, device), when the last of those became ready.
        channel_ms: (layer + 1, part), when every channel out of that part index is surely free.
        transfer_ms: (layer,), synchronisation of the layer's weights.
        squared_parts: (layer,), what the layer's synchronisation gives back, in units.
    """

    s: Ints
    devices: Ints
    finish_ms: Floats
    free_ms: Floats
    last_ready_ms: Floats
    channel_ms: Floats
    transfer_ms: Floats
    squared_parts: Ints


class Scratch(NamedTuple):
    """Work space of one simulation; contents mean nothing between calls.

    Attributes:
        ready_ms: (layer, part).
        longest_ms: (layer, part), its longest transfer into the next layer.
        event_finish_ms: (layer, part), from a simulation by events.
        order: (part,), parts in order of readiness.
        n_waits: (layer, group), producers that a group of consumers still waits for.
        heap_ms, heap_id: a binary heap of (ready, task).
        heap_size: (1,).
        device_ms, first_ms, second_ms: latest finish per device; per node, of its latest device
            and of its other devices.
        first_device: (node,), the latest device.
        channel_free_ms: (producer part, consumer part).
        n_on_device, n_on_node: parts per device and devices per node that hold a weight slice.
    """

    ready_ms: Floats
    longest_ms: Floats
    event_finish_ms: Floats
    order: Ints
    n_waits: Ints
    heap_ms: Floats
    heap_id: Ints
    heap_size: Ints
    device_ms: Floats
    first_ms: Floats
    second_ms: Floats
    first_device: Ints
    channel_free_ms: Floats
    n_on_device: Ints
    n_on_node: Ints


def build_tables(problem: Problem) -> Tables:
    """Tabulate every choice of every layer."""
    n_devices = problem.machine.n_devices
    n_layers, n_choices = len(problem.layers), n_devices.bit_length()
    features = np.ones((n_layers, n_choices), dtype=np.int64)
    part_ms = np.zeros((n_layers, n_choices))
    between_ms = np.zeros((n_layers, n_choices, n_choices))
    slice_ms = np.zeros(n_layers)
    for index, layer in enumerate(problem.layers):
        for s, (n_samples, n_features) in enumerate(problem.choices(layer)):
            features[index, s] = n_features
            part_ms[index, s] = problem.part_ms(layer, n_samples, n_features)
        if layer.kind in (CONV, LINEAR):
            n_slices = n_devices if layer.kind == LINEAR else 1
            slice_ms[index] = ELEMENT_BYTES * layer.n_weights / n_slices / BETWEEN_BYTES_PER_MS
        for source in range(n_choices if index else 0):
            n_features = problem.layers[index - 1].n_out // int(features[index - 1, source])
            for target in range(n_choices):
                n_common = problem.machine.batch >> max(source, target)
                n_bytes = ELEMENT_BYTES * n_common * n_features
                between_ms[index, source, target] = n_bytes / BETWEEN_BYTES_PER_MS
    return Tables(
        n_layers=n_layers,
        n_devices=n_devices,
        n_nodes=problem.machine.n_nodes,
        n_feature_blocks=features,
        part_ms=part_ms,
        between_ms=between_ms,
        inside_ratio=BETWEEN_BYTES_PER_MS / INSIDE_BYTES_PER_MS,
        slice_ms=slice_ms,
        is_linear=np.array([layer.kind == LINEAR for layer in problem.layers], dtype=np.int64),
        node=np.array([problem.machine.node(d) for d in range(n_devices)], dtype=np.int64),
    )


def new_state(tables: Tables) -> State:
    """Room for a plan and its timeline."""
    layers, n = tables.n_layers, tables.n_devices
    return State(
        s=np.zeros(layers, dtype=np.int64),
        devices=np.zeros((layers, n), dtype=np.int64),
        finish_ms=np.zeros((layers, n)),
        free_ms=np.zeros((layers + 1, n)),
        last_ready_ms=np.zeros((layers + 1, n)),
        channel_ms=np.zeros((layers + 1, n)),
        transfer_ms=np.zeros(layers),
        squared_parts=np.zeros(layers, dtype=np.int64),
    )


def new_scratch(tables: Tables) -> Scratch:
    """Work space; the heap has room for every part and every transfer of a plan."""
    layers, n = tables.n_layers, tables.n_devices
    n_tasks = layers * (n + n * n)
    return Scratch(
        ready_ms=np.zeros((layers, n)),
        longest_ms=np.zeros((layers, n)),
        event_finish_ms=np.zeros((layers, n)),
        order=np.zeros(n, dtype=np.int64),
        n_waits=np.zeros((layers, n), dtype=np.int64),
        heap_ms=np.zeros(n_tasks),
        heap_id=np.zeros(n_tasks, dtype=np.int64),
        heap_size=np.zeros(1, dtype=np.int64),
        device_ms=np.full(n, -1.0),
        first_ms=np.full(tables.n_nodes, -1.0),
        second_ms=np.full(tables.n_nodes, -1.0),
        first_device=np.full(tables.n_nodes, -1, dtype=np.int64),
        channel_free_ms=np.zeros((n, n)),
        n_on_device=np.zeros(n, dtype=np.int64),
        n_on_node=np.zeros(tables.n_nodes, dtype=np.int64),
    )


def write_plan(tables: Tables, plan: Plan, state: State) -> None:
    """Put a plan into a state; its timeline is not yet simulated."""
    for index, cut in enumerate(plan):
        state.s[index] = cut.n_samples.bit_length() - 1
        state.devices[index, : len(cut.devices)] = cut.devices


def read_plan(tables: Tables, s: Ints, devices: Ints) -> Plan:
    """The plan that a state's arrays hold."""
    cuts = []
    for index in range(tables.n_layers):
        n_samples = 1 << int(s[index])
        n_features = int(tables.n_feature_blocks[index, s[index]])
        held = tuple(int(d) for d in devices[index, : n_samples * n_features])
        cuts.append(Cut(n_samples, n_features, held))
    return tuple(cuts)
