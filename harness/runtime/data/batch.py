"""A batch, and which samples of the data set each rank takes in each step."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


class Batch(NamedTuple):
    """One rank's part of a global batch; a NamedTuple, so that DataLoader can pin it.

    Attributes:
        inputs: one tensor per input of the task, each (samples, ...).
        targets: (samples,).
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.inputs, self.targets))

    def to(self, device: torch.device) -> Batch:
        """Queue the copies to the device; asynchronous from pinned memory."""
        inputs = tuple(t.to(device, non_blocking=True) for t in self.inputs)
        return Batch(inputs, self.targets.to(device, non_blocking=True))


def split_by_weight(total: int, weights: Sequence[float]) -> list[int]:
    """Split a whole number in proportion to weights, by the largest remainders; sums to `total`."""
    sum_of_weights = sum(weights)
    exact = [total * weight / sum_of_weights for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: (parts[i] - exact[i], i))
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """Splits every global batch over the ranks; steps go on over the ends of epochs.

    The samples of a global batch do not depend on the number of ranks. The last batch of an epoch
    holds what is left, split in the same proportion.

    Attributes:
        shares: samples of a whole batch by rank; they sum to the global batch.
        is_shuffled: draw a new order each epoch, from `seed`.
    """

    n_samples: int
    shares: tuple[int, ...]
    is_shuffled: bool = False
    seed: int = 0

    @property
    def global_batch(self) -> int:
        return sum(self.shares)

    @property
    def n_steps_per_epoch(self) -> int:
        return -(-self.n_samples // self.global_batch)

    def sizes(self, step: int) -> list[int]:
        """Samples of each rank in a step."""
        first = (step % self.n_steps_per_epoch) * self.global_batch
        n = min(self.global_batch, self.n_samples - first)
        return list(self.shares) if n == self.global_batch else split_by_weight(n, self.shares)

    def indices(self, rank: int) -> Iterator[list[int]]:
        """Sample indices of one rank, step by step, without end.

        A rank without a sample in a step gets the batch's first one, which must not count: every
        rank has to take part in the collectives.
        """
        for epoch in itertools.count():
            order = self._order(epoch)
            for batch in range(self.n_steps_per_epoch):
                sizes = self.sizes(batch)
                first = batch * self.global_batch + sum(sizes[:rank])
                if sizes[rank]:
                    yield order[first : first + sizes[rank]]
                else:
                    yield order[batch * self.global_batch :][:1]

    def _order(self, epoch: int) -> list[int]:
        if not self.is_shuffled:
            return list(range(self.n_samples))
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        order: list[int] = torch.randperm(self.n_samples, generator=generator).tolist()
        return order
