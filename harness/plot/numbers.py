"""The numbers of one run that figures draw: derived once, so that its records can be dropped."""

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

from harness.domain.prediction import PREDICTION_FILE, STRATEGY_FILE, Prediction
from harness.domain.record import Span
from harness.domain.run import RunHeader
from harness.domain.strategy import Strategy
from harness.errors import HarnessError, first_line
from harness.measure.derive.changes import ChangeRow, as_planned, change_rows
from harness.measure.derive.devices import (
    MatmulRow,
    MemoryRow,
    SummaRow,
    info_of,
    matmul_table,
    memory_table,
    summa_table,
)
from harness.measure.derive.doubts import stolen_shares
from harness.measure.derive.goodput import StepClock, step_clock
from harness.measure.derive.links import (
    CollectiveRow,
    LinkMatrix,
    best_links_bytes_per_s,
    collective_table,
    link_matrices,
    nic_limit_bytes_per_s,
)
from harness.measure.derive.noise import NoiseScale, noise_scale
from harness.measure.derive.pipeline import PipelineSummary, pass_of, pipeline_summary
from harness.measure.derive.prediction import (
    PredictedRun,
    predicted_run,
    predicted_stages,
    read_prediction,
    read_strategy,
)
from harness.measure.derive.spans import samples_of
from harness.measure.derive.steps import by_first_rank, epoch_times, step_times
from harness.measure.derive.timeline import measured_timeline, predicted_timeline
from harness.measure.derive.training import HELD_OUT, TrainingSummary, training_summary
from harness.measure.store import Problem, Run, read_run


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run's files; None is one that is absent or could not be read."""

    strategy: Strategy | None
    prediction: Prediction | None


def read_plan(run_dir: Path) -> tuple[Plan, list[Problem]]:
    """Read both files; one that is malformed is a problem, named with its path, and left out."""
    problems: list[Problem] = []
    strategy: Strategy | None = None
    prediction: Prediction | None = None
    try:
        strategy = read_strategy(run_dir)
    except HarnessError as error:
        problems.append((run_dir / STRATEGY_FILE, str(error)))
    try:
        prediction = read_prediction(run_dir)
    except HarnessError as error:
        problems.append((run_dir / PREDICTION_FILE, str(error)))
    return Plan(strategy=strategy, prediction=prediction), problems


SIDES = ("predicted", "measured")
PASSES = ("forward", "recompute", "backward")


def timeline_rows(run: Run, prediction: Prediction) -> list[dict[str, Any]]:
    """Empty for a run that is not ok, or without spans on either side."""
    measured = measured_timeline(run) if run.header.status == "ok" and prediction.spans else None
    if measured is None:
        return []
    return [
        {
            "side": side,
            "step": timeline.step,
            "step_s": timeline.duration_s,
            "clock_error_s": timeline.clock_error_s,
            "rank": rank,
        }
        | row
        for side, timeline in zip(SIDES, (predicted_timeline(prediction), measured), strict=True)
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


TELEMETRY = ("device_utilization_percent", "device_temperature_c", "memory_used_bytes", "power_w")


class Reading(NamedTuple):
    """One value that a device reported, at a time of its rank's own clock."""

    rank: int
    device: str
    metric: str
    time_s: float
    value: float


class SkippedProduct(NamedTuple):
    """A product that a rank's device could not do."""

    rank: int
    dtype: str
    size: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class RunNumbers:
    """One run; numbers that it did not measure are None or empty.

    Attributes:
        times: seconds of each step, or of each epoch where only epochs were logged.
        distributed: without their efficiency, which needs the peaks of all runs.
        losses: of each step.
        held_out: on held-out samples, by metric and epoch.
        changes: of the strategy while it trained.
        timeline: rows of the predicted and the measured step; empty unless both are known.
        predicted_stage_s: by stage, of one microbatch.
        stolen: share of each host's processor time that a hypervisor gave to other guests.
    """

    path: Path
    header: RunHeader
    summary: TrainingSummary | None = None
    times: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    held_out: dict[str, dict[int, float]] = field(default_factory=dict)
    changes: tuple[ChangeRow, ...] = ()
    clock: StepClock | None = None
    noise: NoiseScale | None = None
    pipeline: PipelineSummary | None = None
    is_planned_pipeline: bool = False
    predicted: PredictedRun | None = None
    predicted_stage_s: dict[int, float] = field(default_factory=dict)
    timeline: tuple[dict[str, Any], ...] = ()
    products: tuple[MatmulRow, ...] = ()
    skipped_products: tuple[SkippedProduct, ...] = ()
    memory: tuple[MemoryRow, ...] = ()
    distributed: tuple[SummaRow, ...] = ()
    collectives: tuple[CollectiveRow, ...] = ()
    links: tuple[LinkMatrix, ...] = ()
    best_links_bytes_per_s: dict[str, float] = field(default_factory=dict)
    readings: tuple[Reading, ...] = ()
    stolen: dict[str, float] = field(default_factory=dict)

    @cached_property
    def network_bytes_per_s(self) -> float | None:
        """Speed of the slowest NIC by the header, else the best link that the run measured."""
        best = max(self.best_links_bytes_per_s.values(), default=None)
        return nic_limit_bytes_per_s(self) or best

    def reached_s(self) -> dict[int, float]:
        """Seconds of all steps until the end of each, changes of the strategy included."""
        still: dict[int, float] = defaultdict(float)
        for change in self.changes:
            still[change.step] += change.still_s
        spent_s = [time_s + still.get(step, 0.0) for step, time_s in self.times.items()]
        return dict(zip(self.times, accumulate(spent_s), strict=True))


def _training(run: Run, plan: Plan) -> dict[str, Any]:
    return {
        "summary": training_summary(run),
        "times": step_times(run) or epoch_times(run),
        "losses": by_first_rank(run, "loss"),
        "held_out": {metric: by_first_rank(run, metric) for metric in HELD_OUT},
        "changes": change_rows(run),
        "clock": step_clock(run),
        "noise": noise_scale(run.ranks.get(0, ())),
    }


def _pipeline(run: Run, plan: Plan) -> dict[str, Any]:
    is_planned = plan.strategy is not None and len(plan.strategy.stages) > 1
    return {"is_planned_pipeline": is_planned, "pipeline": pipeline_summary(as_planned(run))}


def _prediction(run: Run, plan: Plan) -> dict[str, Any]:
    if plan.prediction is None:
        return {}
    stages, run = predicted_stages(plan.prediction), as_planned(run)
    return {
        "predicted": predicted_run(run, plan.prediction),
        "predicted_stage_s": {stage.stage: stage.total_s for stage in stages},
        "timeline": tuple(timeline_rows(run, plan.prediction)),
    }


def _matmul(run: Run, plan: Plan) -> dict[str, Any]:
    skipped = [
        SkippedProduct(rank, *(str(sample.labels[name]) for name in ("dtype", "n", "reason")))
        for rank, records in sorted(run.ranks.items())
        for sample in samples_of(records, "matmul_skipped")
    ]
    return {
        "products": tuple(matmul_table(run)),
        "skipped_products": tuple(skipped),
        "memory": tuple(memory_table(run)),
        "distributed": tuple(summa_table(run, {})),
    }


def _links(run: Run, plan: Plan) -> dict[str, Any]:
    return {
        "collectives": tuple(collective_table(run)),
        "links": tuple(link_matrices(run)),
        "best_links_bytes_per_s": best_links_bytes_per_s(run),
    }


def _host(run: Run, plan: Plan) -> dict[str, Any]:
    return {"stolen": stolen_shares(run), "readings": tuple(_readings(run))}


def _readings(run: Run) -> list[Reading]:
    found = []
    for rank, records in sorted(run.ranks.items()):
        host = info_of(run, rank).hostname
        for sample in (record for metric in TELEMETRY for record in samples_of(records, metric)):
            if sample.time_s is not None:
                device = str(sample.labels.get("device", ""))
                name = f"rank {rank} ({f'{host}:{device}' if device else host})"
                found.append(Reading(rank, name, sample.metric, sample.time_s, sample.value))
    return found


Derivation = Callable[[Run, Plan], dict[str, Any]]
DERIVATIONS: dict[str, tuple[Derivation, ...]] = {
    "train": (_training, _pipeline, _prediction),
    "matmul": (_matmul,),
    "links": (_links,),
}


def derive_numbers(run_dir: Path, header: RunHeader) -> tuple[RunNumbers, list[Problem]]:
    """Read a run and derive the numbers of its figures; unusable files and numbers are problems."""
    run, problems = read_run(run_dir, header)
    plan, of_plan = read_plan(run_dir)
    problems += of_plan
    found: dict[str, Any] = {}
    for derive in (*DERIVATIONS.get(header.workload, ()), _host):
        try:
            found |= derive(run, plan)
        except Exception as error:  # the rest of the run and all other runs are drawn
            name = derive.__name__.removeprefix("_")
            reason = f"{type(error).__name__}: {first_line(error)}"
            problems.append((run_dir, f"its numbers of {name} cannot be derived ({reason})"))
    return RunNumbers(path=run_dir, header=header, **found), problems
