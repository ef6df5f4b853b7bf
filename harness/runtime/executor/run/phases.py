"""Records what a rank does, without gaps: a phase ends where the next one begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from harness.domain.record import SpanKind
from harness.measure.recorder import Recorder


class Phases:
    """One rank's phases within a step; a wait cuts the phase that it interrupts in two."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._kind: SpanKind | None = None
        self._name = ""
        self._start: Any = None
        self._n_bytes: int | None = None

    def begin(self, kind: SpanKind, name: str = "", n_bytes: int | None = None) -> None:
        """End the current phase and begin another."""
        now = self._recorder.clock.mark()
        self._recorder.reached.begin(kind)
        self._close(now)
        self._kind, self._name, self._start, self._n_bytes = kind, name, now, n_bytes

    def end(self) -> None:
        """End the current phase; nothing is recorded until the next one."""
        self._close(self._recorder.clock.mark())
        self._kind = None

    def wait(self, name: str, waiting: Callable[[], Any], n_bytes: int | None = None) -> Any:
        """Record what `waiting` takes as communication, and resume the phase."""
        kind, resumed, before = self._kind, self._name, self._n_bytes
        self.begin("communication", name, n_bytes)
        result = waiting()
        if kind is None:
            self.end()
        else:
            self.begin(kind, resumed, before)
        return result

    def _close(self, now: Any) -> None:
        if self._kind is not None:
            self._recorder.add_marks(
                self._kind, self._start, now, name=self._name, n_bytes=self._n_bytes
            )
