"""Click logs in the HDF5 format of FlexFlow's DLRM: X_int, X_cat and y.

X_int: (samples, dense features) floats; X_cat: (samples, tables x lookups) integers, each below its
table's number of rows; y: (samples,) or (samples, 1), 0 or 1.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from harness.errors import DataError
from harness.inputs import one_line
from harness.runtime.data.batch import Batch, BatchedData
from harness.runtime.models.task import DlrmOptions

_LAYOUT = "X_int (samples, dense features), X_cat (samples, tables x lookups) and y (samples,)"
_NAMES = ("X_int", "X_cat", "y")
_BLOCK = 1 << 20


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Convert the library's errors for a broken file to DataError."""
    try:
        yield
    except (OSError, LookupError, RuntimeError, TypeError, ValueError, ArithmeticError) as error:
        raise DataError(
            f"--data-dir {path} is not an HDF5 file that can be read ({one_line(str(error))}): "
            f"name the file that holds {_LAYOUT}"
        ) from error


def _data_sets(path: Path, file: Any) -> dict[str, Any]:
    import h5py

    missing = [name for name in _NAMES if not isinstance(file.get(name), h5py.Dataset)]
    if missing:
        raise DataError(f"{path} has no {', '.join(missing)}: it should hold {_LAYOUT}")
    return {name: file[name] for name in _NAMES}


def _check_shapes(path: Path, shapes: dict[str, tuple[int, ...]], options: DlrmOptions) -> None:
    n_samples, *columns = shapes["y"] or (0, 0)
    if columns not in ([], [1]):
        raise DataError(f"{path}: y is {shapes['y']}: it should be (samples,)")
    n_columns = len(options.table_rows) * options.n_lookups
    wanted = {"X_int": (n_samples, options.bottom_mlp[0]), "X_cat": (n_samples, n_columns)}
    for name, shape in wanted.items():
        if shapes[name] != shape:
            raise DataError(
                f"{path}: {name} is {shapes[name]}, but y and the model's flags ask for {shape}: "
                "change --dlrm-bottom-mlp, --dlrm-table-rows or --dlrm-lookups, or the file"
            )


def _check_data(path: Path, data: Any, options: DlrmOptions) -> None:
    for name in _NAMES:
        kind = data[name].dtype.kind
        if kind not in ("iu" if name == "X_cat" else "iuf") or not data[name].id.get_storage_size():
            raise DataError(
                f"{path}: {name} holds {data[name].dtype} or nothing: it should hold "
                f"{'integers' if name == 'X_cat' else 'numbers'}"
            )
    for first in range(0, data["y"].shape[0], _BLOCK):
        block = data["y"][first : first + _BLOCK].reshape(-1)
        for row in np.flatnonzero((block != 0) & (block != 1))[:1]:
            raise DataError(
                f"{path}: y of sample {first + row} is {block[row]}, and the loss takes clicks: "
                "write 0 or 1"
            )
    rows = np.repeat(options.table_rows, options.n_lookups)
    categories = data["X_cat"]
    for first in range(0, categories.shape[0], _BLOCK):
        block = categories[first : first + _BLOCK]
        for column in np.flatnonzero((block.max(axis=0) >= rows) | (block.min(axis=0) < 0)):
            raise DataError(
                f"{path}: X_cat column {column} goes from {block[:, column].min()} to "
                f"{block[:, column].max()}, its table has {rows[column]} rows: raise "
                "--dlrm-table-rows"
            )


class DlrmHdf5(BatchedData):
    """Reads samples from the file on demand; each loader process opens its own handle."""

    def __init__(self, path: Path, options: DlrmOptions) -> None:
        import h5py

        with _reading(path), h5py.File(path, "r") as file:
            data = _data_sets(path, file)
            shapes = {name: tuple(map(int, data[name].shape or ())) for name in _NAMES}
            _check_shapes(path, shapes, options)
            _check_data(path, data, options)
        self._path = path
        self._n_samples = shapes["y"][0]
        self._file: Any = None

    def __len__(self) -> int:
        return self._n_samples

    def __getitems__(self, indices: list[int]) -> Batch:
        # HDF5 selects in increasing order only, each once.
        rows, inverse = np.unique(indices, return_inverse=True)
        with _reading(self._path):
            if self._file is None:
                import h5py

                self._file = h5py.File(self._path, "r")
            dense, categories, targets = (self._file[n][rows][inverse] for n in _NAMES)
        inputs = (
            torch.from_numpy(dense.astype(np.float32)),
            torch.from_numpy(categories.astype(np.int64)),
        )
        return Batch(inputs, torch.from_numpy(targets.reshape(-1).astype(np.float32)))
