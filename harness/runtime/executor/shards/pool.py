"""Shards of two-dimensional pooling: channels, rows and columns with their halo."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.domain.partition import Interval
from harness.runtime.executor.shards.base import Shard, ShardSpec, Wanted
from harness.runtime.executor.shards.conv import Pair, pair
from harness.runtime.executor.shards.regions import Region, region, window

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
        fill: padding value of the region.
        outward: crops the function's output.
        counts: divisor of each window, (rows, columns); None if the function divides.
    """

    def __init__(
        self,
        function: Callable[..., Tensor],
        options: dict[str, Any],
        inward: Region,
        *,
        fill: float = 0.0,
        outward: Region | None = None,
        counts: Tensor | None = None,
    ) -> None:
        super().__init__()
        self._function, self._options = function, options
        self._inward, self._outward, self._fill = inward, outward or Region(), fill
        self.register_buffer("counts", counts, persistent=False)
        self.counts: Tensor | None

    def forward(self, *inputs: Tensor) -> Tensor:
        pooled = self._function(self._inward.take(inputs[0], self._fill), **self._options)
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
        inward = region(part.wanted[0], (*part.output[:2], *_whole_sides(part)))
        return None if inward is None else PoolShard(function, options, inward)
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
) -> PoolShard | None:
    """Pool whole channels and crop the block."""
    inward = region(part.wanted[0], (*part.output[:2], *_whole_sides(part)))
    whole = dict(zip(part.dims, part.sizes, strict=True))
    blocks = tuple((0, stop - start) for start, stop in part.output[:2])
    sides = tuple((0, size) for size in part.sizes[2:])
    outward = region(Wanted(whole, (*blocks, *sides)), (*blocks, *part.output[2:]))
    if inward is None:
        return None
    return PoolShard(function, options, inward, outward=outward)


def _windowed(part: ShardSpec, name: str, options: dict[str, Any]) -> PoolShard | None:
    kernel = pair(options["kernel_size"])
    stride = pair(options.get("stride") or kernel)
    padding = pair(options.get("padding", 0))
    dilation = pair(options.get("dilation", 1))
    rows = [
        window(
            part.output[2 + side],
            kernel=kernel[side],
            stride=stride[side],
            padding=padding[side],
            dilation=dilation[side],
        )
        for side in range(2)
    ]
    inward = region(part.wanted[0], (*part.output[:2], *rows))
    if inward is None:
        return None
    if name == "max_pool2d":
        read: dict[str, Any] = {"kernel_size": kernel, "stride": stride, "dilation": dilation}
        return PoolShard(F.max_pool2d, read, inward, fill=-torch.inf)
    divisor = options.get("divisor_override")
    counts = None if divisor else _counts(part, kernel, stride, padding, options)
    read = {"kernel_size": kernel, "stride": stride, "divisor_override": divisor or 1}
    return PoolShard(F.avg_pool2d, read, inward, counts=counts)


def _counts(
    part: ShardSpec, kernel: Pair, stride: Pair, padding: Pair, options: dict[str, Any]
) -> Tensor:
    """The divisor of each window of the block, (rows, columns), as in the whole pool."""
    counted = [
        _count_side(
            part.output[2 + side],
            kernel=kernel[side],
            stride=stride[side],
            padding=padding[side],
            size=_whole_sides(part)[side][1],
            is_padding_counted=options.get("count_include_pad", True),
        )
        for side in range(2)
    ]
    return torch.outer(*(torch.tensor(side, dtype=torch.float64) for side in counted))


def _count_side(
    output: Interval,
    *,
    kernel: int,
    stride: int,
    padding: int,
    size: int,
    is_padding_counted: bool,
) -> list[int]:
    """Count the rows of each window that lie in the input, or in the input and its padding.

    Rows beyond the padding, which occur with ceil_mode, do not count.
    """
    counts = []
    for row in range(*output):
        start, stop = window((row, row + 1), kernel=kernel, stride=stride, padding=padding)
        stop = min(stop, size + padding)
        counts.append(stop - start if is_padding_counted else min(stop, size) - max(start, 0))
    return counts
