"""Slices of a model's parameters and buffers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from harness.domain.partition import Interval


@dataclass(frozen=True)
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

    def take(self, tensor: Tensor) -> Tensor:
        """A view of the slice in the whole tensor."""
        return tensor[tuple(slice(start, stop) for start, stop in self.intervals)]

    def renamed(self, names: Mapping[str, str]) -> WeightSlice:
        """The same slice, renamed by `names` if it has the name."""
        return replace(self, name=names.get(self.name, self.name))

    def overlaps(self, other: WeightSlice) -> bool:
        """Whether two slices of one tensor share an element."""
        pairs = zip(self.intervals, other.intervals, strict=True)
        return all(a < d and c < b for (a, b), (c, d) in pairs)
