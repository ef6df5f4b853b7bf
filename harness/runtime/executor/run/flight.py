"""Tensors of one microbatch on one device between its forward and its backward."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from harness.domain.partition import Interval
from harness.runtime.data.batch import Batch
from harness.runtime.executor.program.program import DataKey, InputKey, TargetKey, WeightKey
from harness.runtime.executor.run.stash import Version
from harness.runtime.executor.shards.assemble import Relative


@dataclass
class Flight:
    """One microbatch's tensors.

    Attributes:
        batch: this device's part of the microbatch; None if it reads no data.
        samples: interval of that part within the microbatch.
        weight: factor of the microbatch's summed loss.
        loss_share: weight of the microbatch's loss in the loss of the step.
        leaves: inputs of segments, detached from the graphs that computed them.
        outputs: outputs of each segment (stage, position), with their graphs.
        random: the generators' states before segments that are recomputed.
        version: the weights that its forward uses; None for the current weights.
    """

    batch: Batch | None
    samples: Interval
    input_names: tuple[str, ...]
    weight: float = 1.0
    loss_share: float = 1.0
    leaves: dict[InputKey, Tensor] = field(default_factory=dict)
    outputs: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    random: dict[tuple[int, int], tuple[Tensor, ...]] = field(default_factory=dict)
    version: Version | None = None

    def input(self, key: InputKey) -> Tensor:
        """The tensor of a segment's input."""
        if isinstance(key, DataKey):
            return self._data(key)
        if isinstance(key, TargetKey):
            assert self.batch is not None, "a device with a part of the loss reads data"
            start, stop = (at - self.samples[0] for at in key.samples)
            return self.batch.targets[start:stop]
        if isinstance(key, WeightKey):
            return torch.tensor(self.weight, dtype=torch.float64)
        return self.leaves[key]

    def _data(self, key: DataKey) -> Tensor:
        assert self.batch is not None, "a device that computes on inputs reads data"
        whole = self.batch.inputs[self.input_names.index(key.value)]
        (start, stop), *rest = key.block
        cut = whole[start - self.samples[0] : stop - self.samples[0]]
        for dim, (low, high) in enumerate(rest, start=1):
            if high - low != cut.shape[dim]:
                cut = cut.narrow(dim, low, high - low)
        return cut

    def gradient(self, key: InputKey) -> Tensor:
        """The gradient of a leaf; zeros if it has none yet."""
        leaf = self.leaves[key]
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
        return leaf.grad

    def add_gradient(self, key: InputKey, region: Relative, gradient: Tensor) -> None:
        """Add to the gradient of a region of a leaf."""
        leaf = self.leaves[key]
        if leaf.grad is None and region.is_all and gradient.dtype == leaf.dtype:
            leaf.grad = gradient.clone()
            return
        if leaf.grad is None:
            leaf.grad = torch.zeros_like(leaf)
        region.of_tensor(leaf.grad).add_(gradient)
