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

from harness.domain.schedule import AHEAD
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


class RowBytes(NamedTuple):
    """Bytes of memory by row."""

    kept: Any  # (R,) from forward to backward: outputs and received inputs
    outside: Any  # (R,) the part of them that recomputation keeps: received, or read later
    brief: Any  # (R,) during its forward only
    passing: Any  # (2, R) of gradients to other owners, during forward and backward
    gradients: Any  # (R,) allocated by the first backward, and held to the end of the step


class Received(NamedTuple):
    """What a row gets from other stages, and sends back to them.

    Attributes:
        n_bytes: (2, R) bytes that it waits for in forward, and in backward.
        stage: (2, R) the stage that sends them.
        returned: (R,) bytes of gradients that it sends to the stage of its inputs.
    """

    n_bytes: Any
    stage: Any
    returned: Any


class TaskOrder(NamedTuple):
    """The tasks of each device in their order."""

    following: Any  # (n_tasks,) next task on the device, or NONE
    position: Any  # (n_tasks,) number of earlier tasks on its device
    first: Any  # (D,)
    last: Any  # (D,)
    peak: Any  # (D,) most bytes of activations and such gradients held at once


@compiled
def _positions(flow: Any) -> Any:
    """(3, microbatches, stages) number of each action among those of its rank."""
    found = np.full((3, flow.n_microbatches, len(flow.stage_ptr) - 1), NONE, np.int64)
    for rank in range(len(flow.action_ptr) - 1):
        begin, end = flow.action_ptr[rank], flow.action_ptr[rank + 1]
        for a in range(begin, end):
            found[flow.actions[a, 0], flow.actions[a, 1], flow.actions[a, 2]] = a - begin
    return found


@compiled
def _exchanges(flow: Any, own_rows: Any, rank: int, received: Any, positions: Any) -> Any:
    """(n,) bytes of each exchange of a rank's device, its action, the other rank, and the number
    of the action that the other rank sends it after.

    Args:
        own_rows: (operators,) the device's row of each, or NONE.
    """
    n_ranks = len(flow.action_ptr) - 1
    begin, end = flow.action_ptr[rank], flow.action_ptr[rank + 1]
    n_most = (end - begin) * (own_rows != NONE).sum()
    n_bytes, at = np.empty(n_most), np.empty((3, n_most), np.int64)
    n = 0
    for a in range(begin, end):
        kind, microbatch, stage = flow.actions[a, 0], flow.actions[a, 1], flow.actions[a, 2]
        low, high = flow.stage_ptr[stage], flow.stage_ptr[stage + 1]
        for k in range(high - low if kind != WEIGHT else 0):
            row = own_rows[flow.stage_ops[low + k if kind == FORWARD else high - 1 - k]]
            if row == NONE or received.n_bytes[kind, row] == 0:
                continue
            sender = received.stage[kind, row]
            n_bytes[n] = received.n_bytes[kind, row]
            at[0, n], at[1, n] = a, sender % n_ranks
            at[2, n] = positions[kind, microbatch, sender]
            n += 1
    return n_bytes[:n], at[:, :n]


@inlined
def _can_be_sent(flow: Any, at: Any, exchange: int, action: int, positions: Any) -> bool:
    """Whether an exchange needs nothing that this device sends after an action or later."""
    n_stages, n_ranks = len(flow.stage_ptr) - 1, len(flow.action_ptr) - 1
    for a in range(action, at[0, exchange]):
        kind, microbatch = flow.actions[a, 0], flow.actions[a, 1]
        reader = flow.actions[a, 2] + (1 if kind == FORWARD else -1)
        is_read = kind != WEIGHT and 0 <= reader < n_stages and reader % n_ranks == at[1, exchange]
        if is_read and positions[kind, microbatch, reader] <= at[2, exchange]:
            return False
    return True


@compiled
def order_tasks(
    flow: Any,
    row_at: Any,  # (operators, devices) the row, or NONE
    n_bytes: Any,  # RowBytes
    segment_of: Any,  # (R,) number of the segment, which a device runs again together
    recompute: Any,  # (R,) whether it runs again
    received: Any,  # Received
) -> Any:
    """Chain every device's tasks."""
    n_microbatches, stage_ptr, stage_ops = flow.n_microbatches, flow.stage_ptr, flow.stage_ops
    kept_bytes, outside_bytes, brief_bytes, passing_bytes, gradient_bytes = n_bytes
    rows, n_devices = len(kept_bytes), row_at.shape[1]
    missing = gradient_bytes.copy()
    n_tasks = N_PASSES * n_microbatches * rows
    following = np.full(n_tasks, NONE, np.int64)
    position = np.full(n_tasks, NONE, np.int64)
    first = np.full(n_devices, NONE, np.int64)
    last = np.full(n_devices, NONE, np.int64)
    peak = np.zeros(n_devices)
    positions, n_ranks = _positions(flow), len(flow.action_ptr) - 1
    for device in range(n_devices):
        rank = flow.rank_of[device]
        if rank == NONE:
            continue
        memory = 0.0
        own_rows = row_at[:, device]
        arriving, at = _exchanges(flow, own_rows, rank, received, positions)
        exchange = posted = 0
        n_most = n_microbatches * (own_rows != NONE).sum()
        sent_bytes, sent_to = np.empty(n_most), np.empty((2, n_most), np.int64)
        n_sent = n_freed = 0
        for a in range(flow.action_ptr[rank], flow.action_ptr[rank + 1]):
            kind, microbatch, stage = flow.actions[a, 0], flow.actions[a, 1], flow.actions[a, 2]
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
                if kind != WEIGHT and received.n_bytes[kind, row] > 0:
                    while posted < min(exchange + 1 + AHEAD, len(arriving)) and (
                        posted <= exchange or _can_be_sent(flow, at, posted, a, positions)
                    ):
                        memory += arriving[posted]
                        posted += 1
                    memory -= arriving[exchange]  # which is now part of what the row holds
                    while n_freed < n_sent and (
                        sent_to[0, n_freed] == at[1, exchange]
                        and sent_to[1, n_freed] <= at[2, exchange]
                    ):
                        memory -= sent_bytes[n_freed]
                        n_freed += 1
                    exchange += 1
                task = (kind * n_microbatches + microbatch) * rows + row
                freed = 0.0
                if kind == FORWARD:  # a recomputed row's activations count in backward
                    freed = kept_bytes[row] - outside_bytes[row] if recompute[row] else 0.0
                    freed += brief_bytes[row]
                    memory += kept_bytes[row] + brief_bytes[row]
                elif kind == (WEIGHT if flow.split_weight else BACKWARD):
                    freed = kept_bytes[row]
                    memory += missing[row]
                    missing[row] = 0.0
                if kind == BACKWARD and received.returned[row] > 0:
                    reader = received.stage[FORWARD, row]
                    sent_bytes[n_sent] = received.returned[row]
                    sent_to[0, n_sent] = reader % n_ranks
                    sent_to[1, n_sent] = positions[BACKWARD, microbatch, reader]
                    memory += sent_bytes[n_sent]
                    n_sent += 1
                passing = passing_bytes[FORWARD if kind == FORWARD else BACKWARD, row]
                peak[device] = max(peak[device], memory + passing)
                memory -= freed
                _append(task, device, following, position, first, last)
    return TaskOrder(following, position, first, last, peak)


@compiled
def last_tasks(position: Any, tasks: Any, ends: Any, before: Any) -> Any:
    """(n_ends,) the last of the tasks that each end of a bucket waits for, all on one device.

    Args:
        ends: end that waits for each task.
        before: (n_ends,) an earlier end on the same device that it waits for too, or NONE.
    """
    last = np.full(len(before), NONE, np.int64)
    for task, end in zip(tasks, ends):  # noqa: B905  (numba knows no strict)
        if last[end] == NONE or position[task] > position[last[end]]:
            last[end] = task
    for end, former in enumerate(before):
        if former != NONE and position[last[former]] > position[last[end]]:
            last[end] = last[former]
    return last


class Work(NamedTuple):
    """Shapes: R rows, E edge rows, C sums, K buckets, D devices, M microbatches."""

    n_microbatches: int
    n_resources: int
    device_of: Any  # (R,)
    seconds: Any  # (4, R) of each pass
    following: Any  # (4 M R,) next task on the device, or NONE
    first: Any  # (D,)
    edge_source: Any  # (E,) row of the producer
    edge_target: Any  # (E,) row of the consumer
    edge_bytes: Any  # (E,)
    edge_goes: Any  # (E,) whether the output is sent
    edge_returns: Any  # (E,) whether a gradient is sent back
    latency: Any  # (D, D)
    bandwidth: Any  # (D, D)
    nic: Any  # (nodes,)
    node_of: Any  # (D,)
    shares_links: bool  # transfers and buckets share links and NICs; else they wait for each other
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


class Dependents(NamedTuple):
    """The tasks that wait for each task.

    Attributes:
        ptr: (n_tasks + 1,) into tasks.
        tasks: that wait.
        waits: (n_tasks,) for how many tasks each one waits.
    """

    ptr: Any
    tasks: Any
    waits: Any


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
def find_dependents(work: Any) -> Any:
    """Find what waits for each task."""
    compute, moves_back, sums, sums_back, buckets, end = offsets(work)
    rows, n_edges, n_sums = len(work.device_of), len(work.edge_bytes), len(work.sum_is_collective)
    n_ends = len(work.sum_source) + len(work.sum_target)
    most = compute + work.n_microbatches * 4 * (n_edges + n_ends)
    most += len(work.trigger_task) + len(work.after_task)
    before, after = np.empty(most, np.int64), np.empty(most, np.int64)
    n = 0
    for task in range(compute):
        if work.following[task] != NONE:
            before[n], after[n] = task, work.following[task]
            n += 1
    for k in range(len(work.trigger_task)):
        before[n], after[n] = work.trigger_task[k], buckets + work.trigger_bucket[k]
        n += 1
    for bucket in range(len(work.after_ptr) - 1):
        for k in range(work.after_ptr[bucket], work.after_ptr[bucket + 1]):
            before[n], after[n] = buckets + bucket, work.after_task[k]
            n += 1
    for microbatch in range(work.n_microbatches):
        for way in (FORWARD, BACKWARD):
            base = (way * work.n_microbatches + microbatch) * rows
            travels = work.edge_goes if way == FORWARD else work.edge_returns
            senders = work.edge_source if way == FORWARD else work.edge_target
            readers = work.edge_target if way == FORWARD else work.edge_source
            move = (compute if way == FORWARD else moves_back) + microbatch * n_edges
            for e in range(n_edges):
                if not travels[e]:
                    continue
                before[n], after[n] = base + senders[e], move + e
                before[n + 1], after[n + 1] = move + e, base + readers[e]
                n += 2
            happens = work.sum_goes if way == FORWARD else work.sum_returns
            total = (sums if way == FORWARD else sums_back) + microbatch * n_sums
            for c in range(n_sums):
                if not happens[c]:
                    continue
                sources = work.sum_source[work.sum_source_ptr[c] : work.sum_source_ptr[c + 1]]
                targets = work.sum_target[work.sum_target_ptr[c] : work.sum_target_ptr[c + 1]]
                is_collective = work.sum_is_collective[c]
                for row in sources if is_collective or way == FORWARD else targets:
                    before[n], after[n] = base + row, total + c
                    n += 1
                for row in sources if is_collective or way == BACKWARD else targets:
                    waiting = work.following[base + row] if is_collective else base + row
                    if waiting != NONE:
                        before[n], after[n] = total + c, waiting
                        n += 1
    return _grouped(before[:n], after[:n], end)


@compiled
def _grouped(before: Any, after: Any, n_tasks: int) -> Any:
    """Pairs of a task and one that waits for it, by the first."""
    waits, ptr = np.zeros(n_tasks, np.int64), np.zeros(n_tasks + 1, np.int64)
    for k in range(len(before)):
        ptr[before[k] + 1] += 1
        waits[after[k]] += 1
    for task in range(n_tasks):
        ptr[task + 1] += ptr[task]
    place, tasks = ptr[:-1].copy(), np.empty(len(before), np.int64)
    for k in range(len(before)):
        tasks[place[before[k]]] = after[k]
        place[before[k]] += 1
    return Dependents(ptr, tasks, waits)
