"""Which device keeps the optimizer's state of each slice of the weights, where it is sharded.

Sharded state is ZeRO's first stage (Rajbhandari et al., 2020) at the grain of slices: of the
devices that hold a slice one updates it, and sends it to the others. Simulator and executor use
this rule.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

Slice = tuple[int, tuple[int, ...]]


def owners_of(slices: Sequence[Slice]) -> list[int]:
    """The owner of each slice: of its holders the one that owns the least, largest slices first.

    Args:
        slices: (size, ascending devices that hold it), in an order that all ranks share.
    """
    owned: dict[int, int] = defaultdict(int)
    found = [0] * len(slices)
    for k in sorted(range(len(slices)), key=lambda k: (-slices[k][0], k)):
        size, holders = slices[k]
        found[k] = min(holders, key=lambda device: (owned[device], device))
        owned[found[k]] += size
    return found
