"""Which events of the last run a changed strategy leaves as they were, compiled.

The log of a run is cut before the first event that the change touches: a task that is gone or takes
another time, or one that tells other tasks of its end than before, or tasks that wait for more or
fewer others. Everything before it can be replayed, since nothing new can have come between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from harness.plan.simulate.order import BACKWARD, FORWARD, N_PASSES, NONE
from harness.plan.simulate.work import freed_by_sum, offsets


class Mapping(NamedTuple):
    """New numbers of what is as it was; NONE for the rest."""

    row: Any
    edge: Any
    sum: Any
    bucket: Any


@njit(cache=True)
def _map_range(found: Any, begin: int, to: int, moved: Any, n_new: int, n_repeats: int) -> None:
    """New numbers of `n_repeats` times as many tasks as `moved` has, from `begin` on."""
    n_old = len(moved)
    for k in range(n_repeats):
        for i in range(n_old):
            if moved[i] != NONE:
                found[begin + k * n_old + i] = to + k * n_new + moved[i]


@njit(cache=True)
def _map_tasks(old: Any, new: Any, begins: Any, to: Any, mapping: Any) -> Any:
    """The new number of each task, or NONE."""
    m = old.n_microbatches
    found = np.full(begins[5], NONE, np.int64)
    _map_range(found, 0, 0, mapping.row, len(new.device_of), N_PASSES * m)
    # Forward and backward of a kind lie one after the other.
    _map_range(found, begins[0], to[0], mapping.edge, len(new.edge_bytes), 2 * m)
    _map_range(found, begins[2], to[2], mapping.sum, len(new.sum_is_norm), 2 * m)
    _map_range(found, begins[4], to[4], mapping.bucket, 0, 1)
    return found


@njit(cache=True, inline="always")
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
            if work.edge_goes[links.out_edges[k]]:
                targets[n] = compute + m * n_edges + links.out_edges[k]
                n += 1
        for k in range(links.source_ptr[row], links.source_ptr[row + 1]):
            if work.sum_goes[links.source_sums[k]]:
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
    moved: Any, old_waits: Any, new_waits: Any, targets: Any, n_old: int, others: Any, n_new: int
) -> bool:
    """Whether an event tells the same tasks as before, and they wait for as many others."""
    if n_old != n_new:
        return False
    for k in range(n_old):
        # What is kept keeps its order too.
        one = moved[targets[k]]
        if one == NONE or one != others[k] or old_waits[targets[k]] != new_waits[one]:
            return False
    return True


@njit(cache=True)
def _posts_alike(
    first: int, gate_next: Any, base: int, moved: Any, old_waits: Any, new_waits: Any
) -> bool:
    """Whether transfers whose receives a task lets post wait for as many things as before."""
    move = first
    while move != NONE:
        one = moved[base + move]
        if one != NONE and old_waits[base + move] != new_waits[one]:
            return False
        move = gate_next[move]
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
    moved = _map_tasks(old, new, begins, to, mapping)
    prefix = np.empty(len(log), np.int64)
    for device in range(len(old.first)):
        begun, begins_now = old.first[device], new.first[device]
        if begins_now == NONE or new_waits[begins_now] > 0:
            continue
        # It starts at once: so it must have done before.
        if begun == NONE or old_waits[begun] > 0 or moved[begun] != begins_now:
            return prefix[:0]
    targets, others = np.empty(begins[5], np.int64), np.empty(to[5], np.int64)
    rows = len(old.device_of)
    for k in range(len(log)):
        task = log[k]
        now = moved[task]
        if now == NONE or old_waits[task] != new_waits[now]:
            return prefix[:k]
        if task < begins[0]:
            what, row = task // (old.n_microbatches * rows), task % rows
            if old.seconds[what, row] != new.seconds[what, mapping.row[row]]:
                return prefix[:k]
            if not _posts_alike(
                old_links.gate_head[task], old_links.gate_next, begins[0], moved, old_waits,
                new_waits,
            ):  # fmt: skip
                return prefix[:k]
        n_old = _n_targets(old, old_links, begins, task, targets)
        n_new = _n_targets(new, new_links, to, now, others)
        if not _is_untouched(moved, old_waits, new_waits, targets, n_old, others, n_new):
            return prefix[:k]
        prefix[k] = now
    return prefix
