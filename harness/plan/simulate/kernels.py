"""The event loop and the order of tasks, compiled. Import this module lazily: it imports numba.

A row is an operator on a device that has a block of it; there are R of them. A compute task is
(pass, microbatch, row) and has the number (pass * M + microbatch) * R + row, with M microbatches.
Then come forward transfers (microbatch * E + edge row), backward transfers, and all-reduce buckets.

A device works through its tasks in the fixed order of its schedule. What has to wait for something
elsewhere waits for transfers alone, so those and the order are all the dependencies there are.
Transfers and all-reduces are served in the order in which they become ready (ties: lower number
first); each takes its resources at once, when the last of them is free.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

FORWARD, BACKWARD, WEIGHT, RECOMPUTE = 0, 1, 2, 3
N_PASSES = 4
NONE = -1


@njit(cache=True)
def order_tasks(
    n_microbatches: int,
    row_at: Any,  # (operators, devices) the row, or NONE
    kept_bytes: Any,  # (R,) held from forward to backward: outputs and received inputs
    outside_bytes: Any,  # (R,) of those, received from another stage: kept under recomputation
    stage_ptr: Any,  # (S + 1,) into stage_ops
    stage_ops: Any,  # operators by stage, in topological order
    recompute: Any,  # (S,)
    rank_of: Any,  # (D,) pipeline rank of a device, or NONE
    action_ptr: Any,  # (P + 1,) into actions
    actions: Any,  # (n, 3) pass, microbatch, stage by rank
    split_weight: bool,  # the schedule has weight passes, which then free the activations
) -> Any:
    """Chain every device's tasks.

    Returns:
        following: (n_tasks,) next task on the device, or NONE.
        first, last: (D,) tasks of each device.
        peak: (D,) most bytes of activations held at once.
        held: (n_tasks,) bytes held while the task runs.
    """
    rows, n_devices = len(kept_bytes), row_at.shape[1]
    n_tasks = N_PASSES * n_microbatches * rows
    following = np.full(n_tasks, NONE, np.int64)
    held = np.zeros(n_tasks)
    first = np.full(n_devices, NONE, np.int64)
    last = np.full(n_devices, NONE, np.int64)
    peak = np.zeros(n_devices)
    for device in range(n_devices):
        rank = rank_of[device]
        if rank == NONE:
            continue
        memory = 0.0
        for a in range(action_ptr[rank], action_ptr[rank + 1]):
            kind, microbatch, stage = actions[a, 0], actions[a, 1], actions[a, 2]
            low, high = stage_ptr[stage], stage_ptr[stage + 1]
            again = recompute[stage]
            for run in range(2):
                # A backward action of a recomputing stage runs its forward once more first.
                if run == 0 and not (kind == BACKWARD and again):
                    continue
                what = RECOMPUTE if run == 0 else kind
                for k in range(high - low):
                    forwards = what in (FORWARD, RECOMPUTE)
                    op = stage_ops[low + k] if forwards else stage_ops[high - 1 - k]
                    row = row_at[op, device]
                    if row == NONE:
                        continue
                    task = (what * n_microbatches + microbatch) * rows + row
                    freed = 0.0
                    if what == FORWARD and again:
                        memory += kept_bytes[row]
                        freed = kept_bytes[row] - outside_bytes[row]
                    elif what == FORWARD:
                        memory += kept_bytes[row]
                    elif what == RECOMPUTE:
                        memory += kept_bytes[row] - outside_bytes[row]
                    elif what == WEIGHT or not split_weight:
                        freed = kept_bytes[row]
                    held[task] = memory
                    peak[device] = max(peak[device], memory)
                    memory -= freed
                    if last[device] == NONE:
                        first[device] = task
                    else:
                        following[last[device]] = task
                    last[device] = task
    return following, first, last, peak, held


@njit(cache=True)
def _push(keys: Any, ids: Any, size: int, key: float, item: int) -> None:
    k = size
    while k > 0:
        parent = (k - 1) >> 1
        if keys[parent] < key or (keys[parent] == key and ids[parent] < item):
            break
        keys[k], ids[k] = keys[parent], ids[parent]
        k = parent
    keys[k], ids[k] = key, item


@njit(cache=True)
def _pop(keys: Any, ids: Any, size: int) -> int:
    """Remove the least entry; the heap has size - 1 entries afterwards."""
    top = ids[0]
    key, item = keys[size - 1], ids[size - 1]
    k, n = 0, size - 1
    while True:
        child = 2 * k + 1
        if child >= n:
            break
        right = child + 1
        if right < n and (
            keys[right] < keys[child] or (keys[right] == keys[child] and ids[right] < ids[child])
        ):
            child = right
        if key < keys[child] or (key == keys[child] and item < ids[child]):
            break
        keys[k], ids[k] = keys[child], ids[child]
        k = child
    keys[k], ids[k] = key, item
    return int(top)


@njit(cache=True)
def _group_rows(rows: Any, n_rows: int) -> Any:
    """Edge rows by the row of the table that they belong to: (pointers, edges)."""
    pointers = np.zeros(n_rows + 1, np.int64)
    for row in rows:
        pointers[row + 1] += 1
    for k in range(n_rows):
        pointers[k + 1] += pointers[k]
    fill = pointers[:-1].copy()
    edges = np.empty(len(rows), np.int64)
    for e in range(len(rows)):
        edges[fill[rows[e]]] = e
        fill[rows[e]] += 1
    return pointers, edges


@njit(cache=True)
def run_events(
    n_microbatches: int,
    device_of: Any,  # (R,)
    seconds: Any,  # (4, R) of each pass
    following: Any,
    first: Any,
    edge_source: Any,  # (E,) row of the producer
    edge_target: Any,  # (E,) row of the consumer
    edge_bytes: Any,  # (E,)
    edge_returns: Any,  # (E,) whether a gradient comes back
    latency: Any,  # (D, D)
    bandwidth: Any,  # (D, D)
    nic: Any,  # (nodes,)
    node_of: Any,  # (D,)
    n_resources: int,
    bucket_seconds: Any,  # (K,)
    bucket_ptr: Any,  # (K + 1,) into occupied
    occupied_resource: Any,
    occupied_seconds: Any,
    trigger_task: Any,  # (n,) compute tasks that a bucket waits for
    trigger_bucket: Any,  # (n,)
) -> Any:
    """Run all events.

    Returns:
        start, finish, ready: (n_tasks + 2 M E + K,) seconds; NaN for tasks that do not exist.
        cause: what each waited for last, or NONE: the critical path, backwards.
        busy: (n_resources,) seconds that each was occupied.
    """
    rows, n_edges, n_buckets = len(device_of), len(edge_bytes), len(bucket_seconds)
    n_devices = len(node_of)
    n_compute = N_PASSES * n_microbatches * rows
    n_moves = n_microbatches * n_edges
    total = n_compute + 2 * n_moves + n_buckets
    start, finish = np.full(total, np.nan), np.full(total, np.nan)
    ready = np.zeros(total)
    cause = np.full(total, NONE, np.int64)
    waits = np.zeros(total, np.int64)
    free, busy = np.zeros(n_resources), np.zeros(n_resources)
    holder = np.full(n_resources, NONE, np.int64)
    out_ptr, out_edges = _group_rows(edge_source, rows)
    in_ptr, in_edges = _group_rows(edge_target, rows)

    head = np.full(n_compute, NONE, np.int64)
    chained = np.full(len(trigger_task), NONE, np.int64)
    for t in range(len(trigger_task)):
        chained[t] = head[trigger_task[t]]
        head[trigger_task[t]] = t
        waits[n_compute + 2 * n_moves + trigger_bucket[t]] += 1
    for m in range(n_microbatches):
        for e in range(n_edges):
            waits[(FORWARD * n_microbatches + m) * rows + edge_target[e]] += 1
            waits[n_compute + m * n_edges + e] = 1
            if edge_returns[e]:
                waits[(BACKWARD * n_microbatches + m) * rows + edge_source[e]] += 1
                waits[n_compute + n_moves + m * n_edges + e] = 1
    for task in range(n_compute):
        if following[task] != NONE:
            waits[following[task]] += 1

    stack = np.empty(n_compute + 1, np.int64)
    keys, ids = np.empty(total - n_compute + 1), np.empty(total - n_compute + 1, np.int64)
    n_stack, n_heap = 0, 0
    for device in range(n_devices):
        if first[device] != NONE and waits[first[device]] == 0:
            stack[n_stack] = first[device]
            n_stack += 1

    # Tasks released by one that finished, at most: its follower, its edges, its buckets.
    while n_stack > 0 or n_heap > 0:
        if n_stack > 0:
            n_stack -= 1
            task = stack[n_stack]
            what, rest = divmod(task, n_microbatches * rows)
            m, row = divmod(rest, rows)
            start[task] = ready[task]
            end = ready[task] + seconds[what, row]
            finish[task] = end
            after = following[task]
            if after != NONE:
                waits[after] -= 1
                if end > ready[after] or cause[after] == NONE:
                    ready[after] = max(end, ready[after])
                    cause[after] = task
                if waits[after] == 0:
                    stack[n_stack] = after
                    n_stack += 1
            if what == FORWARD:
                for k in range(out_ptr[row], out_ptr[row + 1]):
                    move = n_compute + m * n_edges + out_edges[k]
                    ready[move], cause[move] = end, task
                    _push(keys, ids, n_heap, end, move)
                    n_heap += 1
            elif what == BACKWARD:
                for k in range(in_ptr[row], in_ptr[row + 1]):
                    if edge_returns[in_edges[k]]:
                        move = n_compute + n_moves + m * n_edges + in_edges[k]
                        ready[move], cause[move] = end, task
                        _push(keys, ids, n_heap, end, move)
                        n_heap += 1
            t = head[task]
            while t != NONE:
                bucket = n_compute + 2 * n_moves + trigger_bucket[t]
                waits[bucket] -= 1
                if end > ready[bucket] or cause[bucket] == NONE:
                    ready[bucket] = max(end, ready[bucket])
                    cause[bucket] = task
                if waits[bucket] == 0:
                    _push(keys, ids, n_heap, ready[bucket], bucket)
                    n_heap += 1
                t = chained[t]
            continue

        task = _pop(keys, ids, n_heap)
        n_heap -= 1
        begin = ready[task]
        if task >= n_compute + 2 * n_moves:
            k = task - n_compute - 2 * n_moves
            for p in range(bucket_ptr[k], bucket_ptr[k + 1]):
                resource = occupied_resource[p]
                if free[resource] > begin:
                    begin, cause[task] = free[resource], holder[resource]
            for p in range(bucket_ptr[k], bucket_ptr[k + 1]):
                resource = occupied_resource[p]
                if occupied_seconds[p] > 0:
                    free[resource], holder[resource] = begin + occupied_seconds[p], task
                    busy[resource] += occupied_seconds[p]
            start[task], finish[task] = begin, begin + bucket_seconds[k]
            continue

        back = task >= n_compute + n_moves
        m, e = divmod(task - n_compute - (n_moves if back else 0), n_edges)
        a, b = device_of[edge_source[e]], device_of[edge_target[e]]
        if back:
            a, b = b, a
        n_bytes = edge_bytes[e]
        link = a * n_devices + b
        source, target = node_of[a], node_of[b]
        out = n_devices * n_devices + source
        into = n_devices * n_devices + len(nic) + target
        crosses = source != target
        if free[link] > begin:
            begin, cause[task] = free[link], holder[link]
        rate = bandwidth[a, b]
        if crosses:
            if free[out] > begin:
                begin, cause[task] = free[out], holder[out]
            if free[into] > begin:
                begin, cause[task] = free[into], holder[into]
            rate = min(rate, min(nic[source], nic[target]))
            free[out], holder[out] = begin + n_bytes / nic[source], task
            free[into], holder[into] = begin + n_bytes / nic[target], task
            busy[out] += n_bytes / nic[source]
            busy[into] += n_bytes / nic[target]
        free[link], holder[link] = begin + n_bytes / bandwidth[a, b], task
        busy[link] += n_bytes / bandwidth[a, b]
        end = begin + latency[a, b] + n_bytes / rate
        start[task], finish[task] = begin, end
        if back:
            after = (BACKWARD * n_microbatches + m) * rows + edge_source[e]
        else:
            after = (FORWARD * n_microbatches + m) * rows + edge_target[e]
        waits[after] -= 1
        if end > ready[after] or cause[after] == NONE:
            ready[after] = max(end, ready[after])
            cause[after] = task
        if waits[after] == 0:
            stack[n_stack] = after
            n_stack += 1
    return start, finish, ready, cause, busy
