"""Shards of two-dimensional convolutions: filters, and rows and columns with their halo."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.domain.partition import Interval
from harness.runtime.executor.shards.base import Held, Shard, ShardSpec
from harness.runtime.executor.shards.regions import Region, region, window

_NAMES = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")

Pair = tuple[int, int]
# The signature of F.conv2d: input, weight, bias, stride, padding, dilation, groups.
Conv2d = Callable[[Tensor, Tensor, Tensor | None, Pair, Pair, Pair, int], Tensor]


@dataclass(frozen=True, kw_only=True)
class ConvSpec:
    """A convolution's arguments; padding is (height, width) at both ends."""

    weight: Held
    bias: Held | None
    stride: Pair
    padding: Pair
    dilation: Pair
    groups: int


@dataclass(frozen=True)
class _Run:
    """Consecutive filters that one call computes, relative to the block's first."""

    filters: Interval
    channels: Interval
    groups: int


def _runs(filters: Interval, filters_each: int, channels_each: int) -> Iterator[_Run]:
    """Split filters into calls: whole groups share a call, a part of a group has its own."""
    first_group = filters[0] // filters_each
    at = filters[0]
    while at < filters[1]:
        group = at // filters_each - first_group
        n_whole = (filters[1] - at) // filters_each if at % filters_each == 0 else 0
        n_groups = max(1, n_whole)
        end = (at // filters_each + n_groups) * filters_each
        stop = end if n_whole else min(filters[1], end)
        channels = group * channels_each, (group + n_groups) * channels_each
        yield _Run((at - filters[0], stop - filters[0]), channels, n_groups)
        at = stop


class ConvShard(Shard):
    """Some filters of a convolution, for some rows and columns.

    Args:
        padding: padding of the region that `inward` gives.
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(
        self, part: ShardSpec, spec: ConvSpec, runs: list[_Run], padding: Pair, inward: Region
    ):
        super().__init__()
        self._spec, self._runs, self._padding, self._inward = spec, runs, padding, inward
        filters = part.output[1]
        sizes = part.tensor(spec.weight).shape[1:]
        self.copy_slice(part, "weight", spec.weight, (filters, *((0, size) for size in sizes)))
        self.copy_slice(part, "bias", spec.bias, (filters,))

    @property
    def is_single(self) -> bool:
        """Whether one call computes the block; false if its filters end within a group."""
        return len(self._runs) == 1

    def compute(self, inputs: tuple[Tensor, ...], conv2d: Conv2d) -> Tensor:
        """Compute the block by one call of `conv2d` per run."""
        x = self._inward.take(inputs[0])
        if self.is_single:
            return self._convolve(conv2d, x, self.weight, self.bias, self._runs[0].groups)
        parts = []
        for run in self._runs:
            filters = slice(*run.filters)
            bias = None if self.bias is None else self.bias[filters]
            channels = x[:, slice(*run.channels)]
            parts.append(self._convolve(conv2d, channels, self.weight[filters], bias, run.groups))
        return torch.cat(parts, dim=1)

    def _convolve(
        self, conv2d: Conv2d, x: Tensor, weight: Tensor, bias: Tensor | None, groups: int
    ) -> Tensor:
        spec = self._spec
        return conv2d(x, weight, bias, spec.stride, self._padding, spec.dilation, groups)

    def forward(self, *inputs: Tensor) -> Tensor:
        return self.compute(inputs, F.conv2d)


def make_conv2d(part: ShardSpec) -> ConvShard | None:
    """nn.Conv2d with zero padding, or F.conv2d, cut along any dims."""
    spec = _spec(part)
    if spec is None or len(part.wanted) != 1 or len(part.wanted[0].shape) != 4:
        return None
    n_filters, channels_each, *kernel = part.tensor(spec.weight).shape
    filters_each = n_filters // spec.groups
    filters = part.output[1]
    groups = filters[0] // filters_each, -(-filters[1] // filters_each)
    needed: list[Interval] = [
        part.output[0],
        (groups[0] * channels_each, groups[1] * channels_each),
    ]
    padding = [0, 0]
    for side in range(2):
        if part.is_side_whole(2 + side):
            padding[side] = spec.padding[side]
            needed.append(part.wanted[0].block[2 + side])
            continue
        rows = window(
            part.output[2 + side],
            kernel=kernel[side],
            stride=spec.stride[side],
            padding=spec.padding[side],
            dilation=spec.dilation[side],
        )
        needed.append(rows)
    inward = region(part.wanted[0], needed)
    if inward is None:
        return None
    runs = list(_runs(filters, filters_each, channels_each))
    return ConvShard(part, spec, runs, (padding[0], padding[1]), inward)


def pair(value: Any) -> Pair:
    """(height, width) of an argument that may be one number for both."""
    if isinstance(value, int):
        return value, value
    return (int(value[0]), int(value[-1]))


def _spec(part: ShardSpec) -> ConvSpec | None:
    module = part.module
    if isinstance(module, nn.Conv2d):
        if module.padding_mode != "zeros":
            return None
        read = {name: getattr(module, name) for name in _NAMES[3:]}
        read |= {"weight": part.held("weight"), "bias": part.held("bias")}
    else:
        read = part.named_arguments(*_NAMES) or {}
    weight, bias, padding = read.get("weight"), read.get("bias"), read.get("padding", 0)
    # 'same' may pad both ends unequally.
    if not isinstance(weight, Held) or isinstance(padding, str):
        return None
    if bias is not None and not isinstance(bias, Held):
        return None
    return ConvSpec(
        weight=weight,
        bias=bias,
        stride=pair(read.get("stride", 1)),
        padding=pair(padding),
        dilation=pair(read.get("dilation", 1)),
        groups=int(read.get("groups", 1)),
    )
