"""A strategy as the arrays of the event loop, the order of its tasks, and their dependencies.

A row is an operator on a device that has a block of it; there are R of them. A compute task is
(pass, microbatch, row) and has the number (pass * M + microbatch) * R + row, with M microbatches.
After these are numbered forward transfers (microbatch * E + edge row), backward transfers, forward
all-reduces within a microbatch (microbatch * C + sum), backward ones, and collectives of gradients
and weights (buckets). Import this module lazily: it imports numba.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from harness.plan.compiled import compiled, inlined
from harness.plan.simulate.passes import BACKWARD, FORWARD, N_PASSES, NONE, RECOMPUTE, WEIGHT


@inlined
def _append(task: int, device: int, following: Any, position: Any, first: Any, last: Any) -> None:
    """Let a device run a task after its last one."""
    if last[device] == NONE:
        first[device], position[task] = task, 0
    else:
        following[last[device]] = task
        position[task] = position[last[device]] + 1
    last[device] = task


@compiled
def order_tasks(
    n_microbatches: int,
    row_at: Any,  # (operators, devices) the row, or NONE
    receives: Any,  # (4, R) whether a pass of a row waits for transfers
    n_first: int,  # exchanges posted before the step, and ahead in a wait; arguments, because
    n_ahead: int,  # numba's cache would not notice changed constants
    kept_bytes: Any,  # (R,) held from forward to backward: outputs and received inputs
    outside_bytes: Any,  # (R,) the part that recomputation keeps: received, or read later
    brief_bytes: Any,  # (R,) held during its forward only
    passing_bytes: Any,  # (2, R) of gradients to other owners, in memory during forward, backward
    gradient_bytes: Any,  # (R,) allocated by the first backward, and held to the end of the step
    stage_ptr: Any,  # (S + 1,) into stage_ops
    stage_ops: Any,  # operators by stage, in topological order
    segment_of: Any,  # (R,) number of the segment, which a device runs again together
    recompute: Any,  # (R,) whether it runs again
    rank_of: Any,  # (D,) pipeline rank of a device, or NONE
    action_ptr: Any,  # (P + 1,) into actions
    actions: Any,  # (n, 3) pass, microbatch, stage by rank
    split_weight: bool,  # the schedule has weight passes, which then free the activations
) -> Any:
    """Chain every device's tasks.

    Returns:
        following: (n_tasks,) next task on the device, or NONE.
        position: (n_tasks,) number of earlier tasks on its device.
        first, last: (D,) tasks of each device.
        gate: (n_tasks,) the task after which a task's receives are posted, or NONE: the last one
            before the wait for the exchange `n_ahead` earlier.
        peak: (D,) most bytes of activations and such gradients held at once.
    """
    rows, n_devices = len(kept_bytes), row_at.shape[1]
    missing = gradient_bytes.copy()
    n_tasks = N_PASSES * n_microbatches * rows
    following = np.full(n_tasks, NONE, np.int64)
    position = np.full(n_tasks, NONE, np.int64)
    gate = np.full(n_tasks, NONE, np.int64)
    first = np.full(n_devices, NONE, np.int64)
    last = np.full(n_devices, NONE, np.int64)
    peak = np.zeros(n_devices)
    before_wait = np.full(n_ahead, NONE, np.int64)  # by the number of the exchange
    for device in range(n_devices):
        rank = rank_of[device]
        if rank == NONE:
            continue
        memory = 0.0
        n_exchanges = 0
        for a in range(action_ptr[rank], action_ptr[rank + 1]):
            kind, microbatch, stage = actions[a, 0], actions[a, 1], actions[a, 2]
            low, high = stage_ptr[stage], stage_ptr[stage + 1]
            repeated = NONE  # the segment that has run again before its backward
            for k in range(high - low):
                place = low + k if kind == FORWARD else high - 1 - k
                row = row_at[stage_ops[place], device]
                if row == NONE:
                    continue
                if kind == BACKWARD and recompute[row] and segment_of[row] != repeated:
                    repeated, begin = segment_of[row], place
                    while begin > low:
                        before = row_at[stage_ops[begin - 1], device]
                        if before != NONE and segment_of[before] != repeated:
                            break
                        begin -= 1
                    for again in row_at[stage_ops[begin : place + 1], device]:
                        if again != NONE:
                            memory += kept_bytes[again] - outside_bytes[again]
                            peak[device] = max(peak[device], memory + brief_bytes[again])
                            task = (RECOMPUTE * n_microbatches + microbatch) * rows + again
                            _append(task, device, following, position, first, last)
                task = (kind * n_microbatches + microbatch) * rows + row
                if receives[kind, row]:
                    if n_exchanges >= n_first:
                        posted = max(0, n_exchanges - n_ahead)
                        gate[task] = before_wait[posted % n_ahead]
                    before_wait[n_exchanges % n_ahead] = last[device]
                    n_exchanges += 1
                freed = 0.0
                if kind == FORWARD:  # a recomputed row's activations count in backward
                    freed = kept_bytes[row] - outside_bytes[row] if recompute[row] else 0.0
                    freed += brief_bytes[row]
                    memory += kept_bytes[row] + brief_bytes[row]
                elif kind == (WEIGHT if split_weight else BACKWARD):
                    freed = kept_bytes[row]
                    memory += missing[row]
                    missing[row] = 0.0
                passing = passing_bytes[FORWARD if kind == FORWARD else BACKWARD, row]
                peak[device] = max(peak[device], memory + passing)
                memory -= freed
                _append(task, device, following, position, first, last)
    return following, position, first, last, gate, peak


@compiled
def last_tasks(position: Any, tasks: Any, ends: Any, before: Any) -> Any:
    """(n_ends,) the last of the tasks that each end of a bucket waits for, all on one device.

    Args:
        ends: end that waits for each task.
        before: (n_ends,) an earlier end on the same device that it waits for too, or NONE.
    """
    found = np.full(len(before), NONE, np.int64)
    for task, end in zip(tasks, ends):  # noqa: B905  (numba knows no strict)
        if found[end] == NONE or position[task] > position[found[end]]:
            found[end] = task
    for end, former in enumerate(before):
        if former != NONE and position[found[former]] > position[found[end]]:
            found[end] = found[former]
    return found


class Work(NamedTuple):
    """Shapes: R rows, E edge rows, C sums, K buckets, D devices, M microbatches."""

    n_microbatches: int
    n_resources: int
    device_of: Any  # (R,)
    seconds: Any  # (4, R) of each pass
    following: Any  # (4 M R,) next task on the device, or NONE
    first: Any  # (D,)
    gate: Any  # (4 M R,) the task after which its receives are posted, or NONE
    edge_source: Any  # (E,) row of the producer
    edge_target: Any  # (E,) row of the consumer
    edge_bytes: Any  # (E,)
    edge_goes: Any  # (E,) whether the output is sent
    edge_returns: Any  # (E,) whether a gradient is sent back
    latency: Any  # (D, D)
    bandwidth: Any  # (D, D)
    nic: Any  # (nodes,)
    node_of: Any  # (D,)
    host_s_per_byte: Any  # (D,) overhead: seconds of computation per byte sent or received
    sum_is_collective: Any  # (C,)
    sum_goes: Any  # (C,)
    sum_returns: Any  # (C,)
    sum_source_ptr: Any  # (C + 1,) into sum_source
    sum_source: Any  # rows
    sum_target_ptr: Any
    sum_target: Any
    # Prices of all-reduces: C forward, C backward, K buckets.
    reduce_seconds: Any
    reduce_ptr: Any  # into the next two
    reduce_resource: Any
    reduce_occupied: Any
    reduce_host_bytes: Any
    group_ptr: Any  # into group
    group: Any  # devices
    trigger_task: Any  # (n,) the compute task on each of its devices that a bucket waits for
    trigger_bucket: Any  # (n,)
    after_ptr: Any  # (K + 1,) into after_task
    after_task: Any  # compute tasks that wait for a bucket: users of gathered weights


class Links(NamedTuple):
    """Dependents of each task, as lists by row or task."""

    out_ptr: Any  # edge rows by producer
    out_edges: Any
    in_ptr: Any  # edge rows by consumer
    in_edges: Any
    source_ptr: Any  # positions in sum_source by row
    source_sums: Any
    target_ptr: Any
    target_sums: Any
    trigger_head: Any  # (4 M R,) first position in trigger_task, or NONE
    trigger_next: Any
    gate_head: Any  # (4 M R,) first transfer (counted from 0) posted after it, or NONE
    gate_next: Any


@compiled
def offsets(work: Any) -> Any:
    """First numbers of transfers, backward transfers, sums, backward sums, buckets; and the end."""
    compute = N_PASSES * work.n_microbatches * len(work.device_of)
    moves = work.n_microbatches * len(work.edge_bytes)
    sums = work.n_microbatches * len(work.sum_is_collective)
    end = compute + 2 * moves + 2 * sums
    n_buckets = len(work.reduce_seconds) - 2 * len(work.sum_is_collective)
    return (
        compute,
        compute + moves,
        compute + 2 * moves,
        compute + 2 * moves + sums,
        end,
        end + n_buckets,
    )


@compiled
def _group(rows: Any, n_rows: int) -> Any:
    """Group positions of an array by the row there: (pointers, positions)."""
    pointers = np.zeros(n_rows + 1, np.int64)
    for row in rows:
        pointers[row + 1] += 1
    for k in range(n_rows):
        pointers[k + 1] += pointers[k]
    fill = pointers[:-1].copy()
    positions = np.empty(len(rows), np.int64)
    for e in range(len(rows)):
        positions[fill[rows[e]]] = e
        fill[rows[e]] += 1
    return pointers, positions


@compiled
def _owners(pointers: Any) -> Any:
    """The list that each position belongs to."""
    return np.repeat(np.arange(len(pointers) - 1), np.diff(pointers))


@compiled
def link(work: Any) -> Any:
    """Build all lists of dependents."""
    rows, n_edges, m = len(work.device_of), len(work.edge_bytes), work.n_microbatches
    n_compute = N_PASSES * m * rows
    out_ptr, out_edges = _group(work.edge_source, rows)
    in_ptr, in_edges = _group(work.edge_target, rows)
    source_ptr, at_source = _group(work.sum_source, rows)
    target_ptr, at_target = _group(work.sum_target, rows)
    trigger_head = np.full(n_compute, NONE, np.int64)
    trigger_next = np.full(len(work.trigger_task), NONE, np.int64)
    for t in range(len(work.trigger_task)):
        trigger_next[t] = trigger_head[work.trigger_task[t]]
        trigger_head[work.trigger_task[t]] = t
    gate_head = np.full(n_compute, NONE, np.int64)
    gate_next = np.full(2 * m * n_edges, NONE, np.int64)
    for k in range(m):
        for e in range(n_edges):
            task = work.gate[(FORWARD * m + k) * rows + work.edge_target[e]]
            move = k * n_edges + e
            if task != NONE and work.edge_goes[e]:
                gate_next[move] = gate_head[task]
                gate_head[task] = move
            task = work.gate[(BACKWARD * m + k) * rows + work.edge_source[e]]
            move += m * n_edges
            if task != NONE and work.edge_returns[e]:
                gate_next[move] = gate_head[task]
                gate_head[task] = move
    return Links(
        out_ptr,
        out_edges,
        in_ptr,
        in_edges,
        source_ptr,
        _owners(work.sum_source_ptr)[at_source],
        target_ptr,
        _owners(work.sum_target_ptr)[at_target],
        trigger_head,
        trigger_next,
        gate_head,
        gate_next,
    )


@compiled
def count_waits(work: Any) -> Any:
    """Number of dependencies of each task."""
    rows, n_edges, m = len(work.device_of), len(work.edge_bytes), work.n_microbatches
    compute, back, sums, sums_back, buckets, end = offsets(work)
    n_sums = len(work.sum_is_collective)
    waits = np.zeros(end, np.int64)
    for t in range(len(work.trigger_task)):
        waits[buckets + work.trigger_bucket[t]] += 1
    for task in work.after_task:
        waits[task] += 1
    for k in range(m):
        for e in range(n_edges):
            if work.edge_goes[e]:
                task = (FORWARD * m + k) * rows + work.edge_target[e]
                waits[task] += 1
                waits[compute + k * n_edges + e] = 1 if work.gate[task] == NONE else 2
            if work.edge_returns[e]:
                task = (BACKWARD * m + k) * rows + work.edge_source[e]
                waits[task] += 1
                waits[back + k * n_edges + e] = 1 if work.gate[task] == NONE else 2
        for c in range(n_sums):
            n_sources = work.sum_source_ptr[c + 1] - work.sum_source_ptr[c]
            if work.sum_goes[c]:
                waits[sums + k * n_sums + c] = n_sources
            if work.sum_returns[c]:
                n_targets = work.sum_target_ptr[c + 1] - work.sum_target_ptr[c]
                waits[sums_back + k * n_sums + c] = (
                    n_sources if work.sum_is_collective[c] else n_targets
                )
            for is_back in range(2):
                for task in freed_by_sum(work, c, k, is_back == 1):
                    waits[task] += 1
    for task in range(compute):
        if work.following[task] != NONE:
            waits[work.following[task]] += 1
    return waits


@compiled
def freed_by_sum(work: Any, c: int, microbatch: int, is_back: bool) -> Any:
    """The compute tasks that wait for an all-reduce within a microbatch."""
    which = BACKWARD if is_back else FORWARD
    base = (which * work.n_microbatches + microbatch) * len(work.device_of)
    if not (work.sum_returns[c] if is_back else work.sum_goes[c]):
        return np.empty(0, np.int64)
    sources = base + work.sum_source[work.sum_source_ptr[c] : work.sum_source_ptr[c + 1]]
    if work.sum_is_collective[c]:
        following = work.following[sources]
        return following[following != NONE]
    if is_back:
        return sources
    return base + work.sum_target[work.sum_target_ptr[c] : work.sum_target_ptr[c + 1]]


@inlined
def reduce_of(work: Any, begins: Any, task: int) -> Any:
    """(position of its price, sum or NONE, microbatch, whether backward) of an all-reduce."""
    _, _, sums, sums_back, buckets, _ = begins
    n_sums = len(work.sum_is_collective)
    if task >= buckets:
        return 2 * n_sums + task - buckets, NONE, 0, False
    is_back = task >= sums_back
    m, c = divmod(task - (sums_back if is_back else sums), n_sums)
    return c + (n_sums if is_back else 0), c, m, is_back
