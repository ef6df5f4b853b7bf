"""A run as a trace for Perfetto (ui.perfetto.dev) and chrome://tracing.

A process for each node and, below, one for what was predicted of it; in a process a thread for each
rank and row:

    tesla0               rank 0 step            |------------------------------|
                         rank 0 work            | forward  | backward     | opt |
                         rank 0 communication            | bucket0 |
                         rank 0 communication 2             | bucket1 |
    predicted: tesla0    rank 0 work            | conv1 | conv2 | ...

The Trace Event Format that Perfetto and chrome://tracing read, in its JSON object form.

Events of one thread must not overlap unless they nest, so that what a rank does at the same time
gets rows of its own. Times are microseconds; whole nanoseconds inside, so that neighbours meet.

Format: docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from harness.domain.record import Record, Span
from harness.errors import ResultsError
from harness.measure.derive.devices import info_of
from harness.measure.derive.timeline import (
    Shifts,
    clock_offsets,
    clock_shifts,
    detailed_times,
    median_step,
    moved,
)
from harness.measure.store import Run
from harness.plot.numbers import Plan

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

    def _describe(self, key: str, pid: int, tid: int, **values: Any) -> None:
        event = {"ph": "M", "name": key, "pid": pid, "tid": tid, "ts": 0, "args": values}
        self.events.append(event)

    def add_rank(self, pid: int, rank: int, spans: Sequence[Span]) -> list[Slice]:
        """Complete events of one rank, each row in a thread of its own."""
        slices: list[Slice] = []
        for row in ROWS:
            own = [s for s in spans if (s.kind if s.kind in ROWS else "work") == row]
            for number, lane in enumerate(_lanes(own), start=1):
                name = f"rank {rank} {row}" + ("" if number == 1 else f" {number}")
                self._n_threads += 1
                tid = FIRST_THREAD + self._n_threads
                self._describe("thread_name", pid, tid, name=name)
                self._describe("thread_sort_index", pid, tid, sort_index=tid)
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


def _shifted(records: Iterable[Record], by_s: float) -> list[Span]:
    return [moved(record, by_s) for record in records if isinstance(record, Span)]


def _flows(
    slices: Sequence[tuple[int, Slice]], error_s: float | None
) -> Iterator[tuple[Slice, Slice]]:
    """Pairs of a pass and the wait of another rank that its result ended, as far as they tell.

    The sender's last part of the pass of that microbatch which ended before the wait did, as far as
    clocks tell; where none had, the first that had begun.
    """
    slack_ns = round((error_s or 0.0) * 1e9)
    passes: dict[tuple[int, int | None, int | None, str | None], list[Slice]] = defaultdict(list)
    for rank, item in slices:
        if item.span.stage is not None and item.span.pass_ is None:
            passes[rank, item.span.step, item.span.microbatch, item.span.kind].append(item)
    for _, item in slices:
        span = item.span
        if not span.is_wait or span.peer is None:
            continue
        made = passes[span.peer, span.step, span.microbatch, span.pass_]
        begun = [other for other in made if other.start_ns < item.end_ns]
        ended = [other for other in begun if other.end_ns <= item.end_ns + slack_ns]
        if ended:
            yield max(ended, key=lambda other: other.end_ns), item
        elif begun:
            yield min(begun, key=lambda other: other.start_ns), item


def trace_bytes(run: Run, plan: Plan) -> bytes:
    """The run's spans on rank 0's clock, and the predicted step beside the measured median step, as
    a file's bytes; equal runs give equal bytes.

    Raises:
        ResultsError: the run holds no finished step.
    """
    times = detailed_times(run)
    median = median_step(times)
    if median is None:
        raise ResultsError(
            f"{run.path} holds no finished step: give the directory of a training run that ended"
        )
    shifts = clock_shifts(run, median)
    # The median step begins at 0 and earlier ones before it, but viewers want times above 0.
    before_s = -min(
        span.start_s - shift_s
        for rank, shift_s in shifts.by_rank.items()
        for span in run.ranks[rank]
        if isinstance(span, Span)
    )
    events = TraceEvents()
    _add_measured(events, run, shifts, before_s)
    if plan.prediction is not None:
        for rank in sorted(int(key) for key in plan.prediction.spans):
            host = info_of(run, rank).hostname
            pid = events.process(f"predicted: {host}", f"beside step {median}")
            events.add_rank(pid, rank, _shifted(plan.prediction.spans[str(rank)], before_s))
    trace = {
        "traceEvents": events.events,
        "displayTimeUnit": "ms",
        "otherData": _facts(run, plan, times[median], median, shifts.error_s),
    }
    return json.dumps(trace, separators=(",", ":")).encode() + b"\n"


def _add_measured(events: TraceEvents, run: Run, shifts: Shifts, before_s: float) -> None:
    slices: list[tuple[int, Slice]] = []
    for rank, shift_s in shifts.by_rank.items():
        pid = events.process(info_of(run, rank).hostname, _clock_words(shifts.error_s))
        spans = _shifted(run.ranks[rank], before_s - shift_s)
        slices += [(rank, item) for item in events.add_rank(pid, rank, spans)]
    for sent, waited in _flows(slices, shifts.error_s):
        events.add_flow(sent, waited)


def _clock_words(error_s: float | None) -> str:
    if error_s is None:
        return "clocks not measured"
    return f"clocks aligned to ± {error_s * 1e6:.3g} us"


def _facts(
    run: Run, plan: Plan, median_s: float, step: int, error_s: float | None
) -> dict[str, Any]:
    header = run.header
    facts: dict[str, Any] = {
        "run": header.run_id,
        "model": header.config.get("model"),
        "strategy": header.config.get("strategy"),
        "status": header.status,
        "start_utc": header.start_utc,
        "commit": header.commit,
        "median_step": step,
        "median_step_us": median_s * 1e6,
        "clocks": _clock_words(error_s),
        "clock_offsets": {
            f"rank {rank}": {"offset_us": offset.offset_s * 1e6, "error_us": offset.error_s * 1e6}
            for rank, offset in clock_offsets(run).items()
        },
    }
    if error_s is None:
        facts["clocks"] += f": step {step} begins at the same time on every rank"
    if plan.prediction is not None:
        facts["plan"] = plan.prediction.strategy
        facts["predicted_step_us"] = plan.prediction.step_s * 1e6
    return facts
