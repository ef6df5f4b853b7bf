"""Simulation by events, for plans that layer by layer cannot do: ways 2 and 3 of `timeline`.

A task is numbered so that numbers settle ties: by layer, parts before transfers into the next
layer, then consumer, then producer.
"""

from __future__ import annotations

import numpy as np

from harness.plan.published.flexflow2018.compiled import compiled
from harness.plan.published.flexflow2018.tables import (
    BASE_FINISH,
    BASE_READY,
    EVENT_FINISH,
    FREE,
    HEAP_SIZE,
    LONGEST,
    PART,
    READY,
    TAIL,
    WAITS,
    Events,
    Floats,
    State,
    Tables,
    Work,
)
from harness.plan.published.flexflow2018.transfers import (
    arrive,
    channel_ms,
    collides,
    count_groups,
    count_parts,
    transfer_ms,
)


@compiled
def run_parts(
    tables: Tables,
    state: State,
    work: Work,
    events: Events,
    base: Floats,
    first: int,
    limit_ms: float,
) -> tuple[bool, bool]:
    """Way 2. Returns whether the limit can still be met, and whether no transfer had to wait.

    Nothing can differ from the base before a part of layer `first - 1` finishes there, so that
    the parts of earlier layers that became ready before that keep their times.
    """
    stride = tables.n_devices * (1 + tables.n_devices)
    same_until_ms = np.inf if first > 0 else 0.0
    for part in range(count_parts(tables, state.plan, first - 1) if first > 0 else 0):
        same_until_ms = min(same_until_ms, base[BASE_FINISH, first - 1, part])
    _keep(tables, state, work, events, base, first, same_until_ms)
    for layer in range(1, tables.n_layers):
        n_groups = count_groups(tables, state.plan, layer)
        n_sources = count_parts(tables, state.plan, layer - 1) // n_groups
        for group in range(n_groups):
            n_waits = n_sources
            if layer <= first:
                for i in range(group * n_sources, (group + 1) * n_sources):
                    n_waits -= base[BASE_READY, layer - 1, i] < same_until_ms
            work.counts[WAITS + layer, group] = n_waits
            if n_waits == 0:
                kept_ms = same_until_ms if layer < first else 0.0
                _queue_group(tables, state, work, events, base, layer, group, kept_ms)
    while work.counts[HEAP_SIZE, 0] > 0:
        ready_ms, task = events.heap_ms[0], events.heap_task[0]
        _pop(work, events)
        layer, part = task // stride, task % stride
        finish_ms = _serve_part(tables, state, work, layer, part, ready_ms)
        if finish_ms + work.times[TAIL, layer + 1, 0] > limit_ms:
            # without waits these times are final; with waits the order of parts may be another
            is_final = _channels_are_free(tables, state, work)
            return not is_final, is_final
        if layer + 1 < tables.n_layers:
            _finish_part(tables, state, work, events, base, layer + 1, part)
    return True, _channels_are_free(tables, state, work)


@compiled
def _finish_part(
    tables: Tables, state: State, work: Work, events: Events, base: Floats, layer: int, source: int
) -> None:
    """Queue the consumers in `layer` of a group whose last producer this was."""
    n_groups = count_groups(tables, state.plan, layer)
    group = source * n_groups // count_parts(tables, state.plan, layer - 1)
    work.counts[WAITS + layer, group] -= 1
    if work.counts[WAITS + layer, group] > 0:
        return
    _queue_group(tables, state, work, events, base, layer, group, 0.0)


@compiled
def _keep(
    tables: Tables,
    state: State,
    work: Work,
    events: Events,
    base: Floats,
    first: int,
    same_until_ms: float,
) -> None:
    """Take over what happened before `same_until_ms`, and queue the first layer if it did not."""
    for device in range(tables.n_devices):
        state.times[FREE, tables.n_layers, device] = 0.0
    work.counts[HEAP_SIZE, 0] = 0
    for layer in range(tables.n_layers):
        for part in range(count_parts(tables, state.plan, layer)):
            work.times[EVENT_FINISH, layer, part] = np.inf
            if layer < first and base[BASE_READY, layer, part] < same_until_ms:
                finish_ms = base[BASE_FINISH, layer, part]
                device = state.plan[layer, part]
                free_ms = state.times[FREE, tables.n_layers, device]
                work.times[EVENT_FINISH, layer, part] = finish_ms
                state.times[FREE, tables.n_layers, device] = max(free_ms, finish_ms)
    if same_until_ms == 0.0:
        for part in range(count_parts(tables, state.plan, 0)):
            _push(work, events, 0.0, part)


@compiled
def _queue_group(
    tables: Tables,
    state: State,
    work: Work,
    events: Events,
    base: Floats,
    layer: int,
    group: int,
    kept_ms: float,
) -> None:
    """Queue a group of consumers, but those that the base had ready before `kept_ms`."""
    stride = tables.n_devices * (1 + tables.n_devices)
    arrive(tables, state.plan, work, work.times[EVENT_FINISH], layer, group, group + 1)
    n_targets = count_parts(tables, state.plan, layer) // count_groups(tables, state.plan, layer)
    for to in range(group * n_targets, (group + 1) * n_targets):
        if base[BASE_READY, layer, to] >= kept_ms:
            _push(work, events, work.times[READY, layer, to], layer * stride + to)


@compiled
def _channels_are_free(tables: Tables, state: State, work: Work) -> bool:
    """Whether no transfer of the parts that have finished so far waits for another."""
    finish_ms = work.times[EVENT_FINISH]
    for part in range(tables.n_devices):
        free_ms = 0.0
        for layer in range(tables.n_layers - 1):
            if part >= count_parts(tables, state.plan, layer):
                continue
            start_ms = finish_ms[layer, part]
            if start_ms == np.inf:
                continue
            n_groups = count_groups(tables, state.plan, layer + 1)
            group = part * n_groups // count_parts(tables, state.plan, layer)
            longest_ms = work.times[LONGEST, layer, part]
            if work.counts[WAITS + layer + 1, group] > 0:  # not known yet
                longest_ms = transfer_ms(tables, state.plan, layer + 1)
            if longest_ms == 0.0:
                continue
            if start_ms < free_ms and collides(tables, state.plan, finish_ms, layer, part):
                return False
            free_ms = max(free_ms, start_ms + longest_ms)
    return True


@compiled
def run_transfers(
    tables: Tables, state: State, work: Work, events: Events, limit_ms: float
) -> bool:
    """Way 3. Returns whether the limit can still be met."""
    n = tables.n_devices
    stride = n * (1 + n)
    for layer in range(1, tables.n_layers):
        n_groups = count_groups(tables, state.plan, layer)
        n_sources = count_parts(tables, state.plan, layer - 1) // n_groups
        for part in range(count_parts(tables, state.plan, layer)):
            work.counts[WAITS + layer, part] = n_sources
            work.times[READY, layer, part] = 0.0
    for i in range(n):
        for j in range(n):
            events.channel_free_ms[i, j] = 0.0
    _start(tables, state, work, events)
    while work.counts[HEAP_SIZE, 0] > 0:
        ready_ms, task = events.heap_ms[0], events.heap_task[0]
        _pop(work, events)
        layer, place = task // stride, task % stride
        if place < n:
            finish_ms = _serve_part(tables, state, work, layer, place, ready_ms)
            if finish_ms + work.times[TAIL, layer + 1, 0] > limit_ms:
                return False
            if layer + 1 < tables.n_layers:
                _send(tables, state, work, events, layer + 1, place, stride)
            continue
        to, source = (place - n) // n, (place - n) % n
        start_ms = max(events.channel_free_ms[source, to], ready_ms)
        arrival_ms = start_ms + channel_ms(tables, state.plan, layer - 1, source, to)
        events.channel_free_ms[source, to] = arrival_ms
        _deliver(work, events, layer, to, arrival_ms, stride)
    return True


@compiled
def _send(
    tables: Tables, state: State, work: Work, events: Events, layer: int, source: int, stride: int
) -> None:
    """Queue a finished part's transfers into `layer`; on its own device it delivers at once."""
    n, finish_ms = tables.n_devices, work.times[EVENT_FINISH, layer - 1, source]
    n_groups = count_groups(tables, state.plan, layer)
    group = source * n_groups // count_parts(tables, state.plan, layer - 1)
    n_targets = count_parts(tables, state.plan, layer) // n_groups
    for to in range(group * n_targets, (group + 1) * n_targets):
        if state.plan[layer - 1, source] == state.plan[layer, to]:
            _deliver(work, events, layer, to, finish_ms, stride)
        else:
            _push(work, events, finish_ms, layer * stride + n + to * n + source)


@compiled
def _deliver(
    work: Work, events: Events, layer: int, to: int, arrival_ms: float, stride: int
) -> None:
    work.times[READY, layer, to] = max(work.times[READY, layer, to], arrival_ms)
    work.counts[WAITS + layer, to] -= 1
    if work.counts[WAITS + layer, to] == 0:
        _push(work, events, work.times[READY, layer, to], layer * stride + to)


@compiled
def _start(tables: Tables, state: State, work: Work, events: Events) -> None:
    """Free all devices and queue the first layer; the last row of FREE is what events use."""
    for device in range(tables.n_devices):
        state.times[FREE, tables.n_layers, device] = 0.0
    work.counts[HEAP_SIZE, 0] = 0
    for part in range(count_parts(tables, state.plan, 0)):
        _push(work, events, 0.0, part)


@compiled
def _serve_part(
    tables: Tables, state: State, work: Work, layer: int, part: int, ready_ms: float
) -> float:
    device = state.plan[layer, part]
    start_ms = max(state.times[FREE, tables.n_layers, device], ready_ms)
    finish_ms = start_ms + tables.costs[layer, PART, state.plan[layer, tables.n_devices]]
    work.times[EVENT_FINISH, layer, part] = finish_ms
    state.times[FREE, tables.n_layers, device] = finish_ms
    return float(finish_ms)


@compiled
def _comes_first(a_ms: float, a: int, b_ms: float, b: int) -> bool:
    return a_ms < b_ms or (a_ms == b_ms and a < b)


@compiled
def _push(work: Work, events: Events, ready_ms: float, task: int) -> None:
    heap_ms, heap_task = events.heap_ms, events.heap_task
    at = work.counts[HEAP_SIZE, 0]
    work.counts[HEAP_SIZE, 0] += 1
    while at > 0:
        up = (at - 1) // 2
        if _comes_first(heap_ms[up], heap_task[up], ready_ms, task):
            break
        heap_ms[at], heap_task[at] = heap_ms[up], heap_task[up]
        at = up
    heap_ms[at], heap_task[at] = ready_ms, task


@compiled
def _pop(work: Work, events: Events) -> None:
    """Drop the earliest task."""
    heap_ms, heap_task = events.heap_ms, events.heap_task
    work.counts[HEAP_SIZE, 0] -= 1
    size = work.counts[HEAP_SIZE, 0]
    ready_ms, task, at = heap_ms[size], heap_task[size], 0
    while 2 * at + 1 < size:
        down = 2 * at + 1
        if down + 1 < size and _comes_first(
            heap_ms[down + 1], heap_task[down + 1], heap_ms[down], heap_task[down]
        ):
            down += 1
        if _comes_first(ready_ms, task, heap_ms[down], heap_task[down]):
            break
        heap_ms[at], heap_task[at] = heap_ms[down], heap_task[down]
        at = down
    heap_ms[at], heap_task[at] = ready_ms, task
