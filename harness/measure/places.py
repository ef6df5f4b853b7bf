"""Directories and files that will be written, tried before anything is measured."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from harness.errors import ResultsError


def _try_place(directory: Path) -> None:
    """Try to write a temporary file in a directory, or where it would be created."""
    found = next(
        path for path in (directory, *directory.absolute().parents) if os.path.lexists(path)
    )
    if not found.is_dir():
        reason = os.strerror(errno.ENOTDIR) if found.exists() else f"{found} is a link to nothing"
        raise NotADirectoryError(errno.ENOTDIR, reason)
    with tempfile.TemporaryFile(dir=found):
        pass


def _try_directory(directory: Path) -> None:
    _try_place(directory)
    directory.mkdir(parents=True, exist_ok=True)
    _try_place(directory)


@contextmanager
def _refused(place: str, kind: str, where: str = "") -> Iterator[None]:
    """Refuse a place that cannot be written."""
    try:
        yield
    except OSError as error:
        raise ResultsError(
            f"{place} cannot be written{where} ({error.strerror}): give a {kind} that you may "
            "write to"
        ) from None


def check_results(results: Path, hostname: str, *, is_dry: bool = False) -> None:
    """Create the results directory, unless the run is dry, and refuse one that cannot be written.

    Args:
        hostname: this host's, for the error.
    """
    with _refused(f"--results {results}", "directory", f" on {hostname}"):
        (_try_place if is_dry else _try_directory)(results)


def make_directory(flag: str, path: Path) -> None:
    """Create a directory, and refuse one that cannot be written."""
    with _refused(f"{flag} {path}", "directory"):
        _try_directory(path)


def check_place(flag: str, path: Path | None) -> None:
    """Refuse a file that cannot be written, before its contents are measured; None is none."""
    if path is None:
        return
    with _refused(f"{flag} {path}", "file"):
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        _try_directory(path.parent)
