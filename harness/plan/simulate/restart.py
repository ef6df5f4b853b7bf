"""Which events of the last run a changed strategy leaves as they were, compiled.

The log of a run is cut before the first event that the change touches: a task that is gone or takes
another time, one that is followed by another task on its device, or that sets another transfer or
all-reduce free. Everything before it can be replayed, since nothing new can have come between.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

from harness.plan.simulate.order import BACKWARD, FORWARD, NONE
from harness.plan.simulate.work import offsets


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
def _is_same_list(
    old_ptr: Any, old_items: Any, row: int, new_ptr: Any, moved_row: int, moved: Any
) -> bool:
    """Whether a row's list has the same items as before."""
    n = old_ptr[row + 1] - old_ptr[row]
    if n != new_ptr[moved_row + 1] - new_ptr[moved_row]:
        return False
    n_kept = 0
    for k in range(old_ptr[row], old_ptr[row + 1]):
        n_kept += moved[old_items[k]] != NONE
    return bool(n_kept == n)


@njit(cache=True)
def _count(head: Any, following: Any, task: int) -> int:
    n, t = 0, head[task]
    while t != NONE:
        n += 1
        t = following[t]
    return n


@njit(cache=True)
def _is_untouched(
    task: int, moved: int, old: Any, old_links: Any, new: Any, new_links: Any, begins: Any, to: Any,
    mapping: Any,
) -> bool:  # fmt: skip
    """Whether a compute task does to others what it did before."""
    rows = len(old.device_of)
    what = task // (old.n_microbatches * rows)
    row = task % rows
    moved_row = mapping.row[row]
    if old.seconds[what, row] != new.seconds[what, moved_row]:
        return False
    after, then = old.following[task], new.following[moved]
    if after != NONE:
        after = _move_task(after, old, new, begins, to, mapping)
        if after == NONE:
            return False
    if after != then:
        return False
    if what == FORWARD and not _is_same_list(
        old_links.out_ptr, old_links.out_edges, row, new_links.out_ptr, moved_row, mapping.edge
    ):
        return False
    if what == BACKWARD and not _is_same_list(
        old_links.in_ptr, old_links.in_edges, row, new_links.in_ptr, moved_row, mapping.edge
    ):
        return False
    if not _is_same_list(
        old_links.source_ptr, old_links.source_sums, row, new_links.source_ptr, moved_row,
        mapping.sum,
    ) or not _is_same_list(
        old_links.target_ptr, old_links.target_sums, row, new_links.target_ptr, moved_row,
        mapping.sum,
    ):  # fmt: skip
        return False
    t = old_links.trigger_head[task]
    while t != NONE:
        if mapping.bucket[old.trigger_bucket[t]] == NONE:
            return False
        t = old_links.trigger_next[t]
    return bool(
        _count(old_links.trigger_head, old_links.trigger_next, task)
        == _count(new_links.trigger_head, new_links.trigger_next, moved)
    )


@njit(cache=True)
def untouched_prefix(
    log: Any, old: Any, old_links: Any, new: Any, new_links: Any, mapping: Any
) -> Any:
    """The events that come first in a new run as they did in the old one, by their new numbers.

    Both are of the same flow: stages, schedule and microbatches.
    """
    begins, to = offsets(old), offsets(new)
    for device in range(len(old.first)):
        task = old.first[device]
        moved = NONE
        if task != NONE:
            moved = _move_task(task, old, new, begins, to, mapping)
        # A device that begins with another task does so at once.
        if moved != new.first[device]:
            return np.empty(0, np.int64)
    prefix = np.empty(len(log), np.int64)
    for k in range(len(log)):
        task = log[k]
        moved = _move_task(task, old, new, begins, to, mapping)
        if moved == NONE:
            return prefix[:k]
        if task < begins[0] and not _is_untouched(
            task, moved, old, old_links, new, new_links, begins, to, mapping
        ):
            return prefix[:k]
        prefix[k] = moved
    return prefix
