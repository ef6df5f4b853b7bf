"""The cost model as arrays, and the arrays that a simulation works in; what the kernels read.

Everything is in few, large arrays, with the first index naming the quantity: a compiled function
pays for every array that it is handed, and one that takes thirty spends its time on nothing else.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.plan.published.flexflow2018.model import (
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

# Planes of Tables.costs (layer, plane, s); TRANSFER + the producer's s is one plane each.
PART, SLICE, TRANSFER = 0, 1, 2

# Planes of State.times (plane, layer, device or part).
FINISH, FREE, LAST_READY, CHANNEL, SYNC_MS, SYNC_SQUARED, LATEST_READY, IS_FINAL = range(8)

# Planes of Work.times (plane, layer, device or part).
READY, LONGEST, EVENT_FINISH, TAIL, DEVICE_LATEST, NODE_FIRST, NODE_SECOND = range(7)

# Planes of a base (plane, layer, part): the timeline of the plan that a proposal changes.
BASE_READY, BASE_FINISH = range(2)

# Rows of Work.counts (row, device or part); WAITS + layer is one row each.
ORDER, NODE_FIRST_DEVICE, ON_DEVICE, ON_NODE, HEAP_SIZE, WAITS = range(6)


class Tables(NamedTuple):
    """Costs of a problem. A layer's cut is named by s, the base 2 logarithm of its sample blocks.

    Attributes:
        n_choices: values that s can have.
        node_shift: device d is in node d >> node_shift.
        linear_mask: bit l says that layer l is linear.
        inside_ratio: a transfer inside a node takes this share of one between nodes.
        costs: (layer, plane, s) in ms. PART: one part. SLICE: one weight slice between two nodes,
            at s = 0. TRANSFER + s of the producer: one transfer into the layer between nodes.
    """

    n_layers: int
    n_devices: int
    n_choices: int
    node_shift: int
    linear_mask: int
    inside_ratio: float
    costs: Floats


class State(NamedTuple):
    """A plan and its timeline.

    Attributes:
        plan: (layer, n_devices + 1), each part's device, and s in the last column.
        times: (plane, layer, device or part). FINISH of each part as found layer by layer. Row l
            of FREE, LAST_READY and CHANNEL is what layer l finds, so that a simulation can go on
            from any layer: when the device has done all earlier layers' parts, when the last of
            those became ready, when every channel out of that part index is surely free. SYNC_MS
            and SYNC_SQUARED, at index 0: the layer's synchronisation and what it gives back.
            LATEST_READY, at index 0: of all earlier layers' parts. IS_FINAL, at index 0: 1 when
            no later layer can change the times of the earlier layers.
    """

    plan: Ints
    times: Floats


class Work(NamedTuple):
    """Work space of one simulation; contents mean nothing between calls.

    Attributes:
        times: READY of each part, its LONGEST transfer into the next layer, its EVENT_FINISH in a
            simulation by events; TAIL, at index 0: durations of the layer and those after it;
            DEVICE_LATEST, NODE_FIRST, NODE_SECOND, in row 0: latest finish per device, and per
            node of its latest device and of its other devices.
        counts: ORDER of parts by readiness, NODE_FIRST_DEVICE, parts ON_DEVICE and devices ON_NODE
            that hold a slice, HEAP_SIZE at index 0, producers that a group or part WAITS for.
    """

    times: Floats
    counts: Ints


class Events(NamedTuple):
    """A binary heap of (ready, task), and when each (producer part, consumer part) is free."""

    heap_ms: Floats
    heap_task: Ints
    channel_free_ms: Floats


def build_tables(problem: Problem) -> Tables:
    """Tabulate every choice of every layer."""
    n_devices = problem.machine.n_devices
    n_layers, n_choices = len(problem.layers), n_devices.bit_length()
    costs = np.zeros((n_layers, TRANSFER + n_choices, n_choices))
    linear_mask = 0
    for index, layer in enumerate(problem.layers):
        for s, choice in enumerate(problem.choices(layer)):
            costs[index, PART, s] = problem.part_ms(layer, *choice)
        if layer.kind in (CONV, LINEAR):
            n_slices = n_devices if layer.kind == LINEAR else 1
            costs[index, SLICE, 0] = (
                ELEMENT_BYTES * layer.n_weights / n_slices / BETWEEN_BYTES_PER_MS
            )
        linear_mask |= (layer.kind == LINEAR) << index
        if index > 0:
            costs[index, TRANSFER:] = _transfers_ms(problem, index)
    return Tables(
        n_layers=n_layers,
        n_devices=n_devices,
        n_choices=n_choices,
        node_shift=problem.machine.devices_per_node.bit_length() - 1,
        linear_mask=linear_mask,
        inside_ratio=BETWEEN_BYTES_PER_MS / INSIDE_BYTES_PER_MS,
        costs=costs,
    )


def _transfers_ms(problem: Problem, index: int) -> Floats:
    """(producer's s, consumer's s): one transfer into the layer, between nodes."""
    producer = problem.layers[index - 1]
    choices = problem.choices(producer)
    transfers_ms = np.zeros((len(choices), len(choices)))
    for source, (_, n_features) in enumerate(choices):
        for target in range(len(choices)):
            n_common = problem.machine.batch >> max(source, target)
            n_bytes = ELEMENT_BYTES * n_common * (producer.n_out // n_features)
            transfers_ms[source, target] = n_bytes / BETWEEN_BYTES_PER_MS
    return transfers_ms


def new_state(tables: Tables) -> State:
    """Room for a plan and its timeline."""
    layers, n = tables.n_layers, tables.n_devices
    return State(plan=np.zeros((layers, n + 1), dtype=np.int64), times=np.zeros((8, layers + 1, n)))


def new_work(tables: Tables) -> Work:
    """Work space, with the maxima empty."""
    layers, n = tables.n_layers, tables.n_devices
    work = Work(np.zeros((7, layers + 1, n)), np.zeros((WAITS + layers, n), dtype=np.int64))
    work.times[DEVICE_LATEST:, 0] = -1.0
    work.counts[NODE_FIRST_DEVICE] = -1
    return work


def new_events(tables: Tables) -> Events:
    """Room for every part and every transfer of a plan."""
    n = tables.n_devices
    n_tasks = tables.n_layers * (n + n * n)
    return Events(np.zeros(n_tasks), np.zeros(n_tasks, dtype=np.int64), np.zeros((n, n)))


def new_base(tables: Tables) -> Floats:
    """An empty base: the simulation starts from nothing."""
    return np.zeros((2, tables.n_layers, tables.n_devices))


def encode(tables: Tables, plan: Plan) -> Ints:
    """The plan as `State.plan` holds it."""
    encoded = np.zeros((tables.n_layers, tables.n_devices + 1), dtype=np.int64)
    for index, cut in enumerate(plan):
        encoded[index, : len(cut.devices)] = cut.devices
        encoded[index, -1] = cut.n_samples.bit_length() - 1
    return encoded


def decode(tables: Tables, encoded: Ints) -> Plan:
    """The plan that an array holds."""
    cuts = []
    for index in range(tables.n_layers):
        s = int(encoded[index, -1])
        n_features = tables.n_devices >> s if tables.linear_mask >> index & 1 else 1
        held = tuple(int(d) for d in encoded[index, : (1 << s) * n_features])
        cuts.append(Cut(1 << s, n_features, held))
    return tuple(cuts)
