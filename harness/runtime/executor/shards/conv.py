"""Shards of two-dimensional convolutions and pooling: channels, rows and columns, with halos."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.domain.partition import Interval
from harness.runtime.executor.shards.base import Held, Shard, ShardSpec, Wanted
from harness.runtime.executor.shards.regions import Region, window

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
        super().__init__([inward])
        self._spec, self._runs, self._padding = spec, runs, padding
        self.copy_slice(part, "weight", spec.weight, (part.output[1],))
        self.copy_slice(part, "bias", spec.bias, (part.output[1],))

    @property
    def is_single(self) -> bool:
        """Whether one call computes the block; false if its filters end within a group."""
        return len(self._runs) == 1

    def compute(self, x: Tensor, conv2d: Conv2d = F.conv2d) -> Tensor:
        """Compute the block by one call of `conv2d` per run."""
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
        needed.append(_window(part, side, kernel, spec.stride, spec.padding, spec.dilation))
    inward = part.region(needed)
    runs = list(_runs(filters, filters_each, channels_each))
    return ConvShard(part, spec, runs, (padding[0], padding[1]), inward)


def _window(part: ShardSpec, side: int, *numbers: Sequence[int]) -> Interval:
    """The rows or columns of the input that a block reads.

    Args:
        numbers: kernel, stride, padding and dilation, of height and width each.
    """
    kernel, stride, padding, dilation = (each[side] for each in numbers)
    output = part.output[2 + side]
    return window(output, kernel=kernel, stride=stride, padding=padding, dilation=dilation)


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


_MAX = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices")
_AVERAGE = (
    "input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad",
    "divisor_override",
)  # fmt: skip
_ADAPTIVE = ("input", "output_size", "return_indices")
# By name: the function, and its arguments in order.
_POOLS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "max_pool2d": (F.max_pool2d, _MAX),
    "avg_pool2d": (F.avg_pool2d, _AVERAGE),
    "adaptive_avg_pool2d": (F.adaptive_avg_pool2d, _ADAPTIVE),
    "adaptive_max_pool2d": (F.adaptive_max_pool2d, _ADAPTIVE),
}
_MODULES = {
    "MaxPool2d": "max_pool2d",
    "AvgPool2d": "avg_pool2d",
    "AdaptiveAvgPool2d": "adaptive_avg_pool2d",
    "AdaptiveMaxPool2d": "adaptive_max_pool2d",
}


class PoolShard(Shard):
    """Some channels, rows and columns of a pool.

    Args:
        outward: crops the function's output.
        counts: divisor of each window, (rows, columns); None if the function divides.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        options: dict[str, Any],
        inward: Region,
        *,
        outward: Region = Region(),  # noqa: B008
        counts: Tensor | None = None,
    ) -> None:
        super().__init__([inward])
        self._function, self._options, self._outward = function, options, outward
        self.register_buffer("counts", counts, persistent=False)
        self.counts: Tensor | None

    def compute(self, x: Tensor) -> Tensor:
        pooled = self._function(x, **self._options)
        if self.counts is not None:
            self.counts = self.counts.to(pooled)  # copies once
            pooled = pooled / self.counts
        return self._outward.take(pooled)


def make_pool(part: ShardSpec) -> PoolShard | None:
    """Max, average and adaptive pooling, cut along any dims."""
    name = _MODULES.get(part.function, part.function)
    if name not in _POOLS or len(part.wanted) != 1 or len(part.wanted[0].shape) != 4:
        return None
    function, names = _POOLS[name]
    options = _options(part, names)
    if options is None or options.pop("return_indices", False):
        return None
    if name.startswith("adaptive"):
        return _adaptive(part, function, options)
    if part.is_side_whole(2) and part.is_side_whole(3):
        inward = part.region((*part.output[:2], *_whole_sides(part)))
        return PoolShard(function, options, inward)
    return _windowed(part, name, options)


def _options(part: ShardSpec, names: tuple[str, ...]) -> dict[str, Any] | None:
    """The pool's arguments without its input."""
    if part.module is not None:
        return {
            name: getattr(part.module, name) for name in names[1:] if hasattr(part.module, name)
        }
    read = part.named_arguments(*names)
    if read is None:
        return None
    read.pop("input", None)
    return read


def _whole_sides(part: ShardSpec) -> tuple[Interval, Interval]:
    _, _, height, width = part.wanted[0].shape.values()
    return (0, height), (0, width)


def _adaptive(
    part: ShardSpec, function: Callable[..., Tensor], options: dict[str, Any]
) -> PoolShard:
    """Pool whole channels and crop the block."""
    inward = part.region((*part.output[:2], *_whole_sides(part)))
    whole = dict(zip(part.dims, part.sizes, strict=True))
    blocks = tuple((0, stop - start) for start, stop in part.output[:2])
    sides = tuple((0, size) for size in part.sizes[2:])
    outward = Wanted(whole, (*blocks, *sides)).region((*blocks, *part.output[2:]))
    return PoolShard(function, options, inward, outward=outward)


def _windowed(part: ShardSpec, name: str, options: dict[str, Any]) -> PoolShard:
    kernel = pair(options["kernel_size"])
    stride = pair(options.get("stride") or kernel)
    padding = pair(options.get("padding", 0))
    dilation = pair(options.get("dilation", 1))
    rows = [_window(part, side, kernel, stride, padding, dilation) for side in range(2)]
    needed = *part.output[:2], *rows
    if name == "max_pool2d":
        read: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "dilation": dilation}
        return PoolShard(F.max_pool2d, read, part.region(needed, fill=-torch.inf))
    divisor = options.get("divisor_override")
    counts = None if divisor else _counts(part, kernel, stride, padding, options)
    read = {"kernel_size": kernel, "stride": stride, "divisor_override": divisor or 1}
    return PoolShard(F.avg_pool2d, read, part.region(needed), counts=counts)


def _counts(
    part: ShardSpec, kernel: Pair, stride: Pair, padding: Pair, options: dict[str, Any]
) -> Tensor:
    """The divisor of each window of the block, (rows, columns), as in the whole pool: its rows in
    the input, or in the input and its padding. Rows beyond the padding, which occur with ceil_mode,
    do not count."""
    counted: list[list[int]] = [[], []]
    for side, (_, size) in enumerate(_whole_sides(part)):
        n, by, pad = kernel[side], stride[side], padding[side]
        for row in range(*part.output[2 + side]):
            start, stop = window((row, row + 1), kernel=n, stride=by, padding=pad)
            stop = min(stop, size + pad)
            if not options.get("count_include_pad", True):
                start, stop = max(start, 0), min(stop, size)
            counted[side].append(stop - start)
    return torch.outer(*(torch.tensor(side, dtype=torch.float64) for side in counted))
