"""Overhead of communication (`host_s_per_byte`), compiled.

A transfer loads the processors of both its ends evenly during its duration, and computing on these
devices gets the rest of the processor. Import lazily: it imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.plan.compiled import compiled, inlined
from harness.plan.simulate.order import NONE
from harness.plan.simulate.work import reduce_of


@compiled
def has_overhead(work: Any) -> bool:
    """Whether communication has overhead on any device."""
    return bool(work.host_s_per_byte.max() > 0)


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
