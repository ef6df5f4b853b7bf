"""What sharded state costs and saves: parts of each device, rounds of gradients, final all-gather.

A reduce-scatter and an all-gather each take half of an all-reduce. `gathers` has those of sharded
parameters, and `layouts.pricing` prices whole layouts by the same rules.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from harness.domain.strategy import SHARD_STATES, ShardState
from harness.plan.simulate.network import Network
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.tables import Buckets, Tables
from harness.plan.simulate.transfers import Floats

if TYPE_CHECKING:
    from harness.plan.simulate.gathers import Unit

Group = tuple[int, ...]
Slice = tuple[int, Group]


def shards_gradients(shard_state: ShardState) -> bool:
    return shard_state in ("gradients", "parameters")


def useful_states(n_holders: int, options: SimulatorOptions) -> tuple[ShardState, ...]:
    """The states that free memory where so many devices hold a weight."""
    if n_holders == 1:
        return ()
    return SHARD_STATES[1:] if options.n_optimizer_states > 0 else SHARD_STATES[2:]


def fill(sizes: Sequence[float], limit: float) -> list[int]:
    """Cut a row of sizes into units, each of which ends with the size that reaches the limit.

    Returns:
        One more than the position of each unit's last size.
    """
    ends, filled = [], 0.0
    for end, size in enumerate(sizes, 1):
        filled += size
        if filled >= limit or end == len(sizes):
            ends.append(end)
            filled = 0.0
    return ends


def bucket_memory(sizes: Sequence[float]) -> list[float]:
    """Bytes of one group's buckets of gradients that are in memory while backward fills each one:
    it, and the one before, which is on its way and so both sent and received. The last bucket
    stays on its way until the next microbatch's first one."""
    return [size + 2 * before for size, before in zip(sizes, (0.0, *sizes), strict=False)]


def unit_memory(sizes: Sequence[float]) -> float:
    """Bytes of one group's units of weights that are in memory at once: that in use, and the
    next."""
    return max(sum(sizes[k : k + 2]) for k in range(len(sizes)))


def owned_bytes(slices: Iterable[Slice], n_devices: int) -> Floats:
    """(n_devices,) bytes of the weights that each device updates: its part of each slice."""
    owned = np.zeros(n_devices)
    for n_bytes, holders in slices:
        owned[list(holders)] += n_bytes / len(holders)
    return owned


def shared_bytes(slices: Iterable[Slice], gathered: Iterable[Unit] = ()) -> dict[Group, int]:
    """Bytes of weights that each group of several devices holds, without units that are gathered
    before use."""
    found: dict[Group, int] = defaultdict(int)
    for n_bytes, holders in slices:
        if len(holders) > 1:
            found[holders] += n_bytes
    for unit in set(gathered):
        found[unit.group] -= unit.n_bytes
    return {group: n_bytes for group, n_bytes in sorted(found.items()) if n_bytes > 0}


def gather_seconds(network: Network, shared: Mapping[Group, int], ready: Floats) -> Floats:
    """(n_devices,) seconds from the end of each device's optimizer to its last new weights; groups
    whose rings use one interface share it.

    Args:
        ready: (n_devices,) end of the optimizer.
    """
    done, found = ready.copy(), {g: network.all_reduce(g, n) for g, n in shared.items()}
    busy: dict[int, float] = defaultdict(float)
    for one in found.values():
        for resource, seconds in one.occupied:
            busy[resource] += seconds * network.is_interface(resource)
    for group, one in found.items():
        members = list(group)
        slowest = max((busy[resource] for resource, _ in one.occupied), default=0.0)
        done[members] = done[members].max() + max(one.duration_s, slowest) / 2
    return done - ready


def passing_bytes(tables: Tables, n_microbatches: int) -> tuple[Floats, Floats]:
    """(n_ops, n_devices) bytes of sharded gradients' buckets in memory while forward, and while
    backward, of each operator runs."""
    buckets = tables.buckets()
    own_of: dict[Group, list[int]] = defaultdict(list)
    for number, group in enumerate(buckets.groups):
        own_of[group].append(number)
    forward, backward = np.zeros(tables.active.shape), np.zeros(tables.active.shape)
    for group, numbers in own_of.items():
        devices = list(group)
        sizes = buckets.n_bytes[numbers].tolist()
        last = 2 * sizes[-1] * (n_microbatches > 1)
        now = np.full(tables.n_ops, last)  # by operator, in the order of backward
        for number, n_bytes in zip(numbers, bucket_memory(sizes), strict=True):
            now[: max(buckets.members[number]) + 1] = n_bytes
        forward[:, devices] += last
        backward[:, devices] += now[:, None]
    return forward, backward


def in_rounds(buckets: Buckets, n_microbatches: int) -> Buckets:
    """The buckets once for each microbatch, whose gradients are summed after its backward."""
    n, n_ends = len(buckets.groups), len(buckets.end_device)
    rounds = np.arange(n_microbatches)
    last_of: dict[Group, int] = {}  # first end of each group's last bucket
    for end, bucket in enumerate(buckets.end_bucket.tolist()):
        group = buckets.groups[bucket]
        if buckets.end_device[end] == group[0]:
            last_of[group] = end
    before = np.tile(buckets.end_before, (n_microbatches, 1))
    before += np.where(buckets.end_before >= 0, rounds[:, None] * n_ends, 0)
    for end in np.flatnonzero(buckets.end_before < 0).tolist():
        group = buckets.groups[int(buckets.end_bucket[end])]
        place = group.index(int(buckets.end_device[end]))
        before[1:, end] = last_of[group] + place + rounds[:-1] * n_ends
    return replace(
        buckets,
        n_bytes=np.tile(buckets.n_bytes, n_microbatches),
        members=buckets.members * n_microbatches,
        groups=buckets.groups * n_microbatches,
        n_rounds=np.full(n * n_microbatches, 0.5),
        microbatch=np.repeat(rounds, n),
        end_device=np.tile(buckets.end_device, n_microbatches),
        end_bucket=_shifted(buckets.end_bucket, n_microbatches, n),
        end_before=before.ravel(),
        trigger_place=np.tile(buckets.trigger_place, n_microbatches),
        trigger_end=_shifted(buckets.trigger_end, n_microbatches, n_ends),
    )


def _shifted(numbers: np.typing.NDArray[np.int64], n: int, by: int) -> np.typing.NDArray[np.int64]:
    """An array n times, each time higher."""
    found: np.typing.NDArray[np.int64] = (numbers + by * np.arange(n)[:, None]).ravel()
    return found
