"""Waiting for processes and files, for tests of several packages."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def wait_until(is_so: Callable[[], object], timeout_s: float = 30.0) -> None:
    """Return as soon as it is so.

    Raises:
        AssertionError: it is not so in time.
    """
    deadline_s = time.monotonic() + timeout_s
    while not is_so():
        assert time.monotonic() < deadline_s, f"not within {timeout_s:g} s"
        time.sleep(0.02)


def is_alive(pid: int | str) -> bool:
    """Whether a process has not ended; a zombie has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False
