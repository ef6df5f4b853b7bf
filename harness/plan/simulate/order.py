"""The fixed order of each device's tasks, and its peak of memory; compiled.

A row is an operator on a device that has a block of it; there are R of them. A compute task is
(pass, microbatch, row) and has the number (pass * M + microbatch) * R + row, with M microbatches.
Import this module lazily: it imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.plan.compiled import compiled, inlined

FORWARD, BACKWARD, WEIGHT, RECOMPUTE = 0, 1, 2, 3
N_PASSES = 4
NONE = -1


@inlined
def _held_bytes(
    pass_: int,
    recomputes: bool,
    split_weight: bool,
    kept_bytes: float,
    outside_bytes: float,
    brief_bytes: float,
) -> Any:
    """Bytes of activations that a task allocates at its start and frees at its end. Recomputed ones
    count in backward.

    Args:
        recomputes: its stage recomputes.
    """
    if pass_ == FORWARD:
        freed = kept_bytes - outside_bytes if recomputes else 0.0
        return kept_bytes + brief_bytes, freed + brief_bytes
    return 0.0, kept_bytes if pass_ == (WEIGHT if split_weight else BACKWARD) else 0.0


@compiled
def order_tasks(
    n_microbatches: int,
    row_at: Any,  # (operators, devices) the row, or NONE
    receives: Any,  # (4, R) whether a pass of a row waits for transfers
    n_first: int,  # exchanges posted before the step, and ahead in a wait; arguments, because
    n_ahead: int,  # numba's cache would not notice changed constants
    kept_bytes: Any,  # (R,) held from forward to backward: outputs and received inputs
    outside_bytes: Any,  # (R,) the part that recomputation keeps: what others sent or read
    brief_bytes: Any,  # (R,) held during its forward only
    passing_bytes: Any,  # (2, R) of gradients to other owners, in memory during forward, backward
    gradient_bytes: Any,  # (R,) allocated by the first backward, and held to the end of the step
    stage_ptr: Any,  # (S + 1,) into stage_ops
    stage_ops: Any,  # operators by stage, in topological order
    segment_of: Any,  # (operators,) what its stage recomputes together; consecutive in stage_ops
    recompute: Any,  # (S,)
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
            recomputes = recompute[stage]
            for pass_ in (RECOMPUTE, kind):
                # A backward action of a recomputing stage first runs forward again.
                if pass_ == RECOMPUTE and not (kind == BACKWARD and recomputes):
                    continue
                segment = NONE
                for k in range(high - low):
                    forwards = pass_ in (FORWARD, RECOMPUTE)
                    op = stage_ops[low + k] if forwards else stage_ops[high - 1 - k]
                    row = row_at[op, device]
                    if row == NONE:
                        continue
                    task = (pass_ * n_microbatches + microbatch) * rows + row
                    taken, freed = _held_bytes(
                        pass_,
                        recomputes,
                        split_weight,
                        kept_bytes[row],
                        outside_bytes[row],
                        brief_bytes[row],
                    )
                    if receives[pass_, row]:
                        if n_exchanges >= n_first:
                            posted = max(0, n_exchanges - n_ahead)
                            gate[task] = before_wait[posted % n_ahead]
                        before_wait[n_exchanges % n_ahead] = last[device]
                        n_exchanges += 1
                    if recomputes and pass_ == BACKWARD and segment_of[op] != segment:
                        segment, begin = segment_of[op], high - 1 - k
                        while begin > low and segment_of[stage_ops[begin - 1]] == segment:
                            begin -= 1
                        for place in range(begin, high - k):
                            again = row_at[stage_ops[place], device]
                            if again != NONE:
                                memory += kept_bytes[again] - outside_bytes[again]
                                peak[device] = max(peak[device], memory + brief_bytes[again])
                    if pass_ == (WEIGHT if split_weight else BACKWARD):
                        memory += missing[row]
                        missing[row] = 0.0
                    memory += taken
                    passing = passing_bytes[FORWARD if forwards else BACKWARD, row]
                    peak[device] = max(peak[device], memory + passing)
                    memory -= freed
                    if last[device] == NONE:
                        first[device], position[task] = task, 0
                    else:
                        following[last[device]] = task
                        position[task] = position[last[device]] + 1
                    last[device] = task
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
