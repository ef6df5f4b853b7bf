"""Pad and crop the block of an input that a task receives to the region that it computes with.

received    [lo ........ hi)          of an input of `size` rows
needed   [a ....... b)                may reach beyond the input, into its padding
region   |pad|......|crop|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from harness.domain.partition import Interval
from harness.runtime.executor.shards.base import Wanted


@dataclass(frozen=True)
class Region:
    """The padding and crops that turn a received block into a region.

    Attributes:
        pads: before and after each dim, the last dim first, as for `F.pad`.
        crops: (dim, start, length) of the padded tensor.
    """

    pads: tuple[int, ...] = ()
    crops: tuple[tuple[int, int, int], ...] = ()

    def take(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """The region of a received block; a view if nothing is padded."""
        if self.pads:
            x = F.pad(x, self.pads, value=fill)
        for dim, start, length in self.crops:
            x = x.narrow(dim, start, length)
        return x


def region(wanted: Wanted, needed: Sequence[Interval]) -> Region | None:
    """The padding and crops to the needed region; None if the received block lacks a part."""
    if len(needed) != len(wanted.block):
        return None
    pads: list[int] = []
    crops: list[tuple[int, int, int]] = []
    sides = zip(wanted.shape.values(), wanted.block, needed, strict=True)
    for dim, (size, (low, high), (start, stop)) in enumerate(sides):
        real = max(0, start), min(size, stop)
        if real[0] < real[1] and not low <= real[0] < real[1] <= high:
            return None
        before, after = max(0, low - start), max(0, stop - high)
        pads = [before, after, *pads]
        skipped = start - (low - before)
        if skipped or stop - start < before + (high - low) + after:
            crops.append((dim, skipped, stop - start))
    return Region(tuple(pads) if any(pads) else (), tuple(crops))


def window(
    output: Interval, *, kernel: int, stride: int, padding: int, dilation: int = 1
) -> Interval:
    """The input rows that output rows of a convolution or pool read, padding included.

    `domain.partition.input_interval` clips them to the input.
    """
    start = output[0] * stride - padding
    return start, (output[1] - 1) * stride - padding + dilation * (kernel - 1) + 1
