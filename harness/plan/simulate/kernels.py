"""The event loop, compiled. Import this module lazily: it imports numba.

A device runs its tasks in the fixed order of its schedule. Dependencies on other devices are only
through transfers and all-reduces, which are served in the order in which they become ready (ties:
lower number first). Each starts when the last of its resources is free, and occupies them from then
on; but its share of a NIC begins when that NIC is free. A transfer does not wait for a bucket of
gradients that is summed beside backward: both get half of a link or NIC meanwhile, as TCP shares
it.

If communication has overhead (`host_s_per_byte`), events run in order of time. A transfer loads the
processors of both its ends evenly during its duration, and computing on these devices gets the rest
of the processor.
"""

from typing import Any

import numpy as np

from harness.plan.compiled import compiled, inlined, pop, push
from harness.plan.simulate.passes import NONE
from harness.plan.simulate.work import offsets


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


@inlined
def _price_of(work: Any, begins: Any, task: int) -> Any:
    """Position of the price of an all-reduce, or of a bucket."""
    _, _, sums, sums_back, buckets, _ = begins
    n_sums = len(work.sum_is_collective)
    if task >= buckets:
        return 2 * n_sums + task - buckets
    if task >= sums_back:
        return n_sums + (task - sums_back) % n_sums
    return (task - sums) % n_sums


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
        price = _price_of(work, begins, task)
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


@compiled
def _occupy(
    resource: int, until: float, task: int, free: Any, busy: Any, holder: Any, seconds: float
) -> None:
    free[resource], holder[resource] = until, task
    busy[resource] += seconds


@inlined
def _shared_seconds(resource: int, begin: float, seconds: float, filled: Any) -> Any:
    """Seconds of a transfer's bytes over a resource, at half of its rate beside a bucket; the next
    bucket starts later by as much."""
    added = min(seconds, max(0.0, filled[resource] - begin) / 2)
    filled[resource] += added
    return seconds + added


@inlined
def _serve_move(
    work: Any, task: int, e: int, is_back: bool, begin: float, free: Any, filled: Any, busy: Any,
    holder: Any, cause: Any,
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
    ready, is_far = begin, source != target
    if free[link] > begin:
        begin, cause[task] = free[link], holder[link]
    if is_far:
        for resource in (out, into):
            if free[resource] > begin:
                begin, cause[task] = free[resource], holder[resource]
    seconds = _shared_seconds(link, begin, n_bytes / work.bandwidth[a, b], filled)
    _occupy(link, begin + seconds, task, free, busy, holder, n_bytes / work.bandwidth[a, b])
    longest = seconds
    if is_far:
        for resource, rate in ((out, work.nic[source]), (into, work.nic[target])):
            seconds = _shared_seconds(resource, begin, n_bytes / rate, filled)
            longest = max(longest, seconds)
            # Flows share an interface, so it serves its queue without waiting for other resources.
            until = max(ready, free[resource]) + seconds
            _occupy(resource, until, task, free, busy, holder, n_bytes / rate)
    return begin, begin + work.latency[a, b] + longest


@inlined
def _serve_reduce(
    work: Any, task: int, price: int, begin: float, free: Any, filled: Any, busy: Any, holder: Any,
    filler: Any, cause: Any, is_bucket: bool,
) -> Any:  # fmt: skip
    """Start and end of an all-reduce that is ready at `begin`."""
    low, high = work.reduce_ptr[price], work.reduce_ptr[price + 1]
    for p in range(low, high):
        resource = work.reduce_resource[p]
        if free[resource] > begin:
            begin, cause[task] = free[resource], holder[resource]
        if filled[resource] > begin:
            begin, cause[task] = filled[resource], filler[resource]
    for p in range(low, high):
        seconds = work.reduce_occupied[p]
        if seconds > 0:
            resource = work.reduce_resource[p]
            if is_bucket:
                _occupy(resource, begin + seconds, task, filled, busy, filler, seconds)
            else:
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
def run_events(work: Any, dependents: Any, device_begin: Any) -> Any:
    """Run all events. One long function, because split into several it took 1.05 to 1.3 times as
    long.

    Args:
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
    waits = dependents.waits.copy()
    busy = np.zeros(work.n_resources)
    # When transfers and partial sums free a resource, and when buckets do, and the last of these.
    free, filled = np.zeros(work.n_resources), np.zeros(work.n_resources)
    holder = np.full(work.n_resources, NONE, np.int64)
    filler = holder.copy()
    is_timed = work.host_s_per_byte.max() > 0  # communication has overhead
    n_devices = len(work.node_of)
    running = np.full(n_devices, NONE, np.int64)
    end_of, load = np.zeros(n_devices), np.zeros(n_devices)
    load_since, load_until = np.zeros(n_devices), np.zeros(n_devices)

    dependents_ptr, dependent = dependents.ptr, dependents.tasks
    stack, n_stack = np.empty(compute + 1, np.int64), 0  # of compute tasks, in any order
    keys, ids, n_heap = np.empty(3 * total + 1), np.empty(3 * total + 1, np.int64), 0
    _set_begin(work, begins, device_begin, ready)
    for task in work.first:
        if task != NONE and waits[task] == 0:
            push(keys, ids, n_heap, ready[task], task)
            n_heap += 1
    for task in range(begins[4], total):
        if waits[task] == 0:  # the first gathers of weights
            push(keys, ids, n_heap, ready[task], task)
            n_heap += 1

    while n_stack + n_heap > 0:
        if n_stack > 0:
            n_stack -= 1
            task = stack[n_stack]
            now = ready[task]
        else:
            now = keys[0]
            task = pop(keys, ids, n_heap)
            n_heap -= 1
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
            end = now
        elif task < compute:
            device = work.device_of[task % rows]
            seconds = work.seconds[task // (work.n_microbatches * rows), task % rows]
            start[task] = now
            if is_timed:
                running[device] = task
                left = remaining_load(load[device], load_since[device], load_until[device], now)
                end_of[device], load[device] = loaded_end(seconds, now, left, load_until[device])
                load_since[device] = end_of[device]
                push(keys, ids, n_heap, end_of[device], task - total)
                n_heap += 1
                continue
            end = now + seconds
        else:
            if task < sums:
                e = (task - compute) % n_edges
                is_back = task >= back
                begin, end = _serve_move(
                    work, task, e, is_back, now, free, filled, busy, holder, cause
                )
            else:
                price = _price_of(work, begins, task)
                begin, end = _serve_reduce(
                    work, task, price, now, free, filled, busy, holder, filler, cause,
                    task >= begins[4] and work.shares_links,
                )  # fmt: skip
            start[task] = begin
            if is_timed:
                push(keys, ids, n_heap, begin, task + total)
                n_heap += 1
        finish[task] = end
        for k in range(dependents_ptr[task], dependents_ptr[task + 1]):
            after = dependent[k]
            # Ties go to the lower number, independent of the order of events.
            is_first = cause[after] == NONE or task < cause[after]
            if end > ready[after] or (end == ready[after] and is_first):
                ready[after], cause[after] = end, task
            waits[after] -= 1
            if waits[after] == 0:
                if after < compute and not is_timed:
                    stack[n_stack] = after
                    n_stack += 1
                else:
                    push(keys, ids, n_heap, ready[after], after)
                    n_heap += 1
    return start, finish, cause, busy
