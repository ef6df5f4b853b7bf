"""The fixed order in which every device works through its tasks, compiled, and what it then holds.

A row is an operator on a device that has a block of it; there are R of them. A compute task is
(pass, microbatch, row) and has the number (pass * M + microbatch) * R + row, with M microbatches.
Import this module lazily: it imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

FORWARD, BACKWARD, WEIGHT, RECOMPUTE = 0, 1, 2, 3
N_PASSES = 4
NONE = -1


@njit(cache=True, inline="always")
def _held_bytes(
    what: int, again: bool, split_weight: bool, kept_bytes: float, outside_bytes: float
) -> Any:
    """Bytes of activations that a task takes when it begins, and those that its end frees.

    Args:
        again: its stage recomputes.
    """
    if what == FORWARD:
        return kept_bytes, kept_bytes - outside_bytes if again else 0.0
    if what == RECOMPUTE:
        return kept_bytes - outside_bytes, 0.0
    return 0.0, kept_bytes if what == (WEIGHT if split_weight else BACKWARD) else 0.0


@njit(cache=True)
def order_tasks(
    n_microbatches: int,
    row_at: Any,  # (operators, devices) the row, or NONE
    receives: Any,  # (4, R) whether a pass of a row waits for transfers
    n_first: int,  # exchanges that are posted before the step, and ahead in a wait: given, since
    n_ahead: int,  # the cache of compiled code would not see them change
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
        position: (n_tasks,) how many tasks its device has before it.
        first, last: (D,) tasks of each device.
        gate: (n_tasks,) the task after which a task's receives are posted, or NONE: the last before
            a wait some exchanges ahead of its own.
        peak: (D,) most bytes of activations held at once.
    """
    rows, n_devices = len(kept_bytes), row_at.shape[1]
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
            again = recompute[stage]
            for what in (RECOMPUTE, kind):
                # A backward action of a recomputing stage runs its forward once more first.
                if what == RECOMPUTE and not (kind == BACKWARD and again):
                    continue
                for k in range(high - low):
                    forwards = what in (FORWARD, RECOMPUTE)
                    op = stage_ops[low + k] if forwards else stage_ops[high - 1 - k]
                    row = row_at[op, device]
                    if row == NONE:
                        continue
                    task = (what * n_microbatches + microbatch) * rows + row
                    taken, freed = _held_bytes(
                        what, again, split_weight, kept_bytes[row], outside_bytes[row]
                    )
                    if receives[what, row]:
                        if n_exchanges >= n_first:
                            posted = max(0, n_exchanges - n_ahead)
                            gate[task] = before_wait[posted % n_ahead]
                        before_wait[n_exchanges % n_ahead] = last[device]
                        n_exchanges += 1
                    memory += taken
                    peak[device] = max(peak[device], memory)
                    memory -= freed
                    if last[device] == NONE:
                        first[device], position[task] = task, 0
                    else:
                        following[last[device]] = task
                        position[task] = position[last[device]] + 1
                    last[device] = task
    return following, position, first, last, gate, peak


@njit(cache=True)
def last_tasks(position: Any, tasks: Any, ends: Any, before: Any) -> Any:
    """(n_ends,) on its device the last of the tasks that an end waits for.

    Args:
        ends: of each task.
        before: (n_ends,) a former end on the same device that it waits for too, or NONE.
    """
    found = np.full(len(before), NONE, np.int64)
    for task, end in zip(tasks, ends):  # noqa: B905  (numba knows no strict)
        if found[end] == NONE or position[task] > position[found[end]]:
            found[end] = task
    for end, former in enumerate(before):
        if former != NONE and position[found[former]] > position[found[end]]:
            found[end] = found[former]
    return found
