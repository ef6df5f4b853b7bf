"""An engine's frozen prefix: layers that it skips, their weights, and values that it records."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from harness.runtime.executor.cache.activations import Tap
from harness.runtime.executor.cache.boundary import Rest
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.program.program import Program
from harness.runtime.executor.state.weights import Holders, Use, Weights


class Parked(NamedTuple):
    """A slice that no operator of an engine uses, because the cache replaces its layer.

    Attributes:
        tensor: on the ranks that hold it.
    """

    devices: tuple[int, ...]
    tensor: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The frozen prefix of one engine.

    Attributes:
        n_frozen: layers that it does not train.
        n_skipped: those of them that it does not compute.
        rest: the model that it computes; None: the whole one.
        parked: weights of the skipped layers, which stay where they were.
        tap: records values at the boundary; None: nothing is recorded.
    """

    n_frozen: int = 0
    n_skipped: int = 0
    rest: Rest | None = None
    parked: Mapping[WeightSlice, Parked] = field(default_factory=dict)
    tap: Tap | None = None

    def is_read(self, program: Program) -> bool:
        """Whether a program reads cached values."""
        return self.rest is not None and program.reads_data(self.rest.values)

    def park(self, weights: Weights, holders: Holders) -> None:
        """Hold the parked slices."""
        used = {piece.name for piece, _ in holders.items()}
        for piece, (devices, tensor) in self.parked.items():
            if piece.name in used:
                continue
            for device in devices:
                holders.add([piece], Use(device, stage=0, position=0))
            if tensor is not None:
                weights.hold(piece, tensor)
