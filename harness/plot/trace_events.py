"""The Trace Event Format that Perfetto and chrome://tracing read, in its JSON object form.

Events of one thread must not overlap unless they nest, so that what a rank does at the same time
gets rows of its own. Times are microseconds; whole nanoseconds inside, so that neighbours meet.

Format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from harness.domain.record import Span

FIRST_THREAD = 1000  # a thread whose number is its process's counts as that one's main thread
ROWS = ("step", "work", "communication")
# Neighbours that overlap by no more do so by rounding.
SLACK_NS = 10


class Slice(NamedTuple):
    """A span in a row of the trace."""

    span: Span
    pid: int
    tid: int
    start_ns: int
    end_ns: int


class TraceEvents:
    """Collects events; numbers processes and threads in the order in which they come."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._pids: dict[str, int] = {}
        self._n_threads = 0
        self._n_flows = 0

    def process(self, name: str, labels: str) -> int:
        """The number of a process, made when it is new; `labels` are shown with its name."""
        if name not in self._pids:
            pid = self._pids[name] = len(self._pids) + 1
            self._describe("process_name", pid, 0, name=name)
            self._describe("process_labels", pid, 0, labels=labels)
            self._describe("process_sort_index", pid, 0, sort_index=pid)
        return self._pids[name]

    def _thread(self, pid: int, name: str) -> int:
        self._n_threads += 1
        tid = FIRST_THREAD + self._n_threads
        self._describe("thread_name", pid, tid, name=name)
        self._describe("thread_sort_index", pid, tid, sort_index=tid)
        return tid

    def _describe(self, key: str, pid: int, tid: int, **values: Any) -> None:
        event = {"ph": "M", "name": key, "pid": pid, "tid": tid, "ts": 0, "args": values}
        self.events.append(event)

    def add_rank(self, pid: int, rank: int, spans: Sequence[Span]) -> list[Slice]:
        """Complete events of one rank, each row in a thread of its own."""
        slices: list[Slice] = []
        for row in ROWS:
            own = [span for span in spans if _row_of(span) == row]
            for number, lane in enumerate(_lanes(own), start=1):
                name = f"rank {rank} {row}" + ("" if number == 1 else f" {number}")
                tid = self._thread(pid, name)
                slices += [Slice(span, pid, tid, start, end) for span, start, end in lane]
        self.events += [_complete(item) for item in slices]
        return slices

    def add_flow(self, source: Slice, target: Slice) -> None:
        """An arrow from the end of one slice to the end of another, or from when that one ends if
        it is first: `source` must have begun by then."""
        self._n_flows += 1
        base = {"cat": "transfer", "name": "transfer", "id": self._n_flows}
        # An arrow belongs to the slice that holds its time, so it ends just within.
        end, arrives = (max(s.start_ns, s.end_ns - 1) / 1e3 for s in (source, target))
        leaves = min(end, arrives)
        self.events += [
            {**base, "ph": "s", "pid": source.pid, "tid": source.tid, "ts": leaves},
            {**base, "ph": "f", "bp": "e", "pid": target.pid, "tid": target.tid, "ts": arrives},
        ]


def _row_of(span: Span) -> str:
    return span.kind if span.kind in ("step", "communication") else "work"


def _lanes(spans: Iterable[Span]) -> list[list[tuple[Span, int, int]]]:
    """As few rows as possible in which no two spans overlap: (span, start, end) in nanoseconds."""
    timed = [(round(s.start_s * 1e9), round((s.start_s + s.duration_s) * 1e9), s) for s in spans]
    lanes: list[list[tuple[Span, int, int]]] = []
    for start, end, span in sorted(timed, key=lambda entry: entry[:2]):
        lane = next((own for own in lanes if own[-1][2] <= start + SLACK_NS), None)
        if lane is None:
            lanes.append([(span, start, end)])
        else:
            begin = max(start, lane[-1][2])
            lane.append((span, begin, max(begin, end)))
    return lanes


def _name_of(span: Span) -> str:
    """The name in a viewer: the kind first, because passes of both directions share a name."""
    if span.kind == "step":
        return f"step {span.step}"
    if span.kind in ("forward", "backward") and span.label:
        return f"{span.kind} {span.label}"
    return span.label or span.kind


def _complete(item: Slice) -> dict[str, Any]:
    span = item.span
    args = {"step": span.step, "n_bytes": span.n_bytes}
    return {
        "ph": "X",
        "name": _name_of(span),
        "cat": span.kind,
        "pid": item.pid,
        "tid": item.tid,
        "ts": item.start_ns / 1e3,
        "dur": (item.end_ns - item.start_ns) / 1e3,
        "args": {name: value for name, value in args.items() if value is not None},
    }
