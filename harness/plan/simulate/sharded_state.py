"""What sharded state costs and saves: parts of each device, rounds of gradients, final all-gather.

A reduce-scatter and an all-gather each take half of an all-reduce. `gathers` has those of sharded
parameters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from harness.domain.strategy import ShardState
from harness.plan.simulate.network import Network
from harness.plan.simulate.tables import Buckets, Tables
from harness.plan.simulate.transfers import Floats

if TYPE_CHECKING:
    from harness.plan.simulate.gathers import Unit

Group = tuple[int, ...]
Slice = tuple[int, Group]

# Buckets of gradients in memory at once: the one that backward fills, and one on its way, which is
# sent and received.
_N_BUCKETS_IN_MEMORY = 3


def shards_gradients(shard_state: ShardState) -> bool:
    return shard_state in ("gradients", "parameters")


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
    """(n_devices,) seconds from the end of each device's optimizer to its last new weights.

    Args:
        ready: (n_devices,) end of the optimizer.
    """
    done = ready.copy()
    for group, n_bytes in shared.items():
        members = list(group)
        done[members] = done[members].max() + network.all_reduce(group, n_bytes).duration_s / 2
    return done - ready


def gradient_bytes(tables: Tables, weights: Floats, owned: Floats, state: ShardState) -> Floats:
    """(n_devices,) bytes of gradients at the peak."""
    whole = weights * tables.options.gradient_bytes_per_weight_byte
    if not shards_gradients(state):
        return whole
    found = owned * tables.options.gradient_bytes_per_weight_byte
    buckets = tables.buckets()
    sizes: dict[Group, list[float]] = defaultdict(list)
    for group, n_bytes in zip(buckets.groups, buckets.n_bytes.tolist(), strict=True):
        sizes[group].append(n_bytes)
    for group, own in sizes.items():
        found[list(group)] += min(_N_BUCKETS_IN_MEMORY * max(own), 2 * sum(own))
    return found


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
