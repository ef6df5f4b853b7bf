"""One step of all ranks on one clock, measured or predicted.

Each rank has its own clock and estimated its offset to rank 0's when the run began (shortest of
several round trips, uncertain by half of it). Drift since then is not corrected.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from harness.domain.prediction import Prediction
from harness.domain.record import Record, Span
from harness.measure.derive.pipeline import computes
from harness.measure.derive.spans import samples_of
from harness.measure.derive.steps import full_times
from harness.measure.rank_records import Records
from harness.measure.store import Run


class ClockOffset(NamedTuple):
    """Offset that converts a rank's times to rank 0's by subtraction, and its error bound."""

    offset_s: float
    error_s: float


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """One step; times of `spans` count from its first start on any rank.

    Attributes:
        step: number of the step; None for a prediction.
        duration_s: the maximum over ranks of its `step` span.
        clock_error_s: largest error of the alignment; 0 for a prediction. None if a clock was not
            measured; times then count from each rank's start.
    """

    step: int | None
    duration_s: float
    spans: dict[int, list[Span]]
    clock_error_s: float | None


def _last(records: list[Record], metric: str) -> float | None:
    samples = samples_of(records, metric)
    return samples[-1].value if samples else None


def clock_offsets(run: Run) -> dict[int, ClockOffset]:
    """The offsets of the ranks that measured one."""
    found = {}
    for rank, records in sorted(run.ranks.items()):
        offset_s = _last(records, "clock_offset_s")
        error_s = _last(records, "clock_offset_error_s")
        if offset_s is not None and error_s is not None:
            found[rank] = ClockOffset(offset_s, error_s)
    return found


def detailed_times(run: Run) -> dict[int, float]:
    """Seconds of each step of which some rank recorded details."""
    every = [Records.of(records).columns for records in run.ranks.values()]
    known = {step for spans in every for step in spans.steps[spans.is_detailed].tolist()}
    return {step: time_s for step, time_s in full_times(run).items() if step in known}


def median_step(times: Mapping[int, float]) -> int | None:
    """The step with the (lower) median duration; the earlier one of equals."""
    order = sorted(times, key=lambda step: (times[step], step))
    return order[(len(order) - 1) // 2] if order else None


def moved(span: Span, by_s: float) -> Span:
    """The span, shifted in time."""
    return msgspec.structs.replace(span, start_s=span.start_s + by_s)


def _start_of(spans: Sequence[Span]) -> float:
    whole = next((span for span in spans if span.kind == "step"), None)
    return whole.start_s if whole else min(span.start_s for span in spans)


class Shifts(NamedTuple):
    """Offsets to subtract from each rank's times, so that clocks align and a step begins at 0.

    Attributes:
        error_s: largest error of a rank's clock against rank 0's; None if a clock was not
            measured; the step then begins at 0 on every rank.
    """

    by_rank: dict[int, float]
    error_s: float | None


def clock_shifts(run: Run, step: int) -> Shifts:
    """Shifts of the ranks that recorded a step.

    The step begins when the first rank that computes begins it, because a rank that a strategy
    leaves out finishes all steps early.
    """
    known = {rank: Records.of(own).by_step.get(step) for rank, own in sorted(run.ranks.items())}
    starts = {rank: _start_of(spans) for rank, spans in known.items() if spans}
    working = [rank for rank in starts if computes(known[rank] or ())]
    offsets = clock_offsets(run)
    if any(rank not in offsets for rank in starts):
        return Shifts(starts, None)
    origin_s = min(starts[rank] - offsets[rank].offset_s for rank in working or starts)
    by_rank = {rank: offsets[rank].offset_s + origin_s for rank in starts}
    return Shifts(by_rank, max(offsets[rank].error_s for rank in starts))


def measured_timeline(run: Run) -> Timeline | None:
    """The run's median step with clocks aligned, of the ranks that compute (all ranks if none
    does); None when no step ended."""
    times = detailed_times(run)
    step = median_step(times)
    if step is None:
        return None
    shifts = clock_shifts(run, step)
    spans = {
        rank: [moved(span, -shift_s) for span in Records.of(run.ranks[rank]).by_step[step]]
        for rank, shift_s in shifts.by_rank.items()
    }
    working = {rank: own for rank, own in spans.items() if computes(own)}
    return Timeline(
        step=step, duration_s=times[step], spans=working or spans, clock_error_s=shifts.error_s
    )


def predicted_timeline(prediction: Prediction) -> Timeline:
    """The simulated step; ranks without spans are left out."""
    ranks = sorted((int(rank), spans) for rank, spans in prediction.spans.items() if spans)
    return Timeline(step=None, duration_s=prediction.step_s, spans=dict(ranks), clock_error_s=0.0)
