"""Processes that read runs and draw figures in parallel."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import get_context

from harness.errors import ResultsError

MOST = 2


@contextmanager
def workers() -> Iterator[Executor]:
    """As many as there are cores, at most MOST; they inherit the imports of this process.

    Raises:
        ResultsError: the system ended one of them.
    """
    n = min(MOST, len(os.sched_getaffinity(0)))
    try:
        with ProcessPoolExecutor(n, mp_context=get_context("fork")) as pool:
            yield pool
    except BrokenProcessPool:
        raise ResultsError(
            "a process that read runs was killed, perhaps for memory: draw fewer runs at once"
        ) from None
