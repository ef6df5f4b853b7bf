"""Pad, crop and assemble blocks, differentiably.

received    [lo ........ hi)          of an input of `size` rows
needed   [a ....... b)                may reach beyond the input, into its padding
region   |pad|......|crop|
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.domain.partition import Block, Interval


@dataclass(frozen=True)
class Region:
    """The padding and crops that turn a received block into a region.

    Attributes:
        pads: before and after each dim, the last dim first, as for `F.pad`.
        crops: (dim, start, length) of the padded tensor.
        fill: value of the padding.
    """

    pads: tuple[int, ...] = ()
    crops: tuple[tuple[int, int, int], ...] = ()
    fill: float = 0.0

    @classmethod
    def of(cls, region: Block, held: Block) -> Region:
        """The crops to a region within a block that contains it; further dims stay whole."""
        sides = enumerate(zip(region, held, strict=True))
        cut = (
            (dim, start - first, stop - start)
            for dim, ((start, stop), (first, last)) in sides
            if (start, stop) != (first, last)
        )
        return cls(crops=tuple(cut))

    @property
    def is_all(self) -> bool:
        return not (self.pads or self.crops)

    def take(self, x: Tensor) -> Tensor:
        """The region of a received block; a view if nothing is padded."""
        if self.pads:
            x = F.pad(x, self.pads, value=self.fill)
        for dim, start, length in self.crops:
            x = x.narrow(dim, start, length)
        return x


class LackingError(Exception):
    """A received block lacks a part of what a shard needs, so that the cut has no shard."""


def window(
    output: Interval, *, kernel: int, stride: int, padding: int, dilation: int = 1
) -> Interval:
    """The input rows that output rows of a convolution or pool read, padding included.

    `domain.partition.input_interval` clips them to the input.
    """
    start = output[0] * stride - padding
    return start, (output[1] - 1) * stride - padding + dilation * (kernel - 1) + 1


class Crop(nn.Module):
    """Crops a region of a tensor; `is_zero` sets it to 0, because another part adds the value."""

    def __init__(self, region: Region, *, is_zero: bool) -> None:
        super().__init__()
        self._region, self._is_zero = region, is_zero

    def forward(self, x: Tensor) -> Tensor:
        cropped = self._region.take(x)
        return cropped * 0 if self._is_zero else cropped


class _Cat(nn.Module):
    """Concatenates regions of parts along one dim."""

    def __init__(self, held: Sequence[Region], dim: int) -> None:
        super().__init__()
        self._held, self._dim = held, dim

    def forward(self, *parts: Tensor) -> Tensor:
        pieces = [region.take(part) for region, part in zip(self._held, parts, strict=True)]
        return torch.cat(pieces, dim=self._dim)


class _Fill(nn.Module):
    """Places regions of parts anywhere, and adds them where they overlap."""

    def __init__(
        self, held: Sequence[Region], places: Sequence[Region], sizes: Sequence[int]
    ) -> None:
        super().__init__()
        self._held, self._sizes = held, sizes
        self._pads = [[0, 0] * len(sizes) for _ in places]  # the last dim first
        for place, pads in zip(places, self._pads, strict=True):
            for dim, start, length in place.crops:
                at = 2 * (len(sizes) - 1 - dim)
                pads[at : at + 2] = start, sizes[dim] - start - length

    def forward(self, *parts: Tensor) -> Tensor:
        rest = parts[0].shape[len(self._sizes) :]
        whole = parts[0].new_zeros((*self._sizes, *rest))
        for region, pads, part in zip(self._held, self._pads, parts, strict=True):
            whole = whole + F.pad(region.take(part), [0, 0] * len(rest) + pads)
        return whole


def assembled(
    held: Sequence[Region], places: Sequence[Region], block: Block, *, is_sum: bool
) -> nn.Module:
    """The module that assembles a want from local parts, by the region of each in the part that
    holds it and in the want."""
    if len(held) == 1:
        return Crop(held[0], is_zero=False)
    cut = {dim for place in places for dim, _, _ in place.crops}
    if len(cut) == 1 and not is_sum:
        order = [start for place in places for _, start, _ in place.crops]
        if order == sorted(order):
            return _Cat(held, *cut)
    return _Fill(held, places, [stop - start for start, stop in block])
