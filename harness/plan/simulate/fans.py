"""What leaves an operator: transfers to other devices, and all-reduces within a microbatch.

A device fetches a region of an output once, for the first of its operators that reads it; the
summed gradient goes back once, after the last of them (the same one: backward runs in reverse).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


# Bytes read and written for each byte that is copied, and for each that is added to another.
COPIES, ADDS = 2, 3


@dataclass(frozen=True)
class Wants:
    """What one consumer's blocks read of one producer: each region once for each device.

    Attributes:
        device, region: (n,) who wants which region, by a number that is equal for equal regions.
        want, source, n_bytes: (m,) the pieces that other devices hold, by position of the want.
        n_streamed: (m,) bytes of memory read and written to put the want together, of which the
            piece is a part; 0 where it is the whole want, which is used as it arrives.
    """

    n_devices: int
    device: Ints
    region: Ints
    want: Ints
    source: Ints
    n_bytes: Floats
    n_streamed: Floats

    @cached_property
    def keys(self) -> Ints:
        """(n,) region and device as one number."""
        return self.region * self.n_devices + self.device

    def moved(self, kept: npt.NDArray[np.bool_] | None = None) -> Moved:
        """What goes from device to device; for some of the wants, or for all."""
        source, want, n_bytes, streamed = self.source, self.want, self.n_bytes, self.n_streamed
        if kept is not None:
            chosen = kept[want]
            source, want, n_bytes = source[chosen], want[chosen], n_bytes[chosen]
            streamed = streamed[chosen]
        n = self.n_devices
        pair = source * n + self.device[want]
        amounts = np.bincount(pair, weights=n_bytes, minlength=n * n).astype(float)
        pairs: Ints = np.flatnonzero(amounts)
        copies = np.bincount(pair, weights=streamed, minlength=n * n).astype(float)
        return Moved(pairs // n, pairs % n, amounts[pairs], copies[pairs])


class Moved(NamedTuple):
    """By pair of devices: bytes that travel, and bytes streamed where they arrive."""

    source: Ints
    target: Ints
    n_bytes: Floats
    n_streamed: Floats


class Reader(NamedTuple):
    """A consumer of an output, as its fan sees it."""

    edge: int
    operator: int
    wants: Wants


class Sum(NamedTuple):
    """An all-reduce in the middle of a microbatch.

    Attributes:
        operator: whose output is summed, or which normalises.
        is_norm: statistics of a batch norm, after which the device goes on; else partial sums
            of an output, which its readers wait for.
        n_bytes: of one all-reduce, forward and backward.
        n_rounds: all-reduces one after another, forward and backward.
        sources, targets: rows that hold the parts, and that read the sum (operator * n_devices +
            device).
    """

    operator: int
    is_norm: bool
    group: tuple[int, ...]
    n_bytes: tuple[int, int]
    n_rounds: tuple[int, int]
    sources: tuple[int, ...]
    targets: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Fan:
    """All of it for one producer.

    Attributes:
        source, target: (m,) rows of each transfer, as operator * n_devices + device.
        n_streamed: (m,) bytes of memory read and written to put together what arrives.
        edge: (m,) number of the edge of the graph that it belongs to.
        crosses: (m,) whether several transfers leave its source's node for others, and several
            arrive at its target's from others: flows that share interfaces at both ends.
    """

    source: Ints
    target: Ints
    n_bytes: Floats
    n_streamed: Floats
    edge: Ints
    crosses: npt.NDArray[np.bool_]
    sums: tuple[Sum, ...]


def make_fan(producer: int, node_of: Ints, readers: Sequence[Reader], sums: tuple[Sum, ...]) -> Fan:
    """Merge what the readers fetch, first readers first.

    Args:
        node_of: (n_devices,).
        sums: all-reduces of the producer; if one of them sums its output, nothing else travels.
    """
    nothing, n_devices = np.zeros(0, dtype=np.int64), len(node_of)
    if any(not one.is_norm for one in sums) or not readers:
        crosses = np.zeros(0, dtype=np.bool_)
        return Fan(nothing, nothing, np.zeros(0), np.zeros(0), nothing, crosses, sums)
    parts = []
    seen = nothing
    for k, reader in enumerate(readers):
        kept = ~np.isin(reader.wants.keys, seen) if k else None
        parts.append((reader, reader.wants.moved(kept)))
        if k + 1 < len(readers):
            seen = np.concatenate([seen, reader.wants.keys])
    sources = np.concatenate([moved.source for _, moved in parts])
    targets = np.concatenate([moved.target for _, moved in parts])
    return Fan(
        source=sources + producer * n_devices,
        target=np.concatenate([moved.target + r.operator * n_devices for r, moved in parts]),
        n_bytes=np.concatenate([moved.n_bytes for _, moved in parts]),
        n_streamed=np.concatenate([moved.n_streamed for _, moved in parts]),
        edge=np.concatenate(
            [np.full(len(moved.source), r.edge, dtype=np.int64) for r, moved in parts]
        ),
        crosses=_crosses(node_of[sources], node_of[targets]),
        sums=sums,
    )


def _crosses(source: Ints, target: Ints) -> npt.NDArray[np.bool_]:
    """By transfer from node to node, whether it has company at both of its ends."""
    pairs = {(a, b) for a, b in zip(source.tolist(), target.tolist(), strict=True) if a != b}
    n_out, n_in = Counter(a for a, _ in pairs), Counter(b for _, b in pairs)
    found = [
        a != b and n_out[a] > 1 and n_in[b] > 1
        for a, b in zip(source.tolist(), target.tolist(), strict=True)
    ]
    return np.array(found, dtype=np.bool_)


def partial_sums(
    producer: int,
    n_devices: int,
    holders: dict[int, tuple[set[int], int]],
    readers: Sequence[Reader],
) -> tuple[Sum, ...]:
    """All-reduces of an output of partial sums, if that is how the executor adds them up.

    It does where more than two devices hold the parts of a region, and just these devices want
    it, all of it, for the same operator first. Else every part travels to whoever wants it, and is
    added there.

    Args:
        holders: by region of the output, devices that hold partial sums of it, and its bytes.
    """
    if not holders or min(len(devices) for devices, _ in holders.values()) <= 2:
        return ()
    found: dict[int, dict[int, int]] = {region: {} for region in holders}
    for reader in readers:
        pairs = zip(reader.wants.region.tolist(), reader.wants.device.tolist(), strict=True)
        for region, device in pairs:
            if region not in found:
                return ()
            found[region].setdefault(device, reader.operator * n_devices + device)
    if any(set(found[region]) != devices for region, (devices, _) in holders.items()):
        return ()
    if any(len({row // n_devices for row in rows.values()}) > 1 for rows in found.values()):
        return ()  # devices that read it first in other operators would start sums in another order
    return tuple(
        Sum(
            operator=producer,
            is_norm=False,
            group=tuple(sorted(devices)),
            n_bytes=(n_bytes, n_bytes),
            n_rounds=(1, 1),
            sources=tuple(producer * n_devices + d for d in sorted(devices)),
            targets=tuple(found[region][d] for d in sorted(devices)),
        )
        for region, (devices, n_bytes) in holders.items()
    )


def norm_sums(
    operator: int, n_devices: int, groups: dict[tuple[int, int], set[int]]
) -> tuple[Sum, ...]:
    """All-reduces of a batch norm by the statistics of the whole microbatch.

    Forward, sums and then squares of floats; backward, the gradients of both in double precision.

    Args:
        groups: devices that hold blocks of the same interval of features.
    """
    return tuple(
        Sum(
            operator=operator,
            is_norm=True,
            group=tuple(sorted(devices)),
            n_bytes=(4 * (stop - start), 16 * (stop - start)),
            n_rounds=(2, 1),
            sources=tuple(operator * n_devices + d for d in sorted(devices)),
            targets=(),
        )
        for (start, stop), devices in groups.items()
        if len(devices) > 1
    )


def whole_bytes(volume: int, per_element: float) -> int:
    """Bytes of a region, at least one."""
    return max(1, math.ceil(volume * per_element))
