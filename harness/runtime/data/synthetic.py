"""Random samples; each depends on the seed and its index only."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from psutil import virtual_memory
from torch import Tensor

from harness.runtime.data.batch import Batch, BatchedData
from harness.runtime.models.task import Task
from harness.units import format_bytes

_LARGEST_BYTES = 1 << 30
_N_BATCHES = 4
# torch's generator uses 32 bits of its seed; an odd factor makes samples of seeds different.
_SEED_FACTOR = 0x9E3779B1


def bytes_per_sample(task: Task) -> int:
    """Bytes of one sample's inputs."""
    return sum(torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in task.inputs)


def default_n_samples(task: Task, global_batch: int) -> int:
    """A few full global batches, fewer if they are large; independent of the number of ranks."""
    fitting = _LARGEST_BYTES // max(1, bytes_per_sample(task) * global_batch)
    return global_batch * max(1, min(_N_BATCHES, fitting))


def draw_batch(task: Task, n_samples: int, seed: int, device: torch.device) -> Batch:
    """Draw random samples for a task, on the host."""
    generator = torch.Generator().manual_seed(seed)
    inputs = tuple(spec.draw(n_samples, generator) for spec in task.inputs)
    return Batch(inputs, task.draw_targets(n_samples, generator=generator)).to(device)


class SyntheticData(BatchedData):
    """Gives prepared samples from memory, and draws others on demand."""

    def __init__(self, task: Task, n_samples: int, seed: int) -> None:
        self._task = task
        self._n_samples = n_samples
        self._seed = seed
        self._rows: dict[int, int] = {}
        self._is_lent = False
        self._prepared = self._allocate(0)

    def __len__(self) -> int:
        return self._n_samples

    def prepare(self, indices: Sequence[int], *, is_lent: bool = False) -> None:
        """Draw samples in advance, so that steps only copy them.

        Args:
            is_lent: the batches of consecutive samples are not copies, because their readers copy
                them, to a GPU; they lie in pinned memory if there is one.

        Raises:
            MemoryError: the samples need more memory than the host has.
        """
        n_bytes, total_bytes = len(indices) * bytes_per_sample(self._task), virtual_memory().total
        if n_bytes > total_bytes:  # an overcommitting kernel would kill the process instead
            raise MemoryError(
                f"{len(indices)} synthetic samples need {format_bytes(n_bytes)}, the host has "
                f"{format_bytes(total_bytes)}"
            )
        self._is_lent = is_lent and n_bytes <= _LARGEST_BYTES
        is_pinned = self._is_lent and torch.cuda.is_available()
        self._prepared = self._allocate(len(indices), is_pinned=is_pinned)
        self._rows = {index: row for row, index in enumerate(indices)}
        for index, row in self._rows.items():
            self._draw_into(self._prepared, row, index)

    def __getitems__(self, indices: list[int]) -> Batch:
        if all(index in self._rows for index in indices):
            found = [self._rows[index] for index in indices]
            if self._is_lent and found == list(range(found[0], found[0] + len(found))):
                part = slice(found[0], found[-1] + 1)
                return self._prepared.each(lambda column: column[part])
            rows = torch.tensor(found, dtype=torch.int64)
            return self._prepared.each(lambda column: column.index_select(0, rows))
        batch = self._allocate(len(indices))
        for row, index in enumerate(indices):
            self._draw_into(batch, row, index)
        return batch

    def _allocate(self, n_samples: int, *, is_pinned: bool = False) -> Batch:
        def empty(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
            return torch.empty((n_samples, *shape), dtype=dtype, pin_memory=is_pinned)

        inputs = tuple(empty(spec.shape, spec.dtype) for spec in self._task.inputs)
        return Batch(inputs, empty(self._task.target_shape, self._task.target_dtype))

    def _draw_into(self, batch: Batch, row: int, index: int) -> None:
        seed = (self._seed * _SEED_FACTOR + index) % (1 << 32)
        generator = torch.Generator().manual_seed(seed)
        for spec, column in zip(self._task.inputs, batch.inputs, strict=True):
            column[row] = spec.draw(1, generator)[0]
        drawn = [column[row : row + 1] for column in batch.inputs]
        targets = self._task.targets_among(drawn)
        if targets is None:
            targets = self._task.draw_targets(1, generator=generator)
        batch.targets[row] = targets[0]
