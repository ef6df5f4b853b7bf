"""Progress of long work: a line that redraws on rank 0's terminal, sparse lines elsewhere."""

from __future__ import annotations

import sys
import time
from typing import TextIO


class Progress:
    """Shows `what: done/total`; redraws at most five times a second.

    Under mpirun standard error is no terminal: then one line every ten seconds.
    """

    def __init__(self, *, is_shown: bool, stream: TextIO | None = None) -> None:
        self._is_shown = is_shown
        self._stream = stream or sys.stderr
        self._is_terminal = self._stream.isatty()
        self._next_s = 0.0 if self._is_terminal else time.monotonic() + 10.0

    def update(self, what: str, done: int, total: int, note: str = "") -> None:
        """Show progress when it is time to; cheap otherwise."""
        now_s = time.monotonic()
        is_last = self._is_terminal and done >= total
        if not self._is_shown or (now_s < self._next_s and not is_last):
            return
        self._next_s = now_s + (0.2 if self._is_terminal else 10.0)
        text = f"{what}: {done}/{total} {note}".rstrip()
        if self._is_terminal:
            end = "\n" if is_last else ""
            self._stream.write(f"\r\033[K{text}{end}")
        else:
            self._stream.write(f"{text}\n")
        self._stream.flush()
