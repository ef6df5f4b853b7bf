"""Transfers of an operator's output to other devices, and all-reduces within a microbatch.

A device fetches a region of an output once, for the first of its operators that reads it. It sends
the summed gradient back once, after the same operator, which is the last to run backward.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.domain.routes import are_read_together

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


# Memory traffic of copying a byte, and of adding it to another.
COPIES, ADDS = 2, 3


# Forward, backward, both, neither.
_N_WAYS = 4


class Shared(NamedTuple):
    """A region that several devices each hold in full.

    Attributes:
        goes: the values are partial sums, which forward adds up.
        returns: each device needs the gradients of all readers, which backward adds up.
    """

    devices: tuple[int, ...]
    n_bytes: int
    goes: bool
    returns: bool


@dataclass(frozen=True)
class Wants:
    """The regions of one producer that one consumer's blocks read, each once per device.

    Attributes:
        device, region: (n,) device of each want, and number of its region; equal for equal regions
            if the readers are copies on the same devices, or are not copies.
        want, source, n_bytes: (m,) pieces on other devices: position of the want, device, bytes.
        goes, returns: (m,) whether the piece is sent, and whether its gradient is sent back; not
            always both if an end has copies (see `domain.routes`).
        n_streamed: (m,) the piece's share of the bytes of memory read and written to assemble its
            want; 0 if it is the whole want, which needs no assembling.
        shared: by region, the all-reduce that may replace the pieces.
    """

    n_devices: int
    device: Ints
    region: Ints
    want: Ints
    source: Ints
    n_bytes: Floats
    n_streamed: Floats
    goes: npt.NDArray[np.bool_]
    returns: npt.NDArray[np.bool_]
    shared: dict[int, Shared]

    @cached_property
    def keys(self) -> Ints:
        """(n,) region and device as one number."""
        return self.region * self.n_devices + self.device

    def moved(self, kept: npt.NDArray[np.bool_] | None = None) -> Moved:
        """Merge the pieces between each pair of devices; of the `kept` wants, or of all."""
        source, want, n_bytes, streamed = self.source, self.want, self.n_bytes, self.n_streamed
        ways = self.goes + 2 * self.returns
        if kept is not None:
            chosen = kept[want]
            source, want, n_bytes = source[chosen], want[chosen], n_bytes[chosen]
            streamed, ways = streamed[chosen], ways[chosen]
        n = self.n_devices
        pair = (source * n + self.device[want]) * _N_WAYS + ways
        amounts = np.bincount(pair, weights=n_bytes).astype(float)
        found: Ints = np.flatnonzero(np.bincount(pair))  # unknown bytes are 0
        copies = np.bincount(pair, weights=streamed).astype(float)
        pairs, ways = np.divmod(found, _N_WAYS)
        return Moved(
            source=pairs // n,
            target=pairs % n,
            n_bytes=amounts[found],
            n_streamed=copies[found],
            goes=ways % 2 > 0,
            returns=ways // 2 > 0,
        )


class Moved(NamedTuple):
    """Bytes sent between pairs of devices, by direction, and bytes streamed at the receiver."""

    source: Ints
    target: Ints
    n_bytes: Floats
    n_streamed: Floats
    goes: npt.NDArray[np.bool_]
    returns: npt.NDArray[np.bool_]


class Reader(NamedTuple):
    """A consumer of an output, and the regions that it reads."""

    edge: int
    operator: int
    wants: Wants


class Sum(NamedTuple):
    """An all-reduce within a microbatch.

    Attributes:
        operator: operator whose output is summed, or batch norm, or loss.
        is_norm: statistics of a batch norm or of a loss that is cut by classes, for which the
            operator waits; else partial sums of an output, for which its readers wait.
        n_bytes: bytes of one all-reduce, forward and backward.
        n_rounds: number of consecutive all-reduces, forward and backward; may be 0.
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
class ProducerTransfers:
    """Transfers and all-reduces that leave one producer.

    Attributes:
        source, target: (m,) rows of each transfer, as operator * n_devices + device.
        n_streamed: (m,) bytes of memory read and written to assemble the received pieces.
        goes, returns: (m,) see `Wants`.
        edge: (m,) number of its edge in the graph.
    """

    source: Ints
    target: Ints
    n_bytes: Floats
    n_streamed: Floats
    goes: npt.NDArray[np.bool_]
    returns: npt.NDArray[np.bool_]
    edge: Ints
    sums: tuple[Sum, ...]


def make_transfers(
    producer: int, n_devices: int, readers: Sequence[Reader], sums: tuple[Sum, ...]
) -> ProducerTransfers:
    """Merge the wants of the readers, first readers first.

    Args:
        sums: all-reduces of the producer; if one sums its output, there are no other transfers.
    """
    nothing = np.zeros(0, dtype=np.int64)
    if any(not one.is_norm for one in sums) or not readers:
        none, no = np.zeros(0), np.zeros(0, dtype=np.bool_)
        return ProducerTransfers(nothing, nothing, none, none, no, no, nothing, sums)
    parts = []
    seen = nothing
    for k, reader in enumerate(readers):
        kept = ~np.isin(reader.wants.keys, seen) if k else None
        parts.append((reader, reader.wants.moved(kept)))
        if k + 1 < len(readers):
            seen = np.concatenate([seen, reader.wants.keys])
    return ProducerTransfers(
        source=np.concatenate([moved.source + producer * n_devices for _, moved in parts]),
        target=np.concatenate([moved.target + r.operator * n_devices for r, moved in parts]),
        n_bytes=np.concatenate([moved.n_bytes for _, moved in parts]),
        n_streamed=np.concatenate([moved.n_streamed for _, moved in parts]),
        goes=np.concatenate([moved.goes for _, moved in parts]),
        returns=np.concatenate([moved.returns for _, moved in parts]),
        edge=np.concatenate(
            [np.full(len(moved.source), r.edge, dtype=np.int64) for r, moved in parts]
        ),
        sums=sums,
    )


def shared_sums(producer: int, n_devices: int, readers: Sequence[Reader]) -> tuple[Sum, ...]:
    """All-reduces of an output, or of its gradient (see `domain.routes`).

    Else each device that wants it receives all parts and adds them. Wants without transfers do not
    matter.
    """
    if not any(reader.wants.shared for reader in readers):
        return ()
    found: dict[int, dict[int, int]] = {}
    shared: dict[int, Shared] = {}
    for reader in readers:
        wants = reader.wants
        moved = set(wants.want.tolist())
        pairs = zip(wants.region.tolist(), wants.device.tolist(), strict=True)
        for number, (region, device) in enumerate(pairs):
            if region in wants.shared:
                shared[region] = wants.shared[region]
                found.setdefault(region, {}).setdefault(device, reader.operator)
            elif number in moved:
                return ()
    if not all(are_read_together(shared[k].devices, first) for k, first in found.items()):
        return ()
    return tuple(
        Sum(
            operator=producer,
            is_norm=False,
            group=one.devices,
            n_bytes=(one.n_bytes, one.n_bytes),
            n_rounds=(int(one.goes), int(one.returns)),
            sources=tuple(producer * n_devices + d for d in one.devices),
            targets=tuple(found[region][d] * n_devices + d for d in one.devices),
        )
        for region, one in shared.items()
    )


def norm_sums(
    operator: int, n_devices: int, groups: dict[tuple[int, int], set[int]]
) -> tuple[Sum, ...]:
    """All-reduces of a batch norm with the statistics of the whole microbatch.

    Forward, sums and then squares in FP32; backward, the gradients of both in double precision.

    Args:
        groups: devices that hold blocks of the same interval of features, by interval.
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


def loss_sum(operator: int, n_devices: int, n_targets: int, devices: set[int]) -> Sum:
    """The all-reduce of a loss that is cut by classes: numbers in FP32, for each of its targets one
    for each device and one more; forward only."""
    return Sum(
        operator=operator,
        is_norm=True,
        group=tuple(sorted(devices)),
        n_bytes=(4 * n_targets * (len(devices) + 1), 1),
        n_rounds=(1, 0),
        sources=tuple(operator * n_devices + d for d in sorted(devices)),
        targets=(),
    )


def whole_bytes(volume: int, per_element: float) -> int:
    """Bytes of a region, at least one."""
    return max(1, math.ceil(volume * per_element))
