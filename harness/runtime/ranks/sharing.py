"""Copy files between hosts that do not share a disk, such as the shards of a saved state.

The bytes pass through rank 0's store, so no process group is needed, and a rank whose run has died
still sends what its host holds.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from harness.domain.run import is_file_name
from harness.errors import ResultsError
from harness.measure.store import replacing
from harness.runtime.ranks.control import Control
from harness.units import format_bytes

_log = logging.getLogger(__name__)

# At rank 0 at a time.
_BLOCK_BYTES = 64 << 20

T = TypeVar("T")
Fetch = Callable[[Path], None]
"""Copies the files of a directory that other hosts have to rank 0's, and makes its directories."""


def fetch_nothing(directory: Path) -> None:
    """Where all files are on this host."""


def with_fetch(control: Control, act: Callable[[Fetch], T]) -> T | None:
    """Run a function on rank 0 while all other ranks, which must call this too, send it files.

    Returns:
        Its result on rank 0, None on the others.
    """
    if control.rank == 0:

        def fetch(directory: Path) -> None:
            control.broadcast("fetch", str(directory), str)
            _collect(control, directory)

        try:
            return act(fetch)
        finally:
            control.broadcast("fetch", "", str)
    while directory := control.broadcast("fetch", "", str):
        _collect(control, Path(directory))
    return None


def distribute(
    control: Control, directory: Path, hostnames: Sequence[str], suffix: str = ""
) -> list[str]:
    """Copy the files of a directory on rank 0's host to the hosts that lack them; all ranks must
    call it. A file that cannot be written is left out, with a warning.

    Args:
        hostnames: of the ranks.
        suffix: of the files' names.

    Returns:
        The names of the directories in it on rank 0's host.
    """
    found = _sizes(control, directory)
    firsts = {host: hostnames.index(host) for host in hostnames}
    for name, size in sorted(found[0].items()):
        targets = [rank for rank in firsts.values() if name not in found[rank]]
        if targets and size >= 0 and name.endswith(suffix):
            _copy(control, directory / name, size, 0, targets)
    return [name for name, size in sorted(found[0].items()) if size < 0]


def distribute_results(control: Control, results: Path, hostnames: Sequence[str]) -> None:
    """Copy all that runs are planned by, but no records, as `distribute` does: a run whose first
    rank is on another host plans there."""
    for name in distribute(control, results, hostnames, ".json"):
        distribute(control, results / name, hostnames, ".json")


def _collect(control: Control, directory: Path) -> None:
    first, *others = _sizes(control, directory)
    for rank, sizes in enumerate(others, start=1):
        for name in sorted(sizes.keys() - first):
            first[name] = sizes[name]
            if sizes[name] >= 0:
                _copy(control, directory / name, sizes[name], rank, [0])
            elif control.rank == 0:
                with suppress(OSError):  # the files of this directory are missed then
                    (directory / name).mkdir(parents=True, exist_ok=True)


def _sizes(control: Control, directory: Path) -> list[dict[str, int]]:
    """The size of each rank's files by name; -1 for a directory."""
    sizes: dict[str, int] = {}
    with suppress(OSError):  # no directory, or one that cannot be read
        for path in directory.iterdir():
            sizes[path.name] = -1 if path.is_dir() else path.stat().st_size
    found = control.gather("files", sizes, dict[str, int])
    return [{name: n for name, n in each.items() if is_file_name(name)} for each in found]


def copy_to_first(
    control: Control, paths: Mapping[int, Path], written: Collection[int] = ()
) -> dict[int, str]:
    """Copy one file of each of some ranks to the same path on rank 0, unless it has a file of that
    size; all ranks must call it.

    Args:
        written: those that have written their file.

    Returns:
        Why a rank's file is not on rank 0, by rank.
    """
    path = paths.get(control.rank)
    size = path.stat().st_size if path is not None and path.exists() else -1
    sizes = control.gather("sizes", size, int)
    missing = [
        rank for rank, own in paths.items() if sizes[rank] >= 0 and not has_size(own, sizes[rank])
    ]
    missing = control.broadcast("missing", missing, list[int])
    problems = {rank: _copy(control, paths[rank], sizes[rank], rank, [0]) for rank in missing}
    problems |= {k: f"{paths[k]} was removed during the run" for k in written if sizes[k] < 0}
    return {rank: problem for rank, problem in problems.items() if problem}


def has_size(path: Path, n_bytes: int) -> bool:
    """Whether there is a file of that size."""
    return path.exists() and path.stat().st_size == n_bytes


def _copy(control: Control, path: Path, size: int, source: int, targets: Sequence[int]) -> str:
    """Copy a file of one rank to the same path of others; all ranks must call it.

    Returns:
        Why this rank could not write it.
    """
    if control.rank == 0 and size >= _BLOCK_BYTES:
        _log.info("copying %s (%s) between hosts", path, format_bytes(size))
    problem, blocks = "", _blocks(control, path, size, source, targets)
    if control.rank in targets:
        try:
            with replacing(path) as temporary, temporary.open("wb") as file:
                n_written = sum(map(file.write, blocks))
                if n_written != size:
                    raise ResultsError(f"{path}: {n_written} of {size} bytes arrived")
        except ResultsError as error:
            problem = str(error)
            _log.warning("%s", problem)
    for _ in blocks:  # those that were not written, because the other ranks wait
        pass
    return problem


def _blocks(
    control: Control, path: Path, size: int, source: int, targets: Sequence[int]
) -> Iterator[bytes]:
    """A file's blocks on the targets; empty ones on other ranks, or if it cannot be read."""
    for at in range(0, size, _BLOCK_BYTES):
        data = b""
        if control.rank == source:
            with suppress(OSError), path.open("rb") as file:
                file.seek(at)
                data = file.read(_BLOCK_BYTES)
        yield control.send(data, source, targets)
