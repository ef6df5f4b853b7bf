"""Random samples, each a function of the seed and its index alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.utils.data import Dataset

from harness.runtime.data.batch import Batch
from harness.runtime.models.task import InputSpec, Task

_LARGEST_BYTES = 1 << 30
_N_BATCHES = 4
# torch's generator looks at 32 bits of its seed; an odd factor keeps seeds' samples apart.
_SEED_FACTOR = 0x9E3779B1


def bytes_per_sample(task: Task) -> int:
    """Bytes of one sample's inputs."""
    sizes = (torch.Size(spec.shape).numel() * spec.dtype.itemsize for spec in task.inputs)
    return sum(sizes)


def default_n_samples(task: Task, global_batch: int) -> int:
    """A few whole global batches, fewer when they are large, whatever the number of ranks."""
    fitting = _LARGEST_BYTES // max(1, bytes_per_sample(task) * global_batch)
    return global_batch * max(1, min(_N_BATCHES, fitting))


def _draw(spec: InputSpec, generator: torch.Generator) -> Tensor:
    if spec.n_values is None:
        return torch.randn(spec.shape, dtype=spec.dtype, generator=generator)
    return torch.randint(spec.n_values, spec.shape, dtype=spec.dtype, generator=generator)


class SyntheticData(Dataset[Batch]):
    """Samples are drawn once, when first asked for, and kept in memory."""

    def __init__(self, task: Task, n_samples: int, seed: int) -> None:
        self._task = task
        self._n_samples = n_samples
        self._seed = seed
        self._samples: dict[int, tuple[tuple[Tensor, ...], Tensor]] = {}

    def __len__(self) -> int:
        return self._n_samples

    def sample(self, index: int) -> tuple[tuple[Tensor, ...], Tensor]:
        """One sample's inputs and target."""
        if index not in self._samples:
            seed = (self._seed * _SEED_FACTOR + index) % (1 << 32)
            generator = torch.Generator().manual_seed(seed)
            inputs = tuple(_draw(spec, generator) for spec in self._task.inputs)
            target = torch.randint(max(2, self._task.n_classes), (), generator=generator)
            self._samples[index] = (inputs, target)
        return self._samples[index]

    def prepare(self, indices: Sequence[int]) -> None:
        """Draw these samples now, so that no step has to."""
        for index in indices:
            self.sample(index)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        samples = [self.sample(index) for index in indices]
        columns = zip(*(inputs for inputs, _ in samples), strict=True)
        inputs = tuple(torch.stack(column) for column in columns)
        return Batch(inputs, torch.stack([target for _, target in samples]))
