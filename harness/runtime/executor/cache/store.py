"""Rows of activations by sample: in shared memory up to a limit, then in a file on disk.

Processes that load data read the rows, because both parts are files; rows for the disk are written
a window at a time.
"""

from __future__ import annotations

import mmap
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from harness.errors import DataError
from harness.units import format_bytes

_SHARED = Path("/dev/shm")
_WINDOW_BYTES = 4 << 20

_Table = np.ndarray[tuple[int, int], np.dtype[np.uint8]]


class Rows:
    """The rows of one value: a tensor for each sample, all of one shape.

    Args:
        like: the value of some samples, for shape, dtype and order in memory.
        memory_bytes: of shared memory that it may take.

    Attributes:
        disk_bytes: that it has written to disk.
    """

    def __init__(self, like: Tensor, n_samples: int, memory_bytes: int, directory: Path) -> None:
        # The order of dims in memory is kept, because another order may round differently.
        self._order = sorted(range(like.dim()), key=lambda dim: (-like.stride()[dim], dim))
        self._shape, self._dtype = tuple(like.shape[1:]), like.dtype
        self.row_bytes = max(1, like[:1].numel() * like.element_size())
        self._place = np.full(n_samples, -1, dtype=np.int64)
        self._n_rows = 0
        n_fitting = min(n_samples, memory_bytes // self.row_bytes)
        self._memory = _shared(n_fitting, self.row_bytes)
        self._directory = directory
        self._file = -1
        self._window = bytearray()
        self.disk_bytes = 0

    @property
    def memory_bytes(self) -> int:
        """Shared memory that it takes."""
        return self._memory.nbytes

    def holds(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Which samples it has a row of."""
        held: np.ndarray[tuple[int], np.dtype[np.bool_]] = self._place >= 0
        return held

    def write(self, samples: Sequence[int], value: Tensor) -> None:
        """Add rows; samples that have one keep it, because frozen layers compute the same again."""
        wanted = {sample: k for k, sample in enumerate(samples) if self._place[sample] < 0}
        if not wanted:
            return
        kept = value.detach().to("cpu")[list(wanted.values())]
        rows = kept.contiguous().reshape(len(wanted), -1).view(torch.uint8).numpy()
        at = self._n_rows
        n_here = min(len(rows), max(0, len(self._memory) - at))
        self._memory[at : at + n_here] = rows[:n_here]
        self._window += rows[n_here:].tobytes()
        self._place[list(wanted)] = np.arange(at, at + len(rows))
        self._n_rows += len(rows)
        if len(self._window) >= _WINDOW_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write the rows of the open window to disk.

        Raises:
            DataError: the disk is full.
        """
        if not self._window:
            return
        try:
            if self._file < 0:
                self._directory.mkdir(parents=True, exist_ok=True)
                self._file, name = tempfile.mkstemp(prefix="cache-", dir=self._directory)
                os.unlink(name)  # the file ends with the processes that have it open
            written = os.pwrite(self._file, self._window, self.disk_bytes)
            if written < len(self._window):
                raise OSError(f"{written} of {len(self._window)} bytes were written")
        except OSError as error:
            raise DataError(
                f"the cache has {format_bytes(self.disk_bytes)} on the disk of {self._directory} "
                f"and cannot write {format_bytes(len(self._window))} more ({error}): raise "
                "--cache-memory, free the disk, or use --cache off"
            ) from error
        self.disk_bytes += len(self._window)
        self._window = bytearray()

    def read(self, samples: Sequence[int]) -> Tensor:
        """The rows of samples, (samples, ...); all must be held."""
        self.flush()
        found = np.empty((len(samples), self.row_bytes), dtype=np.uint8)
        places = self._place[list(samples)]
        assert (places >= 0).all(), "all samples have rows"
        is_here = places < len(self._memory)
        found[is_here] = self._memory[places[is_here]]
        for k in np.flatnonzero(~is_here):
            offset = int(places[k] - len(self._memory)) * self.row_bytes
            os.preadv(self._file, [memoryview(found[k])], offset)
        flat = torch.from_numpy(found.reshape(-1)).view(self._dtype)
        value = flat.view(len(samples), *self._shape)
        return self._in_order(value)

    def like(self, n_samples: int) -> Tensor:
        """A value of this shape, dtype and order, with any contents."""
        return self._in_order(torch.zeros(n_samples, *self._shape, dtype=self._dtype))

    def _in_order(self, value: Tensor) -> Tensor:
        if self._order == list(range(value.dim())):
            return value
        sizes = [value.shape[dim] for dim in self._order]
        made = torch.empty(sizes, dtype=value.dtype).permute(*np.argsort(self._order).tolist())
        return made.copy_(value)

    def close(self) -> None:
        """Free memory and disk."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._memory = self._memory[:0].copy()  # the other is freed after batches that still use it


def _shared(n_rows: int, row_bytes: int) -> _Table:
    """Shared memory for rows, which child processes inherit; fewer rows where there is less."""
    while n_rows > 0:
        file, name = tempfile.mkstemp(prefix="cache-", dir=_SHARED if _SHARED.is_dir() else None)
        try:
            os.unlink(name)
            # Else a full /dev/shm kills the process.
            os.posix_fallocate(file, 0, n_rows * row_bytes)
            memory = mmap.mmap(file, n_rows * row_bytes)
            return np.frombuffer(memory, dtype=np.uint8).reshape(n_rows, row_bytes)
        except OSError:
            n_rows //= 2
        finally:
            os.close(file)
    return np.empty((0, row_bytes), dtype=np.uint8)
