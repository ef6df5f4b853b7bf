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

from harness.domain.graph import Operator
from harness.domain.key_forms import POSITIONS, Rounds, own_key_elements, rounds, scores_share
from harness.domain.partition import Block, n_replicas, volume
from harness.domain.routes import Parts, Pieces, are_read_together, find_pieces, summing_devices
from harness.domain.strategy import OperatorPlan, copies_of

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


# Memory traffic of copying a byte, of adding it to another, of rounding it to half and back, and of
# averaging it over replicas: a copy, four products or sums, and an update (`engines.local_sgd`).
COPIES, ADDS, ROUNDS, AVERAGES = 2, 3, 3, 16


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
        n_held: (m,) the piece's share of the bytes of its assembled want, which its reader keeps.
        shared: by region, the all-reduce that may replace the pieces.
    """

    n_devices: int
    device: Ints
    region: Ints
    want: Ints
    source: Ints
    n_bytes: Floats
    n_streamed: Floats
    n_held: Floats
    goes: npt.NDArray[np.bool_]
    returns: npt.NDArray[np.bool_]
    shared: dict[int, Shared]

    @cached_property
    def keys(self) -> Ints:
        """(n,) region and device as one number."""
        return self.region * self.n_devices + self.device

    def moved(
        self, producer: int, consumer: int, kept: npt.NDArray[np.bool_] | None = None
    ) -> Edges:
        """Merge the pieces between each pair of devices; of the `kept` wants, or of all."""
        ways = self.goes + 2 * self.returns
        n = self.n_devices
        pair = (self.source * n + self.device[self.want]) * _N_WAYS + ways
        amounts = np.stack([self.n_bytes, self.n_streamed, self.n_held])
        if kept is not None:
            chosen = kept[self.want]
            pair, amounts = pair[chosen], amounts[:, chosen]
        found: Ints = np.flatnonzero(np.bincount(pair))  # unknown bytes are 0
        summed = [np.bincount(pair, weights=one).astype(float)[found] for one in amounts]
        pairs, ways = np.divmod(found, _N_WAYS)
        return Edges(
            source=pairs // n + producer * n,
            target=pairs % n + consumer * n,
            n_bytes=summed[0],
            n_streamed=summed[1],
            n_held=summed[2],
            goes=ways % 2 > 0,
            returns=ways // 2 > 0,
        )


class Reader(NamedTuple):
    """A consumer of an output, and the regions that it reads."""

    operator: int
    wants: Wants


class Passes(NamedTuple):
    """One pass of an attention whose devices give each other keys and values, with the seconds of
    computing in each round, beside which messages travel."""

    rounds: Rounds
    hidden_s: float


class Sum(NamedTuple):
    """An all-reduce within a microbatch, or messages around a ring of devices.

    Attributes:
        operator: operator whose output is summed, or batch norm, or loss, or attention.
        is_collective: the operator waits for it: statistics of a batch norm or of a loss that is
            cut by classes, keys of an attention; else partial sums, for which its readers wait.
        n_bytes: bytes of one all-reduce or message of the largest microbatch, forward and backward.
        n_rounds: number of consecutive all-reduces or messages, forward and backward; may be 0.
        passes: forward and backward of messages; None for an all-reduce.
        sources, targets: rows that hold the parts, and that read the sum (operator * n_devices +
            device).
    """

    operator: int
    is_collective: bool
    group: tuple[int, ...]
    n_bytes: tuple[int, int]
    n_rounds: tuple[int, int]
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    passes: tuple[Passes, Passes] | None = None

    @property
    def is_statistics(self) -> bool:
        return self.is_collective and self.passes is None

    def size(self, way: int, share: float) -> int:
        """`n_bytes` for a share of the samples, on which the bytes of statistics do not depend."""
        return self.n_bytes[way] if self.is_statistics else round(self.n_bytes[way] * share)


@dataclass(frozen=True, eq=False)
class Edges:
    """Transfers between devices, producer by producer, and all-reduces within a microbatch.

    Attributes:
        source, target: (m,) rows, as operator * n_devices + device.
        n_streamed: (m,) bytes of memory read and written to assemble the received pieces.
        n_held: (m,) bytes of the assembled region.
        goes, returns: (m,) see `Wants`.
    """

    source: Ints
    target: Ints
    n_bytes: Floats
    n_streamed: Floats
    n_held: Floats
    goes: npt.NDArray[np.bool_]
    returns: npt.NDArray[np.bool_]
    sums: tuple[Sum, ...] = ()

    @classmethod
    def joined(cls, parts: Sequence[Edges], sums: tuple[Sum, ...] = ()) -> Edges:
        """All transfers and all-reduces of the parts, and further all-reduces."""
        columns = ("source", "target", "n_bytes", "n_streamed", "n_held", "goes", "returns")
        joined = {name: np.concatenate([getattr(one, name) for one in parts]) for name in columns}
        return cls(**joined, sums=sums + tuple(each for one in parts for each in one.sums))


def make_transfers(producer: int, readers: Sequence[Reader], sums: tuple[Sum, ...]) -> Edges:
    """Merge the wants of the readers, first readers first.

    Args:
        sums: all-reduces of the producer; if one sums its output, there are no other transfers.
    """
    nothing = np.zeros(0, dtype=np.int64)
    if any(not one.is_collective for one in sums) or not readers:
        none, no = np.zeros(0), np.zeros(0, dtype=np.bool_)
        return Edges(nothing, nothing, none, none, none, no, no, sums)
    parts = []
    seen = nothing
    for k, reader in enumerate(readers):
        kept = ~np.isin(reader.wants.keys, seen) if k else None
        parts.append(reader.wants.moved(producer, reader.operator, kept))
        if k + 1 < len(readers):
            seen = np.concatenate([seen, reader.wants.keys])
    return Edges.joined(parts, sums)


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
    if len({one.devices for one in shared.values()}) < len(shared):
        return ()  # devices may want two regions in unlike orders
    return tuple(
        Sum(
            operator=producer,
            is_collective=False,
            group=one.devices,
            n_bytes=(one.n_bytes, one.n_bytes),
            n_rounds=(int(one.goes), int(one.returns)),
            sources=tuple(producer * n_devices + d for d in one.devices),
            targets=tuple(found[region][d] * n_devices + d for d in one.devices),
        )
        for region, one in shared.items()
    )


def collective(
    operator: int,
    n_devices: int,
    group: Sequence[int],
    n_bytes: tuple[int, int],
    n_rounds: tuple[int, int],
) -> Sum:
    """One for which the operator itself waits on each device of a group."""
    return Sum(
        operator=operator,
        is_collective=True,
        group=tuple(group),
        n_bytes=n_bytes,
        n_rounds=n_rounds,
        sources=tuple(operator * n_devices + device for device in group),
        targets=(),
    )


def key_sums(
    operator: Operator,
    position: int,
    plan: OperatorPlan,
    shape: dict[str, int],
    blocks: Sequence[Block],
    seconds: Sequence[Floats],
    per_element: float,
) -> tuple[Sum, ...]:
    """Messages by which the devices of an attention give each other keys and values.

    Args:
        position: of the operator in the graph.
        shape: of the operator, in the order of its blocks.
        seconds: (n_devices,) forward and backward.
    """
    at = list(shape).index(POSITIONS)
    rings: dict[Block, list[tuple[Block, int]]] = {}
    for block, device in zip(blocks, plan.devices, strict=True):
        rings.setdefault((*block[:at], *block[at + 1 :]), []).append((block, device))
    found: list[Sum] = []
    for ring in rings.values():
        group = tuple(device for _, device in sorted(ring, key=lambda one: one[0][at]))
        n_elements = max(
            own_key_elements(operator, shape, dict(zip(shape, block, strict=True)))
            for block, _ in ring
        )
        n_bytes = whole_bytes(math.ceil(n_elements), per_element)
        share = scores_share(operator, shape) / len(group)
        ways = [
            Passes(
                rounds(plan.keys, len(group), is_backward=bool(way)),
                share * float(max(each[device] for device in group)),
            )
            for way, each in enumerate(seconds)
        ]
        n_rounds = (ways[0].rounds.n_messages, ways[1].rounds.n_messages)
        sums = collective(position, len(seconds[0]), group, (n_bytes, n_bytes), n_rounds)
        found.append(sums._replace(passes=(ways[0], ways[1])))
    return tuple(found)


def whole_bytes(volume: int, per_element: float) -> int:
    """Bytes of a region, at least one."""
    return max(1, math.ceil(volume * per_element))


class PricedPieces:
    """Collects the pieces of wants, with their bytes, by the bounds (n_parts, n_dims, 2) of the
    producer's blocks."""

    def __init__(
        self, plan: OperatorPlan, held: Ints, bytes_per_element: float, *, is_summed: bool
    ) -> None:
        has_copies = n_replicas(plan.partition) > 1
        copies = [copies_of(plan, k) for k in range(len(plan.devices))] if has_copies else []
        self._parts = Parts(held, np.array(plan.devices), copies)
        self._bytes, self._is_summed = bytes_per_element, is_summed
        self._rows: list[tuple[float, ...]] = []

    def add(self, number: int, bounds: Ints, device: int, copies: tuple[int, ...]) -> Shared | None:
        """Add the pieces of one want that other devices hold, or receive gradients of.

        Args:
            bounds: (n_dims, 2) of the wanted region.
            copies: devices of the readers, if they are copies of each other.

        Returns:
            The all-reduce that may replace the pieces, or None.
        """
        found, holders = find_pieces(self._parts, bounds, device, copies), self._parts.devices
        elements, goes, returns = found.n_elements, found.goes, found.returns
        n_pieces, is_remote = np.count_nonzero(goes), holders != device
        sent = (elements * (goes & is_remote)).sum()
        each, held = 0.0, 1.0
        if n_pieces > 1:  # local pieces are copied or added too
            each = (ADDS if self._is_summed else COPIES) * (elements * goes).sum() / max(sent, 1)
            held = volume(bounds.tolist()) / max(sent, 1)
        for part in np.flatnonzero((goes | returns) & is_remote).tolist():
            n_bytes = float(elements[part]) * self._bytes
            amounts = n_bytes, n_bytes * each * goes[part], n_bytes * held * goes[part]
            self._rows.append((number, holders[part], *amounts, goes[part], returns[part]))
        return self._shared(found, volume(bounds.tolist()), copies)

    def _shared(self, found: Pieces, whole: int, copies: tuple[int, ...]) -> Shared | None:
        goes, returns = self._is_summed, not copies
        if not (goes or (returns and self._parts.copies)):
            return None
        held = found.n_elements > 0
        is_whole = bool((found.n_elements[held] == whole).all())
        devices = summing_devices(self._parts.devices[held].tolist(), is_whole=is_whole)
        if devices is None:
            return None
        return Shared(devices, whole_bytes(whole, self._bytes), goes, returns)

    def columns(self) -> Floats:
        """(7, n) want, source, bytes, bytes streamed and held, whether it goes and returns."""
        return np.array(self._rows, dtype=np.float64).reshape(-1, 7).T
