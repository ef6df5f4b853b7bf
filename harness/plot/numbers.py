"""The numbers of one run that figures draw: derived once, so that its records can be dropped."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from harness.domain.run import RunHeader
from harness.errors import first_line
from harness.measure.derive import (
    CollectiveRow,
    LinkMatrix,
    MatmulRow,
    MemoryRow,
    PipelineSummary,
    PredictedRun,
    SummaRow,
    TrainingSummary,
    best_link_bytes_per_s,
    collective_table,
    epoch_times,
    link_matrices,
    matmul_table,
    memory_table,
    nic_limit_bytes_per_s,
    pipeline_summary,
    predicted_run,
    predicted_stages,
    step_times,
    stolen_shares,
    summa_table,
    training_summary,
)
from harness.measure.derive.changes import ChangeRow, change_rows
from harness.measure.derive.devices import info_of
from harness.measure.derive.spans import samples_of
from harness.measure.store import Problem, Run, read_ranks
from harness.plot.plans import Plan, read_plan
from harness.plot.timeline_rows import timeline_rows

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
        changes: of the strategy while it trained.
        timeline: rows of the predicted and the measured step; empty unless both are known.
        predicted_stage_s: by stage, of one microbatch.
        stolen: share of each host's processor time that a hypervisor gave to other guests.
    """

    path: Path
    header: RunHeader
    summary: TrainingSummary | None = None
    times: dict[int, float] = field(default_factory=dict)
    changes: tuple[ChangeRow, ...] = ()
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
    best_link_bytes_per_s: float | None = None
    readings: tuple[Reading, ...] = ()
    stolen: dict[str, float] = field(default_factory=dict)

    @cached_property
    def network_bytes_per_s(self) -> float | None:
        """Speed of the slowest NIC by the header, else the best link that the run measured."""
        return nic_limit_bytes_per_s(self) or self.best_link_bytes_per_s


def _training(run: Run, plan: Plan) -> dict[str, Any]:
    times = step_times(run) or epoch_times(run)
    return {"summary": training_summary(run), "times": times, "changes": change_rows(run)}


def _pipeline(run: Run, plan: Plan) -> dict[str, Any]:
    return {"is_planned_pipeline": plan.is_pipeline, "pipeline": pipeline_summary(run)}


def _prediction(run: Run, plan: Plan) -> dict[str, Any]:
    if plan.prediction is None:
        return {}
    stages = predicted_stages(plan.prediction)
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
        "best_link_bytes_per_s": best_link_bytes_per_s(run),
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
    ranks, problems = read_ranks(run_dir, header)
    plan, of_plan = read_plan(run_dir)
    problems += of_plan
    run = Run(path=run_dir, header=header, ranks=ranks)
    found: dict[str, Any] = {}
    for derive in (*DERIVATIONS.get(header.workload, ()), _host):
        try:
            found |= derive(run, plan)
        except Exception as error:  # the rest of the run and all other runs are drawn
            name = derive.__name__.removeprefix("_")
            reason = f"{type(error).__name__}: {first_line(error)}"
            problems.append((run_dir, f"its numbers of {name} cannot be derived ({reason})"))
    return RunNumbers(path=run_dir, header=header, **found), problems
