"""Slices of a model's parameters and buffers."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from harness.domain.partition import Interval, intersect


@dataclass(frozen=True, order=True)
class WeightSlice:
    """A rectangular part of one tensor of the model; equal slices are replicas.

    Attributes:
        name: name in the model, such as `features.0.weight`.
        intervals: one per dim of the whole tensor.
    """

    name: str
    intervals: tuple[Interval, ...]

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> WeightSlice:
        return cls(name, tuple((0, size) for size in tensor.shape))

    @property
    def n_elements(self) -> int:
        return math.prod(stop - start for start, stop in self.intervals)

    def take(self, tensor: Tensor) -> Tensor:
        """A view of the slice in the whole tensor."""
        return tensor[tuple(slice(start, stop) for start, stop in self.intervals)]

    def renamed(self, names: Mapping[str, str]) -> WeightSlice:
        """The same slice, renamed by `names` if it has the name."""
        return replace(self, name=names.get(self.name, self.name))

    def part(self, index: int, n: int) -> WeightSlice | None:
        """Part `index` of `n` about equal ones, along the first dim longer than 1, so that parts
        are contiguous in memory; None if it is empty."""
        sizes = [stop - start for start, stop in self.intervals]
        at = next((k for k, size in enumerate(sizes) if size > 1), None)
        if at is None:
            return self if index == n - 1 else None
        first = self.intervals[at][0]
        low, high = (first + sizes[at] * k // n for k in (index, index + 1))
        cut = (*self.intervals[:at], (low, high), *self.intervals[at + 1 :])
        return replace(self, intervals=cut) if low < high else None

    def within(self, other: WeightSlice) -> WeightSlice:
        """The slice by its place in another slice that contains it."""
        pairs = zip(self.intervals, other.intervals, strict=True)
        return replace(
            self, intervals=tuple((a - first, b - first) for (a, b), (first, _) in pairs)
        )

    def common(self, other: WeightSlice) -> WeightSlice | None:
        """The region that two slices of one tensor share; None if it is empty."""
        found = intersect(self.intervals, other.intervals)
        return None if found is None else replace(self, intervals=found)
