"""The price of sharded optimizer state: what each device owns, and the way of its new weights.

After the optimizer every owner sends the slices that it has updated to their other holders. Over a
group of devices that is an all-gather, which takes half of an all-reduce.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

import numpy as np

from harness.domain.owners import Slice, owners_of
from harness.plan.simulate.network import Network
from harness.plan.simulate.transfers import Floats

Group = tuple[int, ...]


def owned_bytes(slices: Iterable[Slice], n_devices: int) -> Floats:
    """(n_devices,) bytes of the weights that each device updates."""
    known = list(slices)
    owned = np.zeros(n_devices)
    for (n_bytes, _), owner in zip(known, owners_of(known), strict=True):
        owned[owner] += n_bytes
    return owned


def shared_bytes(slices: Iterable[Slice]) -> dict[Group, int]:
    """Bytes of the weights that each group of several devices holds."""
    found: dict[Group, int] = defaultdict(int)
    for n_bytes, holders in slices:
        if len(holders) > 1:
            found[holders] += n_bytes
    return dict(sorted(found.items()))


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
