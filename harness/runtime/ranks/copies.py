"""Copy files to rank 0 from ranks that do not share its disk."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from harness.errors import ResultsError
from harness.measure.store import write_atomically
from harness.runtime.ranks.control import Control


def copy_to_first(control: Control, paths: Mapping[int, Path]) -> dict[int, str]:
    """Copy one file of each of some ranks to the same path on rank 0; all ranks must call it.

    Returns:
        Why a rank's file could not be written on rank 0, by rank; files that ranks lack are no
        problem.
    """
    path = paths.get(control.rank)
    size = path.stat().st_size if path is not None and path.exists() else -1
    sizes = control.gather("sizes", size, int)
    missing = [
        rank for rank, own in paths.items() if sizes[rank] >= 0 and not _has_size(own, sizes[rank])
    ]
    missing = control.broadcast("missing", missing, list[int])
    if not missing:
        return {}
    data = path.read_bytes() if path is not None and control.rank in missing else None
    problems: dict[int, str] = {}
    for rank, content in control.send_to_first("records", data).items():
        try:
            write_atomically(paths[rank], content)
        except ResultsError as error:
            problems[rank] = str(error)
    return problems


def _has_size(path: Path, n_bytes: int) -> bool:
    return path.exists() and path.stat().st_size == n_bytes
