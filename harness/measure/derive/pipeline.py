"""Bubble and stage times of a pipeline, from its records.

    rank 0   F0 F1 F2 .. .. B0 B1 B2 opt        .. is the bubble: neither computing nor updating
    rank 1   .. F0 F1 F2 B0 B1 B2 .. opt

Bubble rate as in Zero Bubble Pipeline Parallelism (Qi et al., 2023): idle time over the whole
step. Because it is measured, idling of any cause counts.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Literal, get_args

from harness.domain.record import Record, Span
from harness.measure.derive.spans import COMPUTE_KINDS, COMPUTING, StepWindows, covered_s, waited_s
from harness.measure.rank_records import Records
from harness.measure.statistics import Summary, summarize
from harness.measure.store import Run

PassKind = Literal["forward", "recompute", "backward"]


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds of one microbatch in one stage, on the slowest of its ranks.

    Medians over steps of means over microbatches, which may differ in size; waiting inside a pass
    does not count.

    Attributes:
        ranks: those that compute the stage, ascending.
        backward_s: backward to inputs and to weights together.
    """

    stage: int
    ranks: tuple[int, ...]
    forward_s: float
    recompute_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        """Seconds of all passes of one microbatch."""
        return self.forward_s + self.recompute_s + self.backward_s


@dataclass(frozen=True, kw_only=True)
class PipelineSummary:
    """A run of two or more stages.

    Attributes:
        n_microbatches: number in each step.
        bubble: share of a step in which a rank idles, mean over the ranks with a stage, over
            steps.
        bubble_by_rank: the same for each such rank, median over steps.
    """

    n_microbatches: int
    stages: tuple[StageTimes, ...]
    bubble: Summary
    bubble_by_rank: dict[int, float]

    @property
    def n_stages(self) -> int:
        return len(self.stages)


def pass_of(span: Span) -> PassKind | None:
    """The pass that a span computes, `backward` to inputs, weights or both; None for others."""
    if span.pass_ == "recompute":
        return "recompute"
    if span.kind == "forward":
        return "forward"
    return "backward" if span.kind == "backward" else None


def computes(spans: Iterable[Span]) -> bool:
    """Whether a rank computes any operator."""
    return any(span.kind in COMPUTING for span in spans)


def working_s(spans: Sequence[Span], within: Span, kinds: Collection[str]) -> float:
    """Length of the union of the spans of some kinds, without waiting inside them."""
    working = [span for span in spans if span.kind in kinds]
    waits = [span for span in spans if span.is_wait]
    return covered_s([*working, *waits], within) - covered_s(waits, within)


def idle_shares(records: Iterable[Record]) -> dict[int, float]:
    """Share of each step in which one rank neither computes nor runs the optimizer.

    Empty for a rank that never computes.
    """
    windows = StepWindows(Records.of(records).columns)
    working_s = windows.working_s(windows.mask_of(COMPUTE_KINDS))
    counts = windows.steps_with(windows.mask_of(COMPUTING)) & (windows.step_s > 0)
    shares = 1 - working_s[counts] / windows.step_s[counts]
    return dict(zip(windows.steps[counts].tolist(), shares.tolist(), strict=True))


def stage_seconds(records: Iterable[Record]) -> dict[tuple[int, PassKind], list[float]]:
    """One rank's seconds by (stage, kind of pass) in each step, means over microbatches."""
    records = Records.of(records)
    if not records.stages:
        return {}
    seconds: dict[tuple[int, int, PassKind, int | None], float] = defaultdict(float)
    spans = records.columns
    working_s = (spans.duration_s - waited_s(spans)).tolist()
    for span, step, span_s in zip(spans.spans, spans.group.tolist(), working_s, strict=True):
        if span.stage is not None and (kind := pass_of(span)) is not None:
            seconds[step, span.stage, kind, span.microbatch] += span_s
    by_step: dict[tuple[int, int, PassKind], list[float]] = defaultdict(list)
    for (step, stage, kind, _), duration_s in seconds.items():
        by_step[step, stage, kind].append(duration_s)
    by_stage: dict[tuple[int, PassKind], list[float]] = defaultdict(list)
    for (_, stage, kind), durations_s in by_step.items():
        by_stage[stage, kind].append(fmean(durations_s))
    return dict(by_stage)


def stage_times(ranks: Mapping[int, Iterable[Record]]) -> tuple[StageTimes, ...]:
    """The times of every stage, from all ranks' records."""
    stages: dict[int, dict[int, dict[PassKind, float]]] = defaultdict(lambda: defaultdict(dict))
    for rank, records in ranks.items():
        for (stage, kind), seconds in stage_seconds(records).items():
            stages[stage][rank][kind] = median(seconds)
    found = []
    for stage, by_rank in sorted(stages.items()):
        slowest = max(by_rank.values(), key=lambda times: sum(times.values()))
        seconds_of = {f"{kind}_s": slowest.get(kind, 0.0) for kind in get_args(PassKind)}
        found.append(StageTimes(stage=stage, ranks=tuple(sorted(by_rank)), **seconds_of))
    return tuple(found)


def pipeline_summary(run: Run) -> PipelineSummary | None:
    """Summarise a pipeline; None for a run without spans of two or more stages."""
    stages = stage_times(run.ranks)
    if len(stages) < 2:
        return None
    idle = {rank: shares for rank, rs in sorted(run.ranks.items()) if (shares := idle_shares(rs))}
    finished = set.intersection(*(set(shares) for shares in idle.values())) if idle else set()
    if not finished:
        return None
    means = [sum(shares[s] for shares in idle.values()) / len(idle) for s in sorted(finished)]
    spans = (span for records in run.ranks.values() for span in Records.of(records).spans)
    return PipelineSummary(
        n_microbatches=1 + max(span.microbatch or 0 for span in spans),
        stages=stages,
        bubble=summarize(means),
        bubble_by_rank={rank: median(shares.values()) for rank, shares in idle.items()},
    )
