"""The predicted and the measured step of one run as rows: a row for each span that is drawn."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from harness.domain.prediction import Prediction
from harness.domain.record import Span
from harness.measure.derive import Timeline, measured_timeline, predicted_timeline
from harness.measure.derive.pipeline import pass_of
from harness.measure.store import Run

SIDES = ("predicted", "measured")
PASSES = ("forward", "recompute", "backward")


def timeline_rows(run: Run, prediction: Prediction) -> list[dict[str, Any]]:
    """Empty for a run that is not ok, or without spans on either side."""
    measured = measured_timeline(run) if run.header.status == "ok" and prediction.spans else None
    if measured is None:
        return []
    return [
        row
        for side, timeline in zip(SIDES, (predicted_timeline(prediction), measured), strict=True)
        for row in _side_rows(timeline, side)
    ]


def _side_rows(timeline: Timeline, side: str) -> list[dict[str, Any]]:
    base = {
        "side": side,
        "step": timeline.step,
        "step_s": timeline.duration_s,
        "clock_error_s": timeline.clock_error_s,
    }
    return [
        base | {"rank": rank} | row
        for rank, spans in sorted(timeline.spans.items())
        for row in _joined(spans)
    ]


def _joined(spans: Iterable[Span]) -> list[dict[str, Any]]:
    """Spans of one rank as rows; operators that follow one another in one pass become one."""
    rows: list[dict[str, Any]] = []
    for span in sorted(spans, key=lambda span: (span.kind, span.start_s)):
        if span.kind == "step":
            continue
        kind = pass_of(span) or span.kind
        last = rows[-1] if rows else None
        is_next = (
            last is not None
            and kind in PASSES
            and (last["kind"], last["microbatch"]) == (kind, span.microbatch)
            # Ends and starts that are equal as times differ by rounding.
            and abs(last["start_s"] + last["duration_s"] - span.start_s) < 1e-9
        )
        if last is not None and is_next:
            last["duration_s"] = span.start_s + span.duration_s - last["start_s"]
            last["name"] = f"{last['name'].partition(' to ')[0]} to {span.label}"
        else:
            rows.append(
                {
                    "kind": kind,
                    "name": span.label,
                    "microbatch": span.microbatch,
                    "start_s": span.start_s,
                    "duration_s": span.duration_s,
                }
            )
    return rows
