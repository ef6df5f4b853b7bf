"""Record the phases of a rank without gaps: a phase ends when the next begins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Unpack

from harness.domain.record import SpanFields, SpanKind
from harness.measure.recorder import Recorder


class Phases:
    """One rank's phases within a step; a wait splits the current phase in two."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._kind: SpanKind | None = None
        self._start: Any = None
        self._fields: SpanFields = {}

    def begin(self, kind: SpanKind, at: Any = None, **fields: Unpack[SpanFields]) -> None:
        """End the current phase and begin another, at a mark or now."""
        now = self._recorder.clock.mark() if at is None else at
        self._recorder.reached.begin(kind)
        self._close(now)
        self._kind, self._start, self._fields = kind, now, fields

    def note(self, **fields: Unpack[SpanFields]) -> None:
        """Add what has become known of the current phase."""
        self._fields |= fields

    def end(self, at: Any = None) -> None:
        """End the current phase; nothing is recorded until the next one."""
        self._close(self._recorder.clock.mark() if at is None else at)
        self._kind = None

    def wait(self, waiting: Callable[[], Any], **fields: Unpack[SpanFields]) -> Any:
        """Record the duration of `waiting` as communication, then resume the phase."""
        kind, resumed = self._kind, self._fields
        fields["is_wait"] = True
        self.begin("communication", **fields)
        result = waiting()
        if kind is None:
            self.end()
        else:
            self.begin(kind, **resumed)
        return result

    def _close(self, now: Any) -> None:
        if self._kind is not None:
            self._recorder.add_marks(self._kind, self._start, now, **self._fields)
