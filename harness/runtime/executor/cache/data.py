"""Batches whose inputs are cached activations instead of the data's own."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.data import Dataset

from harness.runtime.data.batch import Batch
from harness.runtime.executor.cache.activations import Activations
from harness.runtime.executor.cache.boundary import Rest


class CachedData(Dataset[Batch]):
    """A data set for an engine that skips frozen layers.

    Args:
        data: the data set of the whole model.
        is_read: whether this rank computes on cached values; other ranks read targets only.
    """

    def __init__(self, data: Any, activations: Activations, rest: Rest, *, is_read: bool) -> None:
        self.data = data
        self._activations, self._rest, self._is_read = activations, rest, is_read

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        batch: Batch = self.data.__getitems__(indices)
        values = self._rest.values
        if self._is_read:
            cached = tuple(self._activations.read(value, indices) for value in values)
        else:
            cached = tuple(torch.empty(0) for _ in values)
        return Batch((*cached, *(batch.inputs[k] for k in self._rest.kept)), batch.targets)
