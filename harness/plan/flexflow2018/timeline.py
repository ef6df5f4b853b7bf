"""Simulate a plan, exactly, in the cheapest of three ways that is valid for it.

1. Layer by layer, going on from the first layer that changed. Valid while every device meets its
   parts in the order of the layers and no transfer waits for a channel; both are checked.
2. By events over the parts, in order of readiness. Valid while no transfer waits; checked.
3. By events over the parts and every single transfer. Always valid.

Devices and channels serve by (ready, layer, part), so that there is one right timeline, and each
way finds it or says that it cannot.
"""

from __future__ import annotations

from harness.plan.flexflow2018.compiled import compiled
from harness.plan.flexflow2018.model import GIVE_BACK_MS
from harness.plan.flexflow2018.tables import Floats, Scratch, State, Tables
from harness.plan.flexflow2018.transfers import arrive, count_groups, count_parts, synchronise

BY_LAYERS, BY_PARTS, BY_TRANSFERS = 0, 1, 2


@compiled
def simulate_fully(tables: Tables, state: State, scratch: Scratch) -> tuple[float, int, int]:
    """Cost a plan from nothing. See `simulate_from`."""
    for layer in range(tables.n_layers):
        synchronise(tables, state, scratch, layer)
    for device in range(tables.n_devices):
        state.free_ms[0, device] = 0.0
        state.last_ready_ms[0, device] = 0.0
        state.channel_ms[0, device] = 0.0
    return simulate_from(tables, state, scratch, 0, tables.n_layers)


@compiled
def simulate_from(
    tables: Tables, state: State, scratch: Scratch, first: int, n_valid: int
) -> tuple[float, int, int]:
    """Cost a plan whose layers before `first` are as they were simulated last.

    Args:
        first: first layer whose plan changed; its synchronisation must be up to date.
        n_valid: layers that way 1 got through last time.

    Returns:
        The step in ms, the way taken, and n_valid for the next call.
    """
    way, finish_ms = BY_LAYERS, state.finish_ms
    if first <= n_valid:
        n_valid = _run_layers(tables, state, scratch, first)
    if n_valid < tables.n_layers:
        way, finish_ms = BY_PARTS, scratch.event_finish_ms
        if not _run_parts(tables, state, scratch):
            way = BY_TRANSFERS
            _run_transfers(tables, state, scratch)
    return _add_up(tables, state, finish_ms), way, n_valid


@compiled
def _add_up(tables: Tables, state: State, finish_ms: Floats) -> float:
    makespan_ms, transfer_ms, squared = 0.0, 0.0, 0
    for layer in range(tables.n_layers):
        transfer_ms += state.transfer_ms[layer]
        squared += state.squared_parts[layer]
    for layer in range(tables.n_layers):
        for part in range(count_parts(tables, state, layer)):
            makespan_ms = max(makespan_ms, finish_ms[layer, part])
    return makespan_ms + transfer_ms - GIVE_BACK_MS * squared


@compiled
def _run_layers(tables: Tables, state: State, scratch: Scratch, first: int) -> int:
    """Way 1. Returns how many layers it got through."""
    for layer in range(first, tables.n_layers):
        for device in range(tables.n_devices):
            state.channel_ms[layer + 1, device] = state.channel_ms[layer, device]
        if layer == 0:
            for part in range(count_parts(tables, state, 0)):
                scratch.ready_ms[0, part] = 0.0
        else:
            for group in range(count_groups(state, layer)):
                arrive(tables, state, scratch, state.finish_ms, layer, group)
            for part in range(count_parts(tables, state, layer - 1)):
                longest_ms = scratch.longest_ms[layer - 1, part]
                if longest_ms > 0.0:
                    finish_ms = state.finish_ms[layer - 1, part]
                    if finish_ms < state.channel_ms[layer, part]:
                        return layer
                    state.channel_ms[layer + 1, part] = finish_ms + longest_ms
        if not _serve(tables, state, scratch, layer):
            return layer
    return tables.n_layers


@compiled
def _serve(tables: Tables, state: State, scratch: Scratch, layer: int) -> bool:
    """Run one layer's parts on their devices; False where one overtakes an earlier layer's."""
    n_parts = count_parts(tables, state, layer)
    if _serve_in_order(tables, state, scratch, layer, n_parts, False):
        return True
    for k in range(n_parts):  # insertion sort, stable: ties stay in order of the part
        part, at = k, k
        while at > 0 and scratch.ready_ms[layer, scratch.order[at - 1]] > scratch.ready_ms[layer, part]:
            scratch.order[at] = scratch.order[at - 1]
            at -= 1
        scratch.order[at] = part
    return _serve_in_order(tables, state, scratch, layer, n_parts, True)


@compiled
def _serve_in_order(
    tables: Tables, state: State, scratch: Scratch, layer: int, n_parts: int, ordered: bool
) -> bool:
    for device in range(tables.n_devices):
        state.free_ms[layer + 1, device] = state.free_ms[layer, device]
        state.last_ready_ms[layer + 1, device] = state.last_ready_ms[layer, device]
    duration_ms = tables.part_ms[layer, state.s[layer]]
    for k in range(n_parts):
        part = scratch.order[k] if ordered else k
        device, ready_ms = state.devices[layer, part], scratch.ready_ms[layer, part]
        if ready_ms < state.last_ready_ms[layer + 1, device]:
            return False
        state.last_ready_ms[layer + 1, device] = ready_ms
        finish_ms = max(state.free_ms[layer + 1, device], ready_ms) + duration_ms
        state.finish_ms[layer, part] = finish_ms
        state.free_ms[layer + 1, device] = finish_ms
    return True


@compiled
def _run_parts(tables: Tables, state: State, scratch: Scratch) -> bool:
    """Way 2. False where a transfer may have to wait for its channel."""
    stride = tables.n_devices * (1 + tables.n_devices)
    for layer in range(1, tables.n_layers):
        n_groups = count_groups(state, layer)
        n_sources = count_parts(tables, state, layer - 1) // n_groups
        for group in range(n_groups):
            scratch.n_waits[layer, group] = n_sources
    _start(tables, state, scratch)
    while scratch.heap_size[0] > 0:
        ready_ms, task = scratch.heap_ms[0], scratch.heap_id[0]
        _pop(scratch)
        layer, part = task // stride, task % stride
        _serve_part(tables, state, scratch, layer, part, ready_ms)
        if layer + 1 == tables.n_layers:
            continue
        n_groups = count_groups(state, layer + 1)
        group = part * n_groups // count_parts(tables, state, layer)
        scratch.n_waits[layer + 1, group] -= 1
        if scratch.n_waits[layer + 1, group] == 0:
            arrive(tables, state, scratch, scratch.event_finish_ms, layer + 1, group)
            n_targets = count_parts(tables, state, layer + 1) // n_groups
            for to in range(group * n_targets, (group + 1) * n_targets):
                _push(scratch, scratch.ready_ms[layer + 1, to], (layer + 1) * stride + to)
    return _channels_are_free(tables, state, scratch)


@compiled
def _channels_are_free(tables: Tables, state: State, scratch: Scratch) -> bool:
    for part in range(tables.n_devices):
        free_ms = 0.0
        for layer in range(tables.n_layers - 1):
            if part < count_parts(tables, state, layer) and scratch.longest_ms[layer, part] > 0.0:
                finish_ms = scratch.event_finish_ms[layer, part]
                if finish_ms < free_ms:
                    return False
                free_ms = finish_ms + scratch.longest_ms[layer, part]
    return True


@compiled
def _run_transfers(tables: Tables, state: State, scratch: Scratch) -> None:
    """Way 3. Task ids order ties: by layer, parts before transfers, then consumer, producer."""
    n = tables.n_devices
    stride = n * (1 + n)
    for layer in range(1, tables.n_layers):
        n_sources = count_parts(tables, state, layer - 1) // count_groups(state, layer)
        for part in range(count_parts(tables, state, layer)):
            scratch.n_waits[layer, part] = n_sources
            scratch.ready_ms[layer, part] = 0.0
    for i in range(n):
        for j in range(n):
            scratch.channel_free_ms[i, j] = 0.0
    _start(tables, state, scratch)
    while scratch.heap_size[0] > 0:
        ready_ms, task = scratch.heap_ms[0], scratch.heap_id[0]
        _pop(scratch)
        layer, place = task // stride, task % stride
        if place < n:
            _serve_part(tables, state, scratch, layer, place, ready_ms)
            if layer + 1 < tables.n_layers:
                _send(tables, state, scratch, layer + 1, place, stride)
            continue
        to, source = (place - n) // n, (place - n) % n
        between_ms = tables.between_ms[layer, state.s[layer - 1], state.s[layer]]
        a, b = state.devices[layer - 1, source], state.devices[layer, to]
        same_node = tables.node[a] == tables.node[b]
        start_ms = max(scratch.channel_free_ms[source, to], ready_ms)
        arrival_ms = start_ms + between_ms * (tables.inside_ratio if same_node else 1.0)
        scratch.channel_free_ms[source, to] = arrival_ms
        _deliver(scratch, layer, to, arrival_ms, stride)


@compiled
def _send(
    tables: Tables, state: State, scratch: Scratch, layer: int, source: int, stride: int
) -> None:
    """Queue the finished part's transfers into `layer`; on its own device it delivers at once."""
    n, finish_ms = tables.n_devices, scratch.event_finish_ms[layer - 1, source]
    n_groups = count_groups(state, layer)
    group = source * n_groups // count_parts(tables, state, layer - 1)
    n_targets = count_parts(tables, state, layer) // n_groups
    for to in range(group * n_targets, (group + 1) * n_targets):
        if state.devices[layer - 1, source] == state.devices[layer, to]:
            _deliver(scratch, layer, to, finish_ms, stride)
        else:
            _push(scratch, finish_ms, layer * stride + n + to * n + source)


@compiled
def _deliver(scratch: Scratch, layer: int, to: int, arrival_ms: float, stride: int) -> None:
    scratch.ready_ms[layer, to] = max(scratch.ready_ms[layer, to], arrival_ms)
    scratch.n_waits[layer, to] -= 1
    if scratch.n_waits[layer, to] == 0:
        _push(scratch, scratch.ready_ms[layer, to], layer * stride + to)


@compiled
def _start(tables: Tables, state: State, scratch: Scratch) -> None:
    for device in range(tables.n_devices):
        state.free_ms[tables.n_layers, device] = 0.0
    scratch.heap_size[0] = 0
    for part in range(count_parts(tables, state, 0)):
        _push(scratch, 0.0, part)


@compiled
def _serve_part(
    tables: Tables, state: State, scratch: Scratch, layer: int, part: int, ready_ms: float
) -> None:
    device = state.devices[layer, part]
    start_ms = max(state.free_ms[tables.n_layers, device], ready_ms)
    scratch.event_finish_ms[layer, part] = start_ms + tables.part_ms[layer, state.s[layer]]
    state.free_ms[tables.n_layers, device] = scratch.event_finish_ms[layer, part]


@compiled
def _push(scratch: Scratch, ready_ms: float, task: int) -> None:
    at = scratch.heap_size[0]
    scratch.heap_size[0] += 1
    while at > 0:
        up = (at - 1) // 2
        if scratch.heap_ms[up] < ready_ms or (
            scratch.heap_ms[up] == ready_ms and scratch.heap_id[up] < task
        ):
            break
        scratch.heap_ms[at], scratch.heap_id[at] = scratch.heap_ms[up], scratch.heap_id[up]
        at = up
    scratch.heap_ms[at], scratch.heap_id[at] = ready_ms, task


@compiled
def _pop(scratch: Scratch) -> None:
    """Drop the earliest task."""
    scratch.heap_size[0] -= 1
    size = scratch.heap_size[0]
    ready_ms, task, at = scratch.heap_ms[size], scratch.heap_id[size], 0
    while 2 * at + 1 < size:
        down = 2 * at + 1
        if down + 1 < size and (
            scratch.heap_ms[down + 1] < scratch.heap_ms[down]
            or (
                scratch.heap_ms[down + 1] == scratch.heap_ms[down]
                and scratch.heap_id[down + 1] < scratch.heap_id[down]
            )
        ):
            down += 1
        if ready_ms < scratch.heap_ms[down] or (
            ready_ms == scratch.heap_ms[down] and task < scratch.heap_id[down]
        ):
            break
        scratch.heap_ms[at], scratch.heap_id[at] = scratch.heap_ms[down], scratch.heap_id[down]
        at = down
    scratch.heap_ms[at], scratch.heap_id[at] = ready_ms, task
