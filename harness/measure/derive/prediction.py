"""Prediction and measurement of one run: error of the step, its parts, stages, memory.

The parts sum to the step in both, so the differences of the parts sum to the error:

    compute                computing time without concurrent transfers
    contention             slowdown of computing by concurrent transfers
    exposed communication  the rest of the simulated step
    optimizer
    rest                   data, copies and time that no span explains; predicted as 0

Measured contention is computing time in a step less that in steps without communication. If it is
unknown on either side, compute includes it on both.

Quality of the predictions of one cell: error, rank correlation, regret.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

import numpy as np

from harness.domain.prediction import PREDICTION_FILE, STRATEGY_FILE, Prediction
from harness.domain.record import MAX_RANK, SHORTEST_S, Record, Span
from harness.domain.run import device_names
from harness.domain.strategy import Strategy
from harness.errors import ResultsError
from harness.inputs import find_int, shorten
from harness.measure.derive.pipeline import (
    StageTimes,
    computes,
    idle_shares,
    stage_times,
    working_s,
)
from harness.measure.derive.ranks import median_of, rank_memory
from harness.measure.derive.spans import COMPUTE_KINDS, COMPUTING, StepWindows, samples_of
from harness.measure.derive.steps import full_times
from harness.measure.rank_records import Records
from harness.measure.statistics import Summary, rank_correlation, summarize
from harness.measure.store import Run
from harness.units import format_bytes

PARTS = ("compute", "contention", "exposed_communication", "optimizer", "rest")


@dataclass(frozen=True, kw_only=True)
class MemoryPeak:
    """Peak of one rank: predicted (None if unknown), and measured by kind (empty if unknown)."""

    rank: int
    predicted_bytes: int | None
    measured_bytes: dict[str, float]


@dataclass(frozen=True, kw_only=True)
class PredictedRun:
    """One run with its prediction.

    Attributes:
        plan: name of the strategy in its file.
        measured: the step of a full batch; None if the run is not ok or has no steps.
        predicted_by_rank, measured_by_rank: seconds by the names of PARTS, of each rank that
            computes; empty when unknown. Contention is in all or in none. It is negative if steps
            without communication computed longer, for example because a CPU that never idles
            cannot save up quota.
        sent_bytes: by rank, the predicted and the measured bytes that its node sends in a step.
        predicted_bubble: idle share, mean over the ranks that compute; None without spans.
    """

    plan: str
    method: str
    predicted_s: float
    measured: Summary | None
    predicted_by_rank: dict[int, dict[str, float]]
    measured_by_rank: dict[int, dict[str, float]]
    sent_bytes: dict[int, tuple[float, float]]
    predicted_bubble: float | None
    memory: tuple[MemoryPeak, ...]
    profile_fit_error: float | None
    search_s: float | None

    @property
    def error(self) -> float | None:
        """Predicted / measured - 1; negative: the prediction was optimistic."""
        return None if self.measured is None else self.predicted_s / self.measured.median - 1

    @property
    def predicted_parts(self) -> dict[str, float]:
        """Mean over the ranks that compute."""
        return mean_parts(self.predicted_by_rank.values())

    @property
    def measured_parts(self) -> dict[str, float]:
        """Mean over the ranks that compute."""
        return mean_parts(self.measured_by_rank.values())


def read_prediction(run_dir: Path) -> Prediction | None:
    """The prediction of a run; None when there is none.

    Raises:
        ResultsError: malformed; names the file.
    """
    path = run_dir / PREDICTION_FILE
    if not _exists(path):
        return None
    prediction = Prediction.load(path)
    foreign = [key for key in prediction.spans if key != str(find_int(key, at_most=MAX_RANK))]
    if foreign:
        raise ResultsError(
            f"prediction {path} has spans of {shorten(foreign[0])}, which is not a rank"
        )
    if prediction.step_s < SHORTEST_S:
        raise ResultsError(
            f"prediction {path} has a step of {prediction.step_s:g} s: it must be at least "
            f"{SHORTEST_S:g} s"
        )
    return prediction


def read_strategy(run_dir: Path) -> Strategy | None:
    """The strategy that a run trained; None when there is none.

    Raises:
        HarnessError: malformed; names the file.
    """
    path = run_dir / STRATEGY_FILE
    return Strategy.load(path) if _exists(path) else None


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError as error:
        raise ResultsError(f"{path}: {error.strerror}") from None


def predicted_run(run: Run, prediction: Prediction) -> PredictedRun:
    """Compare a run with its prediction; a run that is not ok has no measured numbers."""
    times = full_times(run) if run.header.status == "ok" else {}
    measured = measured_parts(run, times) if times else {}
    predicted = predicted_parts(prediction)
    known = [*predicted.values(), *measured.values()]
    if measured and not all("contention" in parts for parts in known):
        predicted = {rank: _without_contention(parts) for rank, parts in predicted.items()}
        measured = {rank: _without_contention(parts) for rank, parts in measured.items()}
    return PredictedRun(
        plan=prediction.strategy,
        method=prediction.method,
        predicted_s=prediction.step_s,
        measured=summarize(list(times.values())) if times else None,
        predicted_by_rank=predicted,
        measured_by_rank=measured,
        sent_bytes=_sent_bytes(run, prediction),
        predicted_bubble=predicted_bubble(prediction),
        memory=_memory(run, prediction),
        profile_fit_error=prediction.profile_fit_error,
        search_s=prediction.search_s,
    )


def mean_parts(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Mean of each part over ranks or steps; contention only if all have it."""
    known = list(parts)
    if not all("contention" in part for part in known):
        known = [_without_contention(part) for part in known]
    names = [name for name in PARTS if known and name in known[0]]
    return {name: fmean(part[name] for part in known) for name in names}


def _without_contention(parts: Mapping[str, float]) -> dict[str, float]:
    """The parts with contention added to compute."""
    joined = dict(parts)
    joined["compute"] += joined.pop("contention", 0.0)
    return joined


def _predicted_parts_of(
    spans: Sequence[Span], step_s: float, contention_s: float | None
) -> dict[str, float]:
    one_step = Span(kind="step", start_s=0.0, duration_s=step_s)
    whole = next((span for span in spans if span.kind == "step"), one_step)
    compute_s = working_s(spans, whole, COMPUTING)
    optimizer_s = working_s(spans, whole, ("optimizer",))
    known = {} if contention_s is None else {"contention": contention_s}
    return {
        "compute": compute_s - (contention_s or 0.0),
        **known,
        "exposed_communication": step_s - compute_s - optimizer_s,
        "optimizer": optimizer_s,
        "rest": 0.0,
    }


def predicted_parts(prediction: Prediction) -> dict[int, dict[str, float]]:
    """Seconds by the names of PARTS, of each rank that computes; empty without spans."""
    contention = prediction.contention_s or {}
    return {
        int(rank): _predicted_parts_of(spans, prediction.step_s, contention.get(rank))
        for rank, spans in prediction.spans.items()
        if computes(spans)
    }


def predicted_bubble(prediction: Prediction) -> float | None:
    """Idle share, mean over the ranks that compute; None without spans."""
    shares = [share for own in prediction.spans.values() for share in idle_shares(own).values()]
    return fmean(shares) if shares else None


def middle_steps(times: Mapping[int, float]) -> set[int]:
    """Steps between the quartiles of the durations, so that outliers do not affect means."""
    first, third = np.percentile(list(times.values()), [25, 75])
    return {step for step, time in times.items() if first <= time <= third}


def measured_parts(run: Run, times: Mapping[int, float]) -> dict[int, dict[str, float]]:
    """Seconds by the names of PARTS, mean over the middle steps, of each rank that computes."""
    wanted = np.array(sorted(middle_steps(times)), dtype=np.int64)
    found = {rank: _measured_parts_of(records, wanted) for rank, records in run.ranks.items()}
    return {rank: parts for rank, parts in found.items() if parts}


def _measured_parts_of(records: Sequence[Record], wanted: np.ndarray) -> dict[str, float]:
    """Parts of one rank, mean over the wanted steps; empty if it computes in none."""
    windows = StepWindows(Records.of(records).columns)
    computing, optimizer = windows.mask_of(COMPUTING), windows.mask_of(("optimizer",))
    counts = windows.steps_with(computing) & np.isin(windows.steps, wanted)
    if not counts.any():
        return {}
    compute_s, optimizer_s = windows.working_s(computing), windows.working_s(optimizer)
    active_s = windows.covered_s(windows.mask_of((*COMPUTE_KINDS, "communication")))
    alone = samples_of(records, "no_sync_compute_s")
    columns = {
        "compute": compute_s,
        "exposed_communication": active_s - compute_s - optimizer_s,
        "optimizer": optimizer_s,
        "rest": windows.step_s - active_s,
    }
    if alone:  # steps without communication
        no_sync_s = median(sample.value for sample in alone)
        columns["contention"] = compute_s + optimizer_s - no_sync_s
        columns["compute"] = compute_s - columns["contention"]
    return {name: fmean(columns[name][counts].tolist()) for name in PARTS if name in columns}


def _memory(run: Run, prediction: Prediction) -> tuple[MemoryPeak, ...]:
    return tuple(
        MemoryPeak(
            rank=rank,
            predicted_bytes=prediction.memory_bytes.get(name),
            measured_bytes=rank_memory(run.ranks.get(rank, [])),
        )
        for rank, name in device_names(run.header.ranks).items()
    )


def _sent_bytes(run: Run, prediction: Prediction) -> dict[int, tuple[float, float]]:
    """Measured by NIC counters, with the headers of packets and all that others send; empty on one
    host, whose ranks send each other what no NIC should carry."""
    if len({info.hostname for info in run.header.ranks}) < 2:
        return {}
    measured = {rank: median_of(records, "nic_sent_bytes") for rank, records in run.ranks.items()}
    return {
        rank: (prediction.sent_bytes[str(rank)], n_bytes)
        for rank, n_bytes in measured.items()
        if n_bytes is not None and str(rank) in prediction.sent_bytes
    }


def unpredicted_traffic(compared: PredictedRun) -> str:
    """A line if a node sends by a quarter and 1 MiB more than predicted; else empty."""
    more = {rank: after - before for rank, (before, after) in compared.sent_bytes.items()}
    rank = max(more, key=more.__getitem__, default=0)
    predicted, measured = compared.sent_bytes.get(rank, (0.0, 0.0))
    if measured - predicted <= max(2**20, predicted / 4):
        return ""
    return (
        f"rank {rank} sends {format_bytes(measured)} a step instead of {format_bytes(predicted)}: "
        "the prediction lacks a transfer, or another program uses the network interface"
    )


def predicted_stages(prediction: Prediction) -> tuple[StageTimes, ...]:
    """The simulated times of every stage; `pipeline_summary` gives the measured ones."""
    return stage_times({int(rank): spans for rank, spans in prediction.spans.items()})


@dataclass(frozen=True, kw_only=True)
class RankedStrategy:
    """One strategy of a cell: its predicted and its measured step."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class CellSummary:
    """How well the prediction orders strategies of equal model, batch, dtype and cluster: a cell.

    Attributes:
        n_failed: predicted strategies without a measured step.
        median_error, worst_error: of |error| over the strategies.
        rank_correlation: Spearman's, predicted against measured; None below three strategies or
            when either side is constant.
        chosen: the strategy with the fastest predicted step; among equals the slowest measured,
            where a failed one counts as slowest.
        best: the strategy with the fastest measured step.
        regret: measured step of `chosen` over that of `best`, less 1; None where `chosen` failed.
    """

    n_strategies: int
    n_failed: int
    median_error: float
    worst_error: float
    rank_correlation: float | None
    chosen: str
    best: str
    regret: float | None


def cell_summary(
    strategies: Sequence[RankedStrategy], failed: Mapping[str, float] | None = None
) -> CellSummary:
    """Judge the predictions of one cell.

    Args:
        strategies: those with a measured step.
        failed: predicted steps, by name, of those without a measured step.

    Raises:
        ValueError: no strategy was measured.
    """
    if not strategies:
        raise ValueError("a cell is judged by at least one strategy that has a measured step")
    errors = [abs(judged.error) for judged in strategies]
    failed = failed or {}
    chosen = min(strategies, key=lambda judged: (judged.predicted_s, -judged.measured_s))
    faster = {name: step_s for name, step_s in failed.items() if step_s <= chosen.predicted_s}
    fastest_failed = min(faster, key=faster.__getitem__, default=None)
    best = min(strategies, key=lambda judged: judged.measured_s)
    return CellSummary(
        n_strategies=len(strategies),
        n_failed=len(failed),
        median_error=median(errors),
        worst_error=max(errors),
        rank_correlation=rank_correlation(
            [judged.predicted_s for judged in strategies],
            [judged.measured_s for judged in strategies],
        ),
        chosen=fastest_failed or chosen.name,
        best=best.name,
        regret=None if fastest_failed else chosen.measured_s / best.measured_s - 1,
    )
