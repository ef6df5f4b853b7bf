"""Which part of a model's parameter or buffer a device holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor

from harness.domain.partition import Interval


@dataclass(frozen=True)
class WeightSlice:
    """A rectangular part of one tensor of the model; equal slices are copies of one another.

    Attributes:
        name: the model's, such as `features.0.weight`.
        intervals: one per dim of the whole tensor.
    """

    name: str
    intervals: tuple[Interval, ...]

    @classmethod
    def whole(cls, name: str, tensor: Tensor) -> WeightSlice:
        return cls(name, tuple((0, size) for size in tensor.shape))

    def take(self, tensor: Tensor) -> Tensor:
        """The slice of the whole tensor, as a view."""
        return tensor[tuple(slice(start, stop) for start, stop in self.intervals)]

    def renamed(self, names: Mapping[str, str]) -> WeightSlice:
        """The same slice under the name that `names` gives."""
        return replace(self, name=names.get(self.name, self.name))

    def overlaps(self, other: WeightSlice) -> bool:
        """Whether two slices of one tensor have an element in common."""
        pairs = zip(self.intervals, other.intervals, strict=True)
        return all(a < d and c < b for (a, b), (c, d) in pairs)
