"""Click logs in HDF5, as FlexFlow's DLRM reads them: X_int, X_cat and y.

X_int (samples, dense features) floats; X_cat (samples, tables x lookups) integers, each below its
table's rows; y (samples,) or (samples, 1), 0 or 1.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from harness.errors import DataError
from harness.runtime.data.batch import Batch
from harness.runtime.models.task import DlrmOptions

_LAYOUT = "X_int (samples, dense features), X_cat (samples, tables x lookups) and y (samples,)"
_BLOCK = 1 << 20


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    import h5py

    try:
        with h5py.File(path, "r") as file:
            missing = [name for name in ("X_int", "X_cat", "y") if name not in file]
            if missing:
                raise DataError(f"{path} has no {', '.join(missing)}: it should hold {_LAYOUT}")
            return {name: tuple(file[name].shape) for name in ("X_int", "X_cat", "y")}
    except OSError as error:
        raise DataError(
            f"--data-dir {path} is not an HDF5 file that can be read ({error}): name the file that "
            f"holds {_LAYOUT}"
        ) from error


def _check_shapes(path: Path, shapes: dict[str, tuple[int, ...]], options: DlrmOptions) -> None:
    n_samples = shapes["y"][0]
    n_columns = len(options.table_rows) * options.n_lookups
    wanted = {"X_int": (n_samples, options.bottom_mlp[0]), "X_cat": (n_samples, n_columns)}
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise DataError(
                f"{path}: {name} is {shapes[name]}, but y and the model's flags ask for {shape}: "
                "change --dlrm-bottom-mlp, --dlrm-table-rows or --dlrm-lookups, or the file"
            )


def _check_indices(path: Path, options: DlrmOptions) -> None:
    import h5py

    rows = np.repeat(options.table_rows, options.n_lookups)
    with h5py.File(path, "r") as file:
        categories = file["X_cat"]
        for first in range(0, categories.shape[0], _BLOCK):
            block = categories[first : first + _BLOCK]
            for column in np.flatnonzero((block.max(axis=0) >= rows) | (block.min(axis=0) < 0)):
                raise DataError(
                    f"{path}: X_cat column {column} goes from {block[:, column].min()} to "
                    f"{block[:, column].max()}, its table has {rows[column]} rows: raise "
                    "--dlrm-table-rows"
                )


class DlrmHdf5(Dataset[Batch]):
    """Reads from the file as it is asked to; each loader process opens it for itself."""

    def __init__(self, path: Path, options: DlrmOptions) -> None:
        shapes = _shapes(path)
        _check_shapes(path, shapes, options)
        _check_indices(path, options)
        self._path = path
        self._n_samples = shapes["y"][0]
        self._file: Any = None

    def __len__(self) -> int:
        return self._n_samples

    def __getitem__(self, index: int) -> Batch:
        return self.__getitems__([index])

    def __getitems__(self, indices: list[int]) -> Batch:
        if self._file is None:
            import h5py

            self._file = h5py.File(self._path, "r")
        order = np.argsort(indices)  # HDF5 selects in increasing order only
        rows = np.asarray(indices)[order]
        inverse = np.argsort(order)
        dense, categories, targets = (self._file[n][rows][inverse] for n in ("X_int", "X_cat", "y"))
        inputs = (
            torch.from_numpy(dense.astype(np.float32)),
            torch.from_numpy(categories.astype(np.int64)),
        )
        return Batch(inputs, torch.from_numpy(targets.reshape(-1).astype(np.float32)))
