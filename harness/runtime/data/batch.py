"""A batch, and the assignment of samples to ranks and steps."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from numbers import Integral
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.data import Dataset

from harness.errors import ConfigError, DataError
from harness.runtime.models.task import IGNORED


class Batch(NamedTuple):
    """One rank's part of a global batch; a NamedTuple, so that DataLoader can pin it.

    Attributes:
        inputs: one tensor per input of the task, each (samples, ...).
        targets: (samples, *target_shape).
    """

    inputs: tuple[Tensor, ...]
    targets: Tensor

    @property
    def n_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (*self.inputs, self.targets))

    def each(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """A batch of what a function makes of each tensor."""
        return Batch(tuple(map(function, self.inputs)), function(self.targets))

    def to(self, device: torch.device) -> Batch:
        """Copy to the device; asynchronously from pinned memory."""
        return self.each(lambda t: t.to(device, non_blocking=True))

    def ready_for(self, device: torch.device) -> Batch:
        """The batch where training finds it: for a GPU in pinned memory, from which it copies while
        its host goes on."""
        return self.each(Tensor.pin_memory) if device.type == "cuda" else self


# The ranks that read samples, with their interval, by input and then of the targets.
Readers = Sequence[Sequence[tuple[int, tuple[int, int]]]]


class BatchedData(Dataset[Batch], ABC):
    """A data set whose samples are read in batches."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitems__(self, indices: list[int]) -> Batch:
        """The samples of some indices, in order."""

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])


class MemoryData(BatchedData):
    """Copies samples from memory.

    Args:
        inputs: one tensor per input of the task, each (samples, ...).
        targets: (samples, *target_shape), IGNORED where they do not count.
    """

    def __init__(self, inputs: Sequence[Tensor], targets: Tensor) -> None:
        self._all = Batch(tuple(inputs), targets)
        n_each = targets.shape[1:].numel()
        counts = (targets.reshape(len(targets), n_each) != IGNORED).sum(1)
        self._counts: list[int] = counts.tolist()

    def __len__(self) -> int:
        return len(self._counts)

    def count_targets(self, indices: Sequence[int]) -> tuple[int, ...]:
        """Number of targets that count, of each sample."""
        return tuple(self._counts[index % len(self)] for index in indices)

    def __getitems__(self, indices: list[int]) -> Batch:
        rows = torch.tensor(indices, dtype=torch.int64)
        return self._all.each(lambda column: column[rows])


def split_by_weight(total: int, weights: Sequence[float]) -> list[int]:
    """Split an integer in proportion to weights, by largest remainders; the sum is `total`."""
    sum_of_weights = sum(weights)
    exact = [total * weight / sum_of_weights for weight in weights]
    parts = [int(part) for part in exact]
    by_remainder = sorted(range(len(parts)), key=lambda i: parts[i] - exact[i])
    for i in by_remainder[: total - sum(parts)]:
        parts[i] += 1
    return parts


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The samples of each rank in every global batch; steps continue over the ends of epochs.

    The samples of a global batch, and their order, do not depend on the ranks. With `shares`, ranks
    split each batch, also the last one of an epoch, which may be smaller. With `positions` (from a
    strategy), ranks take positions of each batch: a sample may go to several ranks, a rank may get
    none, and the remainder of an epoch after its last full batch is dropped.

    Attributes:
        shares: samples of a full batch that count for each rank; they sum to the global batch.
        positions: by rank, positions in the global batch in feeding order; None: consecutive
            samples by `shares`.
        is_shuffled: draw a new order each epoch, from `seed`.
    """

    n_samples: int
    shares: tuple[int, ...]
    positions: tuple[tuple[int, ...], ...] | None = None
    is_shuffled: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        if self.positions is not None and self.n_samples < self.global_batch:
            raise DataError(
                f"the data holds {self.n_samples} samples, one batch of this strategy takes "
                f"{self.global_batch}: lower the batch size, or give more data"
            )

    @property
    def global_batch(self) -> int:
        return sum(self.shares)

    @property
    def n_steps_per_epoch(self) -> int:
        whole, rest = divmod(self.n_samples, self.global_batch)
        return whole + (rest > 0 and self.positions is None)

    def steps_of(self, epoch: int) -> range:
        """The steps of an epoch.

        Raises:
            ConfigError: it is no number from 0 on.
        """
        if not isinstance(epoch, Integral) or epoch < 0:
            raise ConfigError(f"epoch is {epoch!r}: give a number, 0 for the first")
        return range(epoch * self.n_steps_per_epoch, (epoch + 1) * self.n_steps_per_epoch)

    @property
    def n_dropped(self) -> int:
        """Number of samples per epoch that are not used."""
        return max(0, self.n_samples - self.n_steps_per_epoch * self.global_batch)

    def sizes(self, step: int) -> list[int]:
        """Number of samples of each rank that count in a step."""
        first = (step % self.n_steps_per_epoch) * self.global_batch
        n = min(self.global_batch, self.n_samples - first)
        return list(self.shares) if n == self.global_batch else split_by_weight(n, self.shares)

    def n_fed(self, rank: int, step: int = 0) -> int:
        """Number of samples that a rank is fed in a step, without dummies."""
        return self.sizes(step)[rank] if self.positions is None else len(self.positions[rank])

    def indices(
        self, rank: int, first_step: int = 0, *, has_epochs: bool = False
    ) -> Iterator[list[int]]:
        """Iterate over the sample indices of one rank from a step on, step by step, without end.

        With `shares`, a rank without samples in a step gets the batch's first one as a dummy that
        must not count, because every rank has to call the collectives.
        """
        for step in itertools.count(first_step):
            batch = self.global_indices(step, has_epochs=has_epochs)
            yield [batch[position] for position in self._positions(rank, step)]

    def global_indices(self, step: int, *, has_epochs: bool = False) -> list[int]:
        """The sample indices of a step's global batch, in order; with `has_epochs`, sample i of
        epoch e is e * n_samples + i."""
        epoch, step = divmod(step, self.n_steps_per_epoch)
        first = step * self.global_batch
        before = epoch * self.n_samples if has_epochs else 0
        return [before + i for i in self._order(epoch)[first : first + self.global_batch]]

    def _positions(self, rank: int, step: int) -> Sequence[int]:
        """Positions in a step's batch, or that of a dummy if the rank's share is empty."""
        if self.positions is not None:
            return self.positions[rank]
        sizes = self.sizes(step)
        first = sum(sizes[:rank])
        return range(first, first + sizes[rank]) or range(1)

    def _order(self, epoch: int) -> Sequence[int]:
        if not self.is_shuffled:
            return range(self.n_samples)
        return _shuffled(self.n_samples, self.seed * 1_000_003 + epoch)


@lru_cache(maxsize=2)
def _shuffled(n: int, seed: int) -> Sequence[int]:
    order: list[int] = torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()
    return order
