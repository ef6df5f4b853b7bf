"""Which events of the last run a changed strategy leaves as they were, compiled.

The log of a run is cut before the first event that the change touches: a task that is gone or takes
another time, or one that tells other tasks of its end than before, or tasks that wait for more or
fewer others. Everything before it can be replayed, since nothing new can have come between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from harness.plan.simulate.order import BACKWARD, FORWARD, NONE
from harness.plan.simulate.work import freed_by_sum, offsets


class Mapping(NamedTuple):
    """New numbers of what is as it was; NONE for the rest."""

    row: Any
    edge: Any
    sum: Any
    bucket: Any


@njit(cache=True)
def _move_task(task: int, old: Any, new: Any, begins: Any, to: Any, mapping: Any) -> int:
    """The new number of a task, or NONE."""
    compute, back, sums, sums_back, buckets, _ = begins
    if task < compute:
        rest, row = divmod(task, len(old.device_of))
        moved = mapping.row[row]
        return NONE if moved == NONE else rest * len(new.device_of) + moved
    if task < sums:
        is_back = task >= back
        m, e = divmod(task - (back if is_back else compute), len(old.edge_bytes))
        moved = mapping.edge[e]
        base = to[1] if is_back else to[0]
        return NONE if moved == NONE else base + m * len(new.edge_bytes) + moved
    if task < buckets:
        is_back = task >= sums_back
        m, c = divmod(task - (sums_back if is_back else sums), len(old.sum_is_norm))
        moved = mapping.sum[c]
        base = to[3] if is_back else to[2]
        return NONE if moved == NONE else base + m * len(new.sum_is_norm) + moved
    moved = mapping.bucket[task - buckets]
    return NONE if moved == NONE else to[4] + moved


@njit(cache=True)
def _n_targets(work: Any, links: Any, begins: Any, task: int, targets: Any) -> int:
    """Put all that an event tells of its end into `targets`, but for receives that it lets post.

    Returns:
        how many there are.
    """
    compute, back, sums, sums_back, buckets, _ = begins
    rows, n_edges, n_sums = len(work.device_of), len(work.edge_bytes), len(work.sum_is_norm)
    m_all, n = work.n_microbatches, 0
    if task >= buckets:
        return 0
    if task >= sums:
        is_back = task >= sums_back
        m, c = divmod(task - (sums_back if is_back else sums), n_sums)
        n_freed, freed = freed_by_sum(work, c, m, is_back)
        targets[:n_freed] = freed[:n_freed]
        return int(n_freed)
    if task >= compute:
        is_back = task >= back
        m, e = divmod(task - (back if is_back else compute), n_edges)
        which = BACKWARD if is_back else FORWARD
        row = work.edge_source[e] if is_back else work.edge_target[e]
        targets[0] = (which * m_all + m) * rows + row
        return 1
    what, rest = divmod(task, m_all * rows)
    m, row = divmod(rest, rows)
    if work.following[task] != NONE:
        targets[n] = work.following[task]
        n += 1
    if what == FORWARD:
        for k in range(links.out_ptr[row], links.out_ptr[row + 1]):
            targets[n] = compute + m * n_edges + links.out_edges[k]
            n += 1
        for k in range(links.source_ptr[row], links.source_ptr[row + 1]):
            targets[n] = sums + m * n_sums + links.source_sums[k]
            n += 1
    elif what == BACKWARD:
        for k in range(links.in_ptr[row], links.in_ptr[row + 1]):
            if work.edge_returns[links.in_edges[k]]:
                targets[n] = back + m * n_edges + links.in_edges[k]
                n += 1
        for k in range(links.source_ptr[row], links.source_ptr[row + 1]):
            c = links.source_sums[k]
            if work.sum_is_norm[c] and work.sum_returns[c]:
                targets[n] = sums_back + m * n_sums + c
                n += 1
        for k in range(links.target_ptr[row], links.target_ptr[row + 1]):
            c = links.target_sums[k]
            if work.sum_returns[c]:
                targets[n] = sums_back + m * n_sums + c
                n += 1
    t = links.trigger_head[task]
    while t != NONE:
        targets[n] = buckets + work.trigger_bucket[t]
        n += 1
        t = links.trigger_next[t]
    return n


@njit(cache=True)
def _is_untouched(
    old: Any, new: Any, begins: Any, to: Any, mapping: Any, old_waits: Any, new_waits: Any,
    targets: Any, n_old: int, others: Any, n_new: int,
) -> bool:  # fmt: skip
    """Whether an event tells the same tasks as before, and they wait for as many others."""
    if n_old != n_new:
        return False
    for k in range(n_old):
        moved = _move_task(targets[k], old, new, begins, to, mapping)
        if moved == NONE or old_waits[targets[k]] != new_waits[moved]:
            return False
        # Lists keep their order, but for buckets, whose number alone then tells.
        is_there = False
        for i in range(n_new):
            is_there = is_there or others[i] == moved
        if not is_there:
            return False
    return True


@njit(cache=True)
def _posts_alike(
    task: int, old: Any, old_links: Any, new: Any, begins: Any, to: Any, mapping: Any,
    old_waits: Any, new_waits: Any,
) -> bool:  # fmt: skip
    """Whether transfers whose receives a task lets post wait for as many things as before."""
    move = old_links.gate_head[task]
    while move != NONE:
        moved = _move_task(begins[0] + move, old, new, begins, to, mapping)
        if moved != NONE and old_waits[begins[0] + move] != new_waits[moved]:
            return False
        move = old_links.gate_next[move]
    return True


@njit(cache=True)
def untouched_prefix(
    log: Any, old: Any, old_links: Any, old_waits: Any, new: Any, new_links: Any, new_waits: Any,
    mapping: Any,
) -> Any:  # fmt: skip
    """The events that come first in a new run as they did in the old one, by their new numbers.

    Both are of the same flow: stages, schedule and microbatches.
    """
    begins, to = offsets(old), offsets(new)
    prefix = np.empty(len(log), np.int64)
    for device in range(len(new.first)):
        begun, begins_now = old.first[device], new.first[device]
        if begins_now == NONE or new_waits[begins_now] > 0:
            continue
        # It starts at once: so it must have done before.
        if begun == NONE or old_waits[begun] > 0:
            return prefix[:0]
        if _move_task(begun, old, new, begins, to, mapping) != begins_now:
            return prefix[:0]
    targets, others = np.empty(begins[5], np.int64), np.empty(to[5], np.int64)
    rows = len(old.device_of)
    for k in range(len(log)):
        task = log[k]
        moved = _move_task(task, old, new, begins, to, mapping)
        if moved == NONE or old_waits[task] != new_waits[moved]:
            return prefix[:k]
        if task < begins[0]:
            what, row = task // (old.n_microbatches * rows), task % rows
            if old.seconds[what, row] != new.seconds[what, mapping.row[row]]:
                return prefix[:k]
            if not _posts_alike(
                task, old, old_links, new, begins, to, mapping, old_waits, new_waits
            ):
                return prefix[:k]
        n_old = _n_targets(old, old_links, begins, task, targets)
        n_new = _n_targets(new, new_links, to, moved, others)
        if not _is_untouched(
            old, new, begins, to, mapping, old_waits, new_waits, targets, n_old, others, n_new
        ):
            return prefix[:k]
        prefix[k] = moved
    return prefix
