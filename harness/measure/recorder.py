"""Collect a rank's spans and samples in memory; its caller writes them between steps.

Clocks are monotonic: one protocol for the host and a CUDA device. A mark is taken without
synchronising and read outside every span, when it is ready or after `settle`.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol, Unpack

from harness.domain.record import Label, Record, Sample, Span, SpanFields, SpanKind
from harness.measure.reached import Reached


class Clock(Protocol):
    """Takes marks while the work runs and reads them afterwards."""

    def mark(self) -> Any:
        """Mark this point in the device's stream of work; never blocks."""
        ...

    def is_ready(self, mark: Any) -> bool:
        """Whether a mark can be read without waiting; marks become ready in order."""
        ...

    def settle(self) -> None:
        """Block until every mark so far can be read."""
        ...

    def seconds_at(self, mark: Any) -> float:
        """Seconds since the clock's origin."""
        ...


def timed_s(clock: Clock, act: Callable[[], object]) -> float:
    """Seconds of an act; blocks until the clock can tell them."""
    start = clock.mark()
    act()
    end = clock.mark()
    clock.settle()
    return clock.seconds_at(end) - clock.seconds_at(start)


class HostClock:
    """`perf_counter_ns` on this host; the origin is the clock's creation."""

    def __init__(self) -> None:
        self.origin_ns = time.perf_counter_ns()

    def mark(self) -> int:
        return time.perf_counter_ns()

    def is_ready(self, mark: int) -> bool:
        return True

    def settle(self) -> None:
        """Host marks are readable at once."""

    def seconds_at(self, mark: int) -> float:
        return (mark - self.origin_ns) * 1e-9


class _Mark(NamedTuple):
    """A span whose clock marks cannot be read yet."""

    kind: SpanKind
    step: int | None
    start: Any
    end: Any
    fields: SpanFields


class Recorder:
    """One rank's open marks and finished records.

    Marks become spans only in `collect`, after the clock has settled, so that a step contains
    neither synchronisation nor formatting.

    Attributes:
        listen: called with the records that are collected.
    """

    def __init__(self, clock: Clock, reached: Reached | None = None) -> None:
        """Start empty; `reached` publishes this rank's progress to another process."""
        self.clock = clock
        self.listen: Callable[[Sequence[Record]], None] = lambda records: None
        self.reached = reached or Reached()
        self._step: int | None = None
        self._marks: list[_Mark] = []
        self._records: list[Record] = []

    @property
    def step(self) -> int | None:
        """Step of new records; None outside measured steps."""
        return self._step

    @step.setter
    def step(self, step: int | None) -> None:
        self._step = step
        if step is not None:
            self.reached.begin_step(step)

    @contextmanager
    def span(self, kind: SpanKind, **fields: Unpack[SpanFields]) -> Iterator[None]:
        """Record the enclosed work as one span."""
        self.reached.begin(kind)
        start = self.clock.mark()
        yield
        self.add_marks(kind, start, self.clock.mark(), **fields)

    def add_marks(self, kind: SpanKind, start: Any, end: Any, **fields: Unpack[SpanFields]) -> None:
        """Record a span from two marks, for example of a callback."""
        self._marks.append(_Mark(kind, self.step, start, end, fields))

    def sample(
        self, metric: str, value: float, *, step: int | None = None, **labels: Label
    ) -> None:
        """Record a number; `step` defaults to the current one."""
        at = self.step if step is None else step
        self._records.append(Sample(metric=metric, value=value, labels=labels, step=at))

    def add(self, record: Record) -> None:
        """Record a finished span or sample."""
        self._records.append(record)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Drop what the enclosed work records."""
        kept, (self._marks, self._records) = (self._marks, self._records), ([], [])
        try:
            yield
        finally:
            self._marks, self._records = kept

    def discard(self) -> None:
        """Drop all marks and records so far, after warm-up."""
        self.clock.settle()
        self._marks, self._records = [], []

    def collect(self) -> list[Record]:
        """Return all records since the last call, spans in order of start; settles the clock."""
        self.clock.settle()
        return self.collect_ready()

    def collect_ready(self) -> list[Record]:
        """Return samples, and spans whose marks are ready; never waits."""
        marks, self._marks = self._marks, []
        ready: list[_Mark] = []
        for mark in marks:
            # Start and end may be on different streams, so the end may be ready before the start.
            is_ready = self.clock.is_ready(mark.start) and self.clock.is_ready(mark.end)
            (ready if is_ready else self._marks).append(mark)
        spans = sorted((self._span(mark) for mark in ready), key=lambda span: span.start_s)
        records: list[Record] = [*spans, *self._records]
        self._records = []
        self.listen(records)
        return records

    def _span(self, mark: _Mark) -> Span:
        start_s = self.clock.seconds_at(mark.start)
        # Streams that wait for one event may pass their marks after it in either order.
        duration_s = max(0.0, self.clock.seconds_at(mark.end) - start_s)
        return Span(
            kind=mark.kind, step=mark.step, start_s=start_s, duration_s=duration_s, **mark.fields
        )
