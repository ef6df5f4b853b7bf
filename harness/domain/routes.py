"""Routes of a value: which pieces travel to a reader, and which all-reduces serve readers instead.
Also the buckets in which gradients travel.

    part    one block of one operator on one device
    piece   the region that one part shares with a wanted block
    copies  devices that compute the same block

Every copy has the whole value, and the whole gradient of it:

    forward    a reader takes each block from one copy, on its own device if possible
    backward   a part takes gradients from all readers of its block; if readers are copies of each
               other, from one of them, on its own device if possible

Without copies, backward is the reverse of forward. Simulator and executor share these rules.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.domain.partition import nearest

# From this number of devices on, one all-reduce adds up an output's partial sums. Between two
# devices an exchange moves as many bytes at half the latency.
FEWEST_SUMMED = 3
# DDP's default bucket size.
BUCKET_BYTES = 25 << 20
# Fewest elements of a linear layer's weight whose gradient the executor writes into memory of its
# own, which it keeps from step to step: 4 MiB of fp32, more than the cache of a core. At 1 MiB the
# autograd function in Python takes longer than the copies that it saves.
LARGE_ELEMENTS = 1 << 20

Ints = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


def first_bucket_bytes(bucket_bytes: int) -> int:
    """Size of the first bucket of gradients, as in DDP.

    By default it is small, so that communication starts early; a given size holds for all buckets.
    """
    return 1 << 20 if bucket_bytes == BUCKET_BYTES else bucket_bytes


class Parts(NamedTuple):
    """The parts of a value.

    Attributes:
        bounds: (n_parts, n_dims, 2) of their blocks.
        devices: (n_parts,)
        copies: the copies of each part, ascending; empty if no part has any.
    """

    bounds: Ints
    devices: Ints
    copies: Sequence[tuple[int, ...]]


class Pieces(NamedTuple):
    """What each part shares with a wanted block.

    Attributes:
        low, high: (n_parts, n_dims) bounds.
        n_elements: (n_parts,) 0 if it shares nothing.
        goes: (n_parts,) whether the reader takes its value from the part.
        returns: (n_parts,) whether the part takes its gradient from the reader.
    """

    low: Ints
    high: Ints
    n_elements: Ints
    goes: Flags
    returns: Flags


def find_pieces(parts: Parts, wanted: Ints, device: int, copies: tuple[int, ...]) -> Pieces:
    """The pieces of a wanted block.

    Args:
        wanted: (n_dims, 2) bounds of the block.
        device: the reader's.
        copies: devices of the readers, if they are copies of each other.
    """
    low = np.maximum(parts.bounds[:, :, 0], wanted[:, 0])
    high = np.minimum(parts.bounds[:, :, 1], wanted[:, 1])
    n_elements = np.maximum(high - low, 0).prod(axis=1)
    goes = returns = n_elements > 0
    if parts.copies:
        served = [nearest(holders, device) for holders in parts.copies]
        goes = goes & (parts.devices == served)
    if copies:
        readers = [nearest(copies, holder) for holder in parts.devices.tolist()]
        returns = returns & (np.array(readers) == device)
    return Pieces(low, high, n_elements, goes, returns)


def summing_devices(holders: Sequence[int], *, is_whole: bool) -> tuple[int, ...] | None:
    """The devices that can all-reduce a region: more than two that hold it once each; None if
    there are no such.

    Args:
        holders: the devices of its pieces.
        is_whole: every piece is the whole region.
    """
    devices = tuple(sorted(holders))
    is_each_once = len(set(devices)) == len(devices) >= FEWEST_SUMMED
    return devices if is_each_once and is_whole else None


def are_read_together(devices: tuple[int, ...], first_readers: Mapping[int, int]) -> bool:
    """Whether exactly these devices want a region, and for the same operator first, so that they
    start its all-reduce in the same order.

    Args:
        first_readers: the first operator that reads it, by device.
    """
    return tuple(sorted(first_readers)) == devices and len(set(first_readers.values())) == 1
