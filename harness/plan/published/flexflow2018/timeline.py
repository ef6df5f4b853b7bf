"""Simulate a plan, exactly, in the cheapest of three ways that is valid for it.

1. Layer by layer, going on from the first layer that changed. Valid while every device meets its
   parts in the order of the layers and no transfer waits for a channel; both are checked.
2. By events over the parts, in order of readiness. Valid while no transfer waits; checked.
3. By events over the parts and every single transfer. Always valid.

Devices and channels serve by (ready, layer, part), so that there is one right timeline, and each
way finds it or says that it cannot.

A caller that would refuse a plan slower than some limit says so. Once a part is known to finish at
t, the step takes at least t, plus one part of each later layer, plus the synchronisation: when that
is above the limit the simulation ends, and the plan is refused as it would have been. Such a
time must be final: what is simulated later must not be able to move it, for better or worse.
"""

from __future__ import annotations

import numpy as np

from harness.plan.published.flexflow2018.compiled import compiled
from harness.plan.published.flexflow2018.events import run_parts, run_transfers
from harness.plan.published.flexflow2018.model import GIVE_BACK_MS
from harness.plan.published.flexflow2018.synchronisation import synchronise
from harness.plan.published.flexflow2018.tables import (
    BASE_FINISH,
    BASE_READY,
    CHANNEL,
    EVENT_FINISH,
    FINISH,
    FREE,
    IS_FINAL,
    LAST_READY,
    LATEST_READY,
    LONGEST,
    ORDER,
    PART,
    READY,
    SYNC_MS,
    SYNC_SQUARED,
    TAIL,
    Events,
    Floats,
    Ints,
    State,
    Tables,
    Work,
)
from harness.plan.published.flexflow2018.transfers import (
    arrive,
    collides,
    count_groups,
    count_parts,
)

BY_LAYERS, BY_PARTS, BY_TRANSFERS, BY_BOUND = 0, 1, 2, 3

ROUNDING_MS = 1e-6  # far above the rounding of a sum of times, far below any difference that counts


@compiled
def simulate_fully(
    tables: Tables, state: State, work: Work, events: Events, base: Floats
) -> tuple[float, int, int]:
    """Cost a plan from nothing. See `simulate_from`."""
    for layer in range(tables.n_layers):
        synchronise(tables, state, work, layer)
    for device in range(tables.n_devices):
        state.times[FREE, 0, device] = 0.0
        state.times[LAST_READY, 0, device] = 0.0
        state.times[CHANNEL, 0, device] = 0.0
    state.times[LATEST_READY, 0, 0] = 0.0
    state.times[IS_FINAL, 0, 0] = 1.0
    return simulate_from(tables, state, work, events, base, 0, tables.n_layers, np.inf)


@compiled
def simulate_from(
    tables: Tables, state: State, work: Work, events: Events, base: Floats,
    first: int, n_valid: int, limit_ms: float,
) -> tuple[float, int, int]:  # fmt: skip
    """Cost a plan whose layers before `first` are as they were simulated last.

    Args:
        base: (plane, layer, part), BASE_READY and BASE_FINISH of the plan as it was.
        first: first layer whose plan changed; its synchronisation must be up to date.
        n_valid: layers that way 1 got through last time.
        limit_ms: the caller refuses what is slower.

    Returns:
        The step in ms (infinity when surely above the limit), the way taken, and n_valid for the
        next call.
    """
    sync_ms, squared = 0.0, 0.0
    work.times[TAIL, tables.n_layers, 0] = 0.0
    for layer in range(tables.n_layers - 1, -1, -1):
        sync_ms += state.times[SYNC_MS, layer, 0]
        squared += state.times[SYNC_SQUARED, layer, 0]
        duration_ms = tables.costs[layer, PART, state.plan[layer, tables.n_devices]]
        work.times[TAIL, layer, 0] = work.times[TAIL, layer + 1, 0] + duration_ms
    limit_ms += ROUNDING_MS - sync_ms + GIVE_BACK_MS * squared
    if work.times[TAIL, 0, 0] > limit_ms:
        return np.inf, BY_BOUND, n_valid

    way, in_time, finish_ms = BY_LAYERS, True, state.times[FINISH]
    if first <= n_valid:
        in_time, n_valid = _run_layers(tables, state, work, first, limit_ms)
    if in_time and n_valid < tables.n_layers:
        way, finish_ms = BY_PARTS, work.times[EVENT_FINISH]
        in_time, is_exact = run_parts(tables, state, work, events, base, first, limit_ms)
        if in_time and not is_exact:
            way = BY_TRANSFERS
            in_time = run_transfers(tables, state, work, events, limit_ms)
    if not in_time:
        return np.inf, BY_BOUND, n_valid
    makespan_ms = _find_end(tables, state.plan, finish_ms)
    return makespan_ms + sync_ms - GIVE_BACK_MS * squared, way, n_valid


@compiled
def _find_end(tables: Tables, plan: Ints, finish_ms: Floats) -> float:
    """When the last task ends: every part feeds one of the last layer."""
    end_ms, last = 0.0, tables.n_layers - 1
    for part in range(count_parts(tables, plan, last)):
        end_ms = max(end_ms, finish_ms[last, part])
    return end_ms


@compiled
def _run_layers(
    tables: Tables, state: State, work: Work, first: int, limit_ms: float
) -> tuple[bool, int]:
    """Way 1. Returns whether the limit can still be met, and how many layers it got through."""
    for layer in range(first, tables.n_layers):
        if layer == 0:
            for part in range(count_parts(tables, state.plan, 0)):
                work.times[READY, 0, part] = 0.0
        else:
            n_groups = count_groups(tables, state.plan, layer)
            arrive(tables, state.plan, work, state.times[FINISH], layer, 0, n_groups)
        if not _hold_channels(tables, state, work, layer):
            return True, layer
        latest_ms = _serve(tables, state, work, layer)
        if latest_ms < 0:
            return True, layer
        latest_ready_ms = _note_finality(tables, state, work, layer)
        tail_ms = work.times[TAIL, layer + 1, 0]
        if latest_ms + tail_ms > limit_ms:
            if state.times[IS_FINAL, layer + 1, 0] == 1.0:
                return False, layer
            duration_ms = tables.costs[layer, PART, state.plan[layer, tables.n_devices]]
            if (
                state.times[IS_FINAL, layer, 0] == 1.0
                and latest_ready_ms + duration_ms + tail_ms > limit_ms
            ):
                return False, layer
    return True, tables.n_layers


@compiled
def _note_finality(tables: Tables, state: State, work: Work, layer: int) -> float:
    """Note whether the layers so far have their final times; returns when this one's are ready.

    Parts of later layers, and transfers to them, become ready when a part of this layer finishes
    at the earliest. Where all parts so far are ready by then, nothing can come before them.
    """
    latest_ready_ms, first_finish_ms = 0.0, np.inf
    for part in range(count_parts(tables, state.plan, layer)):
        latest_ready_ms = max(latest_ready_ms, work.times[READY, layer, part])
        first_finish_ms = min(first_finish_ms, state.times[FINISH, layer, part])
    so_far_ms = max(latest_ready_ms, state.times[LATEST_READY, layer, 0])
    state.times[LATEST_READY, layer + 1, 0] = so_far_ms
    state.times[IS_FINAL, layer + 1, 0] = 1.0 if so_far_ms <= first_finish_ms else 0.0
    return latest_ready_ms


@compiled
def _hold_channels(tables: Tables, state: State, work: Work, layer: int) -> bool:
    """Note until when the transfers into the layer hold channels; False where one would wait."""
    for k in range(tables.n_devices):
        state.times[CHANNEL, layer + 1, k] = state.times[CHANNEL, layer, k]
    if layer == 0:
        return True
    finish_ms = state.times[FINISH]
    for part in range(count_parts(tables, state.plan, layer - 1)):
        longest_ms = work.times[LONGEST, layer - 1, part]
        if longest_ms == 0.0:
            continue
        free_ms = state.times[CHANNEL, layer, part]
        start_ms = finish_ms[layer - 1, part]
        if start_ms < free_ms and collides(tables, state.plan, finish_ms, layer - 1, part):
            return False
        state.times[CHANNEL, layer + 1, part] = max(free_ms, start_ms + longest_ms)
    return True


@compiled
def _serve(tables: Tables, state: State, work: Work, layer: int) -> float:
    """Run one layer's parts; the latest finish, or -1 where one overtakes an earlier layer's."""
    n_parts = count_parts(tables, state.plan, layer)
    latest_ms = _serve_in_order(tables, state, work, layer, n_parts, False)
    if latest_ms >= 0:
        return latest_ms
    for k in range(n_parts):  # insertion sort, stable: ties stay in order of the part
        ready_ms, at = work.times[READY, layer, k], k
        while at > 0 and work.times[READY, layer, work.counts[ORDER, at - 1]] > ready_ms:
            work.counts[ORDER, at] = work.counts[ORDER, at - 1]
            at -= 1
        work.counts[ORDER, at] = k
    return _serve_in_order(tables, state, work, layer, n_parts, True)


@compiled
def _serve_in_order(
    tables: Tables, state: State, work: Work, layer: int, n_parts: int, ordered: bool
) -> float:
    times = state.times
    for device in range(tables.n_devices):
        times[FREE, layer + 1, device] = times[FREE, layer, device]
        times[LAST_READY, layer + 1, device] = times[LAST_READY, layer, device]
    duration_ms = tables.costs[layer, PART, state.plan[layer, tables.n_devices]]
    latest_ms = 0.0
    for k in range(n_parts):
        part = work.counts[ORDER, k] if ordered else k
        device, ready_ms = state.plan[layer, part], work.times[READY, layer, part]
        if ready_ms < times[LAST_READY, layer + 1, device]:
            return -1.0
        times[LAST_READY, layer + 1, device] = ready_ms
        finish_ms = max(times[FREE, layer + 1, device], ready_ms) + duration_ms
        times[FINISH, layer, part] = finish_ms
        times[FREE, layer + 1, device] = finish_ms
        latest_ms = max(latest_ms, finish_ms)
    return latest_ms


@compiled
def remember(
    tables: Tables, state: State, work: Work, base: Floats, way: int, last_way: int, first: int
) -> None:
    """Make the timeline just simulated the base of the next ones.

    Args:
        way, last_way: the ways in which this and the previous base were found.
        first: first layer that changed between them.
    """
    begin, finish_ms = first, state.times[FINISH]
    if way != BY_LAYERS:
        begin, finish_ms = 0, work.times[EVENT_FINISH]
    elif last_way != BY_LAYERS:
        begin = 0
        for layer in range(1, first):  # way 1 did not look at them again
            n_groups = count_groups(tables, state.plan, layer)
            arrive(tables, state.plan, work, finish_ms, layer, 0, n_groups)
    for layer in range(begin, tables.n_layers):
        for part in range(count_parts(tables, state.plan, layer)):
            base[BASE_READY, layer, part] = work.times[READY, layer, part] if layer > 0 else 0.0
            base[BASE_FINISH, layer, part] = finish_ms[layer, part]
