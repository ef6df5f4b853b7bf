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


@dataclass(frozen=True)
class Relative:
    """The position of a region within a tensor that holds a larger block."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    is_all: bool

    @classmethod
    def of(cls, region: Block, held: Block) -> Relative:
        starts = tuple(a - b for (a, _), (b, _) in zip(region, held, strict=True))
        sizes = tuple(stop - start for start, stop in region)
        return cls(starts, sizes, region == held)

    def of_tensor(self, tensor: Tensor) -> Tensor:
        """A view of the region; dims beyond the block's stay whole."""
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, size)
        return tensor


class Crop(nn.Module):
    """Crops a region of a tensor; `is_zero` sets it to 0, because another part adds the value."""

    def __init__(self, region: Relative, *, is_zero: bool) -> None:
        super().__init__()
        self._region, self._is_zero = region, is_zero

    def forward(self, x: Tensor) -> Tensor:
        cropped = self._region.of_tensor(x)
        return cropped * 0 if self._is_zero else cropped


class _Cat(nn.Module):
    """Concatenates regions of parts along one dim."""

    def __init__(self, held: Sequence[Relative], dim: int) -> None:
        super().__init__()
        self._held, self._dim = held, dim

    def forward(self, *parts: Tensor) -> Tensor:
        pieces = [region.of_tensor(part) for region, part in zip(self._held, parts, strict=True)]
        return torch.cat(pieces, dim=self._dim)


class _Fill(nn.Module):
    """Places regions of parts anywhere, and adds them where they overlap."""

    def __init__(
        self, held: Sequence[Relative], places: Sequence[Relative], sizes: tuple[int, ...]
    ) -> None:
        super().__init__()
        self._held, self._places, self._sizes = held, places, sizes

    def forward(self, *parts: Tensor) -> Tensor:
        rest = parts[0].shape[len(self._sizes) :]
        whole = parts[0].new_zeros((*self._sizes, *rest))
        for region, place, part in zip(self._held, self._places, parts, strict=True):
            pads = [0] * (2 * len(rest))
            sides = list(zip(place.starts, place.sizes, self._sizes, strict=True))
            for start, size, full in reversed(sides):
                pads += [start, full - start - size]
            whole = whole + F.pad(region.of_tensor(part), pads)
        return whole


def assembled(
    held: Sequence[Relative], places: Sequence[Relative], block: Block, *, is_sum: bool
) -> nn.Module:
    """The module that assembles a want from local parts, by the region of each in the part that
    holds it and in the want."""
    if len(held) == 1:
        return Crop(held[0], is_zero=False)
    sizes = tuple(stop - start for start, stop in block)
    differing = [k for k, size in enumerate(sizes) if any(p.sizes[k] != size for p in places)]
    if len(differing) == 1 and not is_sum:
        (dim,) = differing
        order = [place.starts[dim] for place in places]
        if order == sorted(order):
            return _Cat(held, dim)
    return _Fill(held, places, sizes)
