"""Show the progress of long work on rank 0's standard error."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Shows `label: done/total`: redraws a line on a terminal at most five times a second; prints a
    line every ten seconds elsewhere, such as under mpirun."""

    def __init__(self, *, is_shown: bool, stream: TextIO | None = None) -> None:
        self._is_shown = is_shown
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._next_s = 0.0 if self._is_terminal else time.monotonic() + 10.0

    def update(self, label: str, done: int, total: int, note: str = "") -> None:
        """Show progress if the next update is due; cheap otherwise."""
        now_s = time.monotonic()
        is_last = self._is_terminal and done >= total
        if not self._is_shown or (now_s < self._next_s and not is_last):
            return
        self._next_s = now_s + (0.2 if self._is_terminal else 10.0)
        text = f"{label}: {done}/{total} {note}".rstrip()
        if self._is_terminal:
            end = "\n" if is_last else ""
            self._stream.write(f"\r\033[K{text}{end}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()
