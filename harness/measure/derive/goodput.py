"""Goodput: the share of a training's wall time in steps that count, over all runs that it took."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np

from harness.domain.run import RunHeader
from harness.measure.derive.settings import changing_flags
from harness.measure.derive.spans import COMPUTING, samples_of
from harness.measure.derive.steps import change_times
from harness.measure.derive.timeline import clock_offsets
from harness.measure.rank_records import KIND_CODES, Records, Spans
from harness.measure.store import Run

# Flags of runs that have a goodput, beside those that change the strategy.
_KEEPING = ("save_every", "survive", "continues")


@dataclass(frozen=True, kw_only=True)
class StepClock:
    """The steps of one run, in seconds since 1970 by the clock of rank 0's host.

    Attributes:
        steps: start and end of each step.
        saving: seconds of each save, by the step before it.
        still: seconds standing still in each change of strategy, by the step after it.
    """

    steps: dict[int, tuple[float, float]]
    saving: dict[int, float]
    still: dict[int, float]


@dataclass(frozen=True, kw_only=True)
class Goodput:
    """The wall time of a training, from the start of its first measured step to the end of its
    last, in seconds. Definitions: docs/metrics.md.

    Attributes:
        run_ids: of the runs, each continued by the next.
        n_repeated: steps that a later run trained again, because their results were lost.
    """

    run_ids: tuple[str, ...]
    n_steps: int
    n_repeated: int
    wall_s: float
    steps_s: float
    repeated_s: float
    saving_s: float
    changing_s: float
    restarting_s: float

    @property
    def share(self) -> float:
        return self.steps_s / self.wall_s

    @property
    def other_s(self) -> float:
        known_s = self.steps_s + self.repeated_s + self.saving_s + self.changing_s
        return max(0.0, self.wall_s - known_s - self.restarting_s)


def step_clock(run: Run) -> StepClock | None:
    """None without steps, without the time at which the run began, or for a run that neither saves
    its state, changes, survives the loss of a rank, nor continues another."""
    config = run.header.config
    if not (any(map(config.get, _KEEPING)) or changing_flags(config)):
        return None
    try:
        begun_s = datetime.fromisoformat(run.header.start_utc).timestamp()
    except (ValueError, OverflowError):
        return None
    steps = _steps(run)
    if not steps:
        return None
    return StepClock(
        steps={step: (begun_s + start_s, begun_s + end_s) for step, (start_s, end_s) in steps},
        saving={
            save.step: save.value
            for save in samples_of(run.ranks.get(0, []), "save_s")
            if save.step is not None
        },
        still=change_times(run),
    )


def _steps(run: Run) -> list[tuple[int, tuple[float, float]]]:
    """Start and end of each step on rank 0's clock, of the first rank that computed and recorded
    it: rank 0 may die before its last record is written, and a rank that idles runs ahead."""
    offsets, found = clock_offsets(run), dict[int, tuple[float, float]]()
    for rank, records in sorted(run.ranks.items()):
        spans = Records.of(records).columns
        is_step = (spans.kind == KIND_CODES["step"]) & ~_is_idle(spans)[spans.group]
        starts_s = spans.start_s[is_step] - (offsets[rank].offset_s if rank in offsets else 0.0)
        ends_s = starts_s + spans.duration_s[is_step]
        times = zip(starts_s.tolist(), ends_s.tolist(), strict=True)
        found = dict(zip(spans.steps[spans.group[is_step]].tolist(), times, strict=True)) | found
    return sorted(found.items())


def _is_idle(spans: Spans) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Whether the rank computes nothing, by step; without details, as in the step before."""
    n_steps = len(spans.steps)
    is_computing = np.isin(spans.kind, [KIND_CODES[kind] for kind in COMPUTING])
    n_spans, n_computing = (
        np.bincount(group, minlength=n_steps) for group in (spans.group, spans.group[is_computing])
    )
    known = np.maximum.accumulate(np.where(n_spans > 1, np.arange(n_steps), -1))
    found: np.ndarray[tuple[int], np.dtype[np.bool_]] = (known >= 0) & (n_computing[known] == 0)
    return found


def continued_runs(headers: Iterable[RunHeader]) -> list[tuple[str, ...]]:
    """The ids of runs of which each continues the one before; every run is in a tuple."""
    earlier = {header.run_id: str(header.config.get("continues", "")) for header in headers}
    found = []
    for last in sorted(earlier.keys() - set(earlier.values())):
        runs = [last]
        while (before := earlier[runs[-1]]) in earlier and before not in runs:
            runs.append(before)
        found.append(tuple(reversed(runs)))
    return found


def goodput(run_ids: Sequence[str], clocks: Mapping[str, StepClock | None]) -> Goodput | None:
    """The goodput of runs of which each continues the one before.

    Args:
        clocks: by run.

    Returns:
        None unless there are several, a save or a change of strategy, in some time; and where a
        run begins before the one that it continues has ended, because clocks disagree.
    """
    known = [(run_id, clock) for run_id in run_ids if (clock := clocks.get(run_id)) is not None]
    runs = [clock for _, clock in known]
    if not runs or not (len(runs) > 1 or runs[0].saving or runs[0].still):
        return None
    starts_s = [min(start_s for start_s, _ in run.steps.values()) for run in runs]
    ends_s = [max(end_s for _, end_s in run.steps.values()) for run in runs]
    restarts_s = [b - a for a, b in zip(ends_s, starts_s[1:], strict=False)]
    if min(restarts_s, default=0.0) < 0 or ends_s[-1] <= starts_s[0]:
        return None  # a host's clock was set back, or the next run's host is behind
    counted_s, repeated_s = list[float](), list[float]()
    saving_s = changing_s = 0.0
    until = math.inf  # the first step of later runs
    for run in reversed(runs):
        for step, (start_s, end_s) in run.steps.items():
            (counted_s if step < until else repeated_s).append(end_s - start_s)
        saving_s += sum(value for step, value in run.saving.items() if step < max(run.steps))
        # A change before a run's first step is part of the restart, or earlier than the wall time.
        later = run.steps.keys() - {min(run.steps)}
        changing_s += sum(value for step, value in run.still.items() if step in later)
        until = min(until, *run.steps)
    return Goodput(
        run_ids=tuple(run_id for run_id, _ in known),
        n_steps=len(counted_s),
        n_repeated=len(repeated_s),
        wall_s=ends_s[-1] - starts_s[0],
        steps_s=sum(counted_s),
        repeated_s=sum(repeated_s),
        saving_s=saving_s,
        changing_s=changing_s,
        restarting_s=sum(restarts_s),
    )
