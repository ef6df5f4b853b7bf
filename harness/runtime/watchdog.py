"""Ends the launch where a run in the ranks' first processes cannot go on.

Such a run cannot be stopped alone: a rank that waits in MPI for one that has failed waits for ever.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import TracebackType

from harness.runtime.isolate import Ending, Limit

# Seldom, because what is watched measures time.
_POLL_S = 2.0
# Rank 0, which notices as late as one poll after the others, writes the row meanwhile.
_TIME_TO_CLOSE_S = 10.0
_EXIT_CODE = 1


class Watchdog:
    """Watches one rank from a thread of its own, until the block that it is entered for is left."""

    def __init__(self, limit: Limit, close: Callable[[Ending], None] | None) -> None:
        """Watch nothing yet.

        Args:
            close: writes on rank 0 how the run ended, before this process ends; None on the others,
                which wait until that is done.
        """
        self._limit = limit
        self._close = close
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._is_over.set()

    def _watch(self) -> None:
        while not self._is_over.wait(_POLL_S):
            if (ending := self._limit.reached()) is not None:
                self._end(ending)

    def _end(self, ending: Ending) -> None:
        try:
            if self._close is not None:
                self._close(ending)
            elif self._is_over.wait(_TIME_TO_CLOSE_S):
                return
        finally:
            if not self._is_over.is_set():
                os._exit(_EXIT_CODE)
