"""The event loop, compiled. Import this module lazily: it imports numba.

A device runs its tasks in the fixed order of its schedule. Dependencies on other devices are only
through transfers and all-reduces, which are served in the order in which they become ready (ties:
lower number first). Each occupies all its resources when the last of them is free.

If communication has overhead (`host_s_per_byte`), events run in order of time. A transfer loads the
processors of both its ends evenly during its duration, and computing on these devices gets the rest
of the processor.
"""

from typing import Any

import numpy as np

from harness.plan.compiled import compiled, inlined, pop, push
from harness.plan.simulate.passes import BACKWARD, FORWARD, NONE
from harness.plan.simulate.work import freed_by_sum, offsets, reduce_of


@inlined
def loaded_end(seconds: float, now: float, load: float, until: float) -> Any:
    """End of a computation on a loaded processor, and the load that remains then.

    Communication takes `load` seconds of the processor, evenly until `until`. The computation gets
    the rest of the time; if there is none, it waits until the load is worked off.
    """
    window = until - now
    if load < window and seconds <= window - load:
        end = now + seconds / (1.0 - load / window)
        return end, max(0.0, load - load / window * (end - now))
    return now + seconds + load, 0.0


@inlined
def remaining_load(load: float, since: float, until: float, now: float) -> float:
    """Load that remains on a processor that has not computed since `since`."""
    window, passed = until - since, now - since
    rate = min(1.0, load / window) if window > 0 else 1.0
    return max(0.0, load - rate * passed)


@compiled
def load_hosts(
    work: Any, begins: Any, task: int, now: float, end: float, running: Any, end_of: Any, load: Any,
    load_since: Any, load_until: Any,
) -> None:  # fmt: skip
    """Load the processors of a transfer's ends evenly during its duration."""
    compute, back, sums = begins[0], begins[1], begins[2]
    if task < sums:
        e = (task - (back if task >= back else compute)) % len(work.edge_bytes)
        devices = np.array(
            [work.device_of[work.edge_source[e]], work.device_of[work.edge_target[e]]]
        )
        costs = work.edge_bytes[e] * work.host_s_per_byte
    else:
        price = reduce_of(work, begins, task)[0]
        devices = work.group[work.group_ptr[price] : work.group_ptr[price + 1]]
        costs = work.reduce_host_bytes[price] * work.host_s_per_byte
    for device in devices:
        added = costs[device]
        if running[device] != NONE:
            rest = end_of[device] - now
            end_of[device], added = loaded_end(rest, now, added, end)
            load_since[device] = end_of[device]
        else:
            load[device] = remaining_load(load[device], load_since[device], load_until[device], now)
            load_since[device] = now
        load[device] += added
        load_until[device] = max(load_until[device], end)


@inlined
def _notify(
    waits: Any, ready: Any, cause: Any, freed: Any, n_freed: int, after: int, end: float, by: int
) -> int:
    """Note that one dependency of a task is done; free the task if it was the last.

    Returns:
        The number of freed tasks.
    """
    waits[after] -= 1
    # Ties go to the lower number, independent of the order of notification.
    is_first = cause[after] == NONE or by < cause[after]
    if end > ready[after] or (end == ready[after] and is_first):
        ready[after] = end
        cause[after] = by
    if waits[after] == 0:
        freed[n_freed] = after
        n_freed += 1
    return n_freed


@inlined
def _release(
    work: Any, links: Any, begins: Any, task: int, end: float, waits: Any, ready: Any, cause: Any,
    freed: Any,
) -> int:  # fmt: skip
    """Notify all tasks that wait for a compute task; put those that may start into `freed`."""
    compute, back, sums, sums_back, buckets, _ = begins
    rows, n_edges, n_sums = len(work.device_of), len(work.edge_bytes), len(work.sum_is_collective)
    pass_, rest = divmod(task, work.n_microbatches * rows)
    m, row = divmod(rest, rows)
    n = 0
    if work.following[task] != NONE:
        n = _notify(waits, ready, cause, freed, n, work.following[task], end, task)
    if pass_ == FORWARD:
        for k in range(links.out_ptr[row], links.out_ptr[row + 1]):
            if work.edge_goes[links.out_edges[k]]:
                after = compute + m * n_edges + links.out_edges[k]
                n = _notify(waits, ready, cause, freed, n, after, end, task)
        for k in range(links.source_ptr[row], links.source_ptr[row + 1]):
            if work.sum_goes[links.source_sums[k]]:
                after = sums + m * n_sums + links.source_sums[k]
                n = _notify(waits, ready, cause, freed, n, after, end, task)
    elif pass_ == BACKWARD:
        for k in range(links.in_ptr[row], links.in_ptr[row + 1]):
            if work.edge_returns[links.in_edges[k]]:
                after = back + m * n_edges + links.in_edges[k]
                n = _notify(waits, ready, cause, freed, n, after, end, task)
        for k in range(links.source_ptr[row], links.source_ptr[row + 1]):
            c = links.source_sums[k]
            if work.sum_is_collective[c] and work.sum_returns[c]:
                n = _notify(waits, ready, cause, freed, n, sums_back + m * n_sums + c, end, task)
        for k in range(links.target_ptr[row], links.target_ptr[row + 1]):
            c = links.target_sums[k]
            if work.sum_returns[c]:
                n = _notify(waits, ready, cause, freed, n, sums_back + m * n_sums + c, end, task)
    move = links.gate_head[task]
    while move != NONE:
        n = _notify(waits, ready, cause, freed, n, compute + move, end, task)
        move = links.gate_next[move]
    t = links.trigger_head[task]
    while t != NONE:
        n = _notify(waits, ready, cause, freed, n, buckets + work.trigger_bucket[t], end, task)
        t = links.trigger_next[t]
    return n


@compiled
def _occupy(
    resource: int, until: float, task: int, free: Any, busy: Any, holder: Any, seconds: float
) -> None:
    free[resource], holder[resource] = until, task
    busy[resource] += seconds


@inlined
def _serve_move(
    work: Any, task: int, e: int, is_back: bool, begin: float, free: Any, busy: Any, holder: Any,
    cause: Any,
) -> Any:  # fmt: skip
    """Start and end of a transfer that is ready at `begin`."""
    n_devices = len(work.node_of)
    a, b = work.device_of[work.edge_source[e]], work.device_of[work.edge_target[e]]
    if is_back:
        a, b = b, a
    n_bytes = work.edge_bytes[e]
    link = a * n_devices + b
    source, target = work.node_of[a], work.node_of[b]
    out = n_devices * n_devices + source
    into = n_devices * n_devices + len(work.nic) + target
    ready, slowest = begin, work.bandwidth[a, b]
    if free[link] > begin:
        begin, cause[task] = free[link], holder[link]
    if source != target:
        for resource, rate in ((out, work.nic[source]), (into, work.nic[target])):
            slowest = min(slowest, rate)
            if free[resource] > begin:
                begin, cause[task] = free[resource], holder[resource]
            # Flows share an interface, so it serves its queue without waiting for other resources.
            until = max(ready, free[resource]) + n_bytes / rate
            _occupy(resource, until, task, free, busy, holder, n_bytes / rate)
    seconds = n_bytes / work.bandwidth[a, b]
    _occupy(link, begin + seconds, task, free, busy, holder, seconds)
    return begin, begin + work.latency[a, b] + n_bytes / slowest


@inlined
def _serve_reduce(
    work: Any, task: int, price: int, begin: float, free: Any, busy: Any, holder: Any, cause: Any
) -> Any:
    """Start and end of an all-reduce that is ready at `begin`."""
    low, high = work.reduce_ptr[price], work.reduce_ptr[price + 1]
    for p in range(low, high):
        resource = work.reduce_resource[p]
        if free[resource] > begin:
            begin, cause[task] = free[resource], holder[resource]
    for p in range(low, high):
        seconds = work.reduce_occupied[p]
        if seconds > 0:
            resource = work.reduce_resource[p]
            _occupy(resource, begin + seconds, task, free, busy, holder, seconds)
    return begin, begin + work.reduce_seconds[price]


@compiled
def _set_begin(work: Any, begins: Any, device_begin: Any, ready: Any) -> None:
    """Let each device's first task, and transfers to it and its gathers, start no earlier than the
    device."""
    compute, back, sums = begins[0], begins[1], begins[2]
    for device in range(len(device_begin)):
        if work.first[device] != NONE:
            ready[work.first[device]] = device_begin[device]
    for task in range(begins[4], begins[5]):
        price = 2 * len(work.sum_is_collective) + task - begins[4]
        for k in range(work.group_ptr[price], work.group_ptr[price + 1]):
            ready[task] = max(ready[task], device_begin[work.group[k]])
    for move in range(compute, sums):
        e = (move - compute) % len(work.edge_bytes)
        row = work.edge_source[e] if move >= back else work.edge_target[e]
        ready[move] = device_begin[work.device_of[row]]


@compiled
def run_events(work: Any, links: Any, n_waits: Any, device_begin: Any) -> Any:
    """Run all events. One long function, because split into several it took 1.05 to 1.3 times as
    long.

    Args:
        n_waits: number of dependencies by task.
        device_begin: seconds by device, before which it neither computes nor receives.

    Returns:
        start, finish: seconds by task; NaN for tasks that do not exist.
        cause: last dependency of each task, or NONE; gives the critical path, backwards.
        busy: (n_resources,) seconds of occupation.
    """
    begins = offsets(work)
    compute, back, sums, _, _, total = begins
    rows, n_edges = len(work.device_of), len(work.edge_bytes)
    start, finish = np.full(total, np.nan), np.full(total, np.nan)
    ready, cause = np.zeros(total), np.full(total, NONE, np.int64)
    waits = n_waits.copy()
    free, busy = np.zeros(work.n_resources), np.zeros(work.n_resources)
    holder = np.full(work.n_resources, NONE, np.int64)
    is_timed = work.host_s_per_byte.max() > 0  # communication has overhead
    n_devices = len(work.node_of)
    running = np.full(n_devices, NONE, np.int64)
    end_of, load = np.zeros(n_devices), np.zeros(n_devices)
    load_since, load_until = np.zeros(n_devices), np.zeros(n_devices)

    freed = np.empty(total + n_devices, np.int64)
    stack, n_stack = np.empty(compute + 1, np.int64), 0
    keys, ids, n_heap = np.empty(3 * total + 1), np.empty(3 * total + 1, np.int64), 0
    n_freed = 0
    _set_begin(work, begins, device_begin, ready)
    for device in range(n_devices):
        if work.first[device] != NONE and waits[work.first[device]] == 0:
            freed[n_freed] = work.first[device]
            n_freed += 1
    for task in range(begins[4], total):
        if waits[task] == 0:  # the first gathers of weights
            freed[n_freed] = task
            n_freed += 1

    while True:
        for i in range(n_freed):
            one = freed[i]
            if one < compute and not is_timed:
                stack[n_stack] = one
                n_stack += 1
            else:
                push(keys, ids, n_heap, ready[one], one)
                n_heap += 1
        if n_stack > 0:
            n_stack -= 1
            task = stack[n_stack]
            now = ready[task]
        elif n_heap > 0:
            now = keys[0]
            task = pop(keys, ids, n_heap)
            n_heap -= 1
        else:
            break
        n_freed = 0

        if task >= total:
            moved = task - total
            load_hosts(
                work, begins, moved, now, finish[moved], running, end_of, load, load_since,
                load_until,
            )  # fmt: skip
            continue
        if task < 0:  # the end of a compute task, which sorts before all events of the same time
            task += total
            device = work.device_of[task % rows]
            if end_of[device] > now:
                push(keys, ids, n_heap, end_of[device], task - total)
                n_heap += 1
                continue
            running[device] = NONE
            finish[task] = now
            n_freed = _release(work, links, begins, task, now, waits, ready, cause, freed)
            continue
        if task < compute:
            pass_, rest = divmod(task, work.n_microbatches * rows)
            m, row = divmod(rest, rows)
            device = work.device_of[row]
            seconds = work.seconds[pass_, row]
            start[task] = now
            if is_timed:
                running[device] = task
                left = remaining_load(load[device], load_since[device], load_until[device], now)
                end_of[device], load[device] = loaded_end(seconds, now, left, load_until[device])
                load_since[device] = end_of[device]
                push(keys, ids, n_heap, end_of[device], task - total)
                n_heap += 1
                continue
            finish[task] = now + seconds
            n_freed = _release(work, links, begins, task, finish[task], waits, ready, cause, freed)
            continue

        if task < sums:
            is_back = task >= back
            m, e = divmod(task - (back if is_back else compute), n_edges)
            begin, end = _serve_move(work, task, e, is_back, now, free, busy, holder, cause)
            start[task], finish[task] = begin, end
            which = BACKWARD if is_back else FORWARD
            row = work.edge_source[e] if is_back else work.edge_target[e]
            after = (which * work.n_microbatches + m) * rows + row
            n_freed = _notify(waits, ready, cause, freed, n_freed, after, end, task)
        else:
            price, c, m, is_back = reduce_of(work, begins, task)
            begin, end = _serve_reduce(work, task, price, now, free, busy, holder, cause)
            start[task], finish[task] = begin, end
            if c != NONE:
                waiting = freed_by_sum(work, c, m, is_back)
            else:
                bucket = task - begins[4]
                waiting = work.after_task[work.after_ptr[bucket] : work.after_ptr[bucket + 1]]
            for after in waiting:
                n_freed = _notify(waits, ready, cause, freed, n_freed, after, end, task)
        if is_timed:
            push(keys, ids, n_heap, start[task], task + total)
            n_heap += 1
    return start, finish, cause, busy
