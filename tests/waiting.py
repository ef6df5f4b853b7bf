"""Waiting for processes and files, for tests of several packages."""

from __future__ import annotations

import time
from collections.abc import Callable
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from typing import Any


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


def start_and_join(
    context: ForkServerContext | SpawnContext,
    target: Callable[..., None],
    size: int,
    *arguments: Any,
) -> None:
    """Run a function of (rank, size, ...) in so many processes; all must succeed."""
    ranks = [context.Process(target=target, args=(rank, size, *arguments)) for rank in range(size)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0] * size
