"""A search's result for people, as JSON, and its progress on a terminal."""

from __future__ import annotations

import math
import sys
import time
from typing import TextIO

import msgspec

from harness.measure.text import table
from harness.plan.request import PlanResult, SearchProgress
from harness.units import format_bytes, format_duration

_MOST_DEVICES = 16
_ROUNDING = 1e-9


def json_line(result: PlanResult) -> str:
    """One JSON object."""
    return msgspec.json.encode(result).decode()


def result_lines(result: PlanResult) -> list[str]:
    """The plan, why it was chosen, what the others cost, and memory."""
    title = f"best plan by {result.cost}: {format_duration(result.predicted_step_s)} per step"
    if result.interrupted:
        title += " (interrupted: best so far)"
    ratios = f"{result.speedup_over_single:.2f} times one device"
    if not math.isnan(result.speedup_over_ddp):
        ratios += f", {result.speedup_over_ddp:.2f} times data parallel"
    lines = [
        title,
        f"  {ratios}",
        *_gap(result),
        f"  found by {result.method}; {result.n_proposals} judged, "
        f"{result.proposals_per_s:.0f}/s, {format_duration(result.search_cpu_s)} of CPU, "
        f"{format_bytes(result.peak_rss_bytes)} at most",
        "",
        *(f"  {line}" for line in result.explanation),
        "",
    ]
    return [*lines, *_plans(result), "", *_memory(result)]


def _gap(result: PlanResult) -> list[str]:
    """How far the plan may be from the best one."""
    if result.lower_bound_s is None:
        return []
    gap = result.predicted_step_s / result.lower_bound_s - 1
    if gap < _ROUNDING:
        return ["  optimal: no plan of this kind is faster by this cost"]
    least = format_duration(result.lower_bound_s)
    return [f"  at most {gap:.1%} above the best plan, which takes at least {least}"]


def _plans(result: PlanResult) -> list[str]:
    def row(name: str, step_s: float | None, note: str) -> list[str]:
        if step_s is None:
            return [name, "-", "-", note or "does not fit"]
        ratio = step_s / result.predicted_step_s
        return [name, format_duration(step_s), f"{ratio:.2f}", note]

    rows = [row("this plan", result.predicted_step_s, "")]
    rows += [row(other.name, other.step_s, other.note) for other in result.runners_up]
    return table(["plan", "step", "times best", "note"], rows)


def _memory(result: PlanResult) -> list[str]:
    devices = list(result.memory_bytes.items())
    rows = [[name, format_bytes(n_bytes)] for name, n_bytes in devices[:_MOST_DEVICES]]
    lines = table(["device", "peak memory"], rows)
    if len(devices) > _MOST_DEVICES:
        lines.append(f"... and {len(devices) - _MOST_DEVICES} more (--json has all)")
    return lines


class ProgressLine:
    """Rewrites one line of a terminal; silent elsewhere."""

    def __init__(self, stream: TextIO = sys.stderr, least_interval_s: float = 0.1) -> None:
        self._stream = stream
        self._is_live = stream.isatty()
        self._interval_s = least_interval_s
        self._last_s = float("-inf")
        self._width = 0

    def __call__(self, progress: SearchProgress) -> None:
        now_s = time.monotonic()
        if not self._is_live or now_s - self._last_s < self._interval_s:
            return
        self._last_s = now_s
        share = "" if progress.fraction is None else f"{progress.fraction:4.0%}  "
        text = (
            f"{share}{progress.n_proposals} judged  best "
            f"{format_duration(progress.best_step_s)}  {progress.phase}"
        )
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)

    def clear(self) -> None:
        """Leave the line empty for later output."""
        if self._width:
            self._stream.write("\r" + " " * self._width + "\r")
            self._stream.flush()
            self._width = 0
