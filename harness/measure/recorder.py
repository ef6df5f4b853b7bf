"""Collects a rank's spans and samples in memory while it measures; written between steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from harness.domain.record import Label, Record, Sample, Span, SpanKind
from harness.measure.clock import Clock
from harness.measure.reached import Reached

_Mark = tuple[SpanKind, str, int | None, Any, Any, int | None]


class Recorder:
    """One rank's open marks and finished records.

    Marks become spans only in `collect`, after the clock has settled, so that nothing
    synchronises or formats inside a step.
    """

    def __init__(self, clock: Clock, reached: Reached | None = None) -> None:
        """Record nothing yet.

        Args:
            reached: where another process reads how far this rank is.
        """
        self.clock = clock
        self.reached = reached or Reached()
        self._step: int | None = None
        self._marks: list[_Mark] = []
        self._records: list[Record] = []

    @property
    def step(self) -> int | None:
        """The step that records belong to; None outside the measured ones."""
        return self._step

    @step.setter
    def step(self, step: int | None) -> None:
        self._step = step
        if step is not None:
            self.reached.begin_step(step)

    @contextmanager
    def span(self, kind: SpanKind, name: str = "", n_bytes: int | None = None) -> Iterator[None]:
        """Record the enclosed work as one span."""
        self.reached.begin(kind)
        start = self.clock.mark()
        yield
        self.add_marks(kind, start, self.clock.mark(), name=name, n_bytes=n_bytes)

    def add_marks(
        self, kind: SpanKind, start: Any, end: Any, *, name: str = "", n_bytes: int | None = None
    ) -> None:
        """Record a span whose two marks were taken elsewhere, such as in a callback."""
        self._marks.append((kind, name, self.step, start, end, n_bytes))

    def sample(
        self, metric: str, value: float, *, step: int | None = None, **labels: Label
    ) -> None:
        """Record a number; `step` defaults to the current one."""
        at = self.step if step is None else step
        self._records.append(Sample(metric=metric, value=value, labels=labels, step=at))

    def add(self, record: Record) -> None:
        """Record a finished span or sample."""
        self._records.append(record)

    def discard(self) -> None:
        """Forget the marks and samples so far: what the warm-up left."""
        self.clock.settle()
        self._marks, self._records = [], []

    def collect(self) -> list[Record]:
        """Hand over everything since the last call, spans in order of start; settles the clock."""
        self.clock.settle()
        return self.collect_ready()

    def collect_ready(self) -> list[Record]:
        """Hand over samples and the spans whose marks can be read now; never waits."""
        marks, self._marks = self._marks, []
        ready: list[_Mark] = []
        for mark in marks:
            # An end may lie on another stream than its start, which is not passed by then.
            is_ready = self.clock.is_ready(mark[3]) and self.clock.is_ready(mark[4])
            (ready if is_ready else self._marks).append(mark)
        spans = sorted((self._span(mark) for mark in ready), key=lambda span: span.start_s)
        records: list[Record] = [*spans, *self._records]
        self._records = []
        return records

    def _span(self, mark: _Mark) -> Span:
        kind, name, step, start, end, n_bytes = mark
        start_s = self.clock.seconds_at(start)
        duration_s = self.clock.seconds_at(end) - start_s
        return Span(
            kind=kind, name=name, step=step, start_s=start_s, duration_s=duration_s, n_bytes=n_bytes
        )
