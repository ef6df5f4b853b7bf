"""One training run in numbers: throughput, phases, communication, FLOP/s, memory, doubts."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from harness.domain.run import RankInfo, Status
from harness.measure.derive.devices import PeakKey, sum_of_peaks
from harness.measure.derive.doubts import Doubt, DoubtKind, outlier_doubts, outliers
from harness.measure.derive.pipeline import computes
from harness.measure.derive.ranks import RankSummary, mark_stragglers, median_of, rank_summary
from harness.measure.derive.settings import configured, configured_number, strategy_name
from harness.measure.derive.spans import PHASES, PhaseTable, phase_table, spans_of
from harness.measure.derive.steps import (
    by_first_rank,
    change_times,
    full_times,
    largest_by_step,
    samples_by_unit,
    step_times,
    values_by_step,
)
from harness.measure.statistics import Summary, distrust, summarize
from harness.measure.store import Run

_LONGEST_PLAN = 400  # characters


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """One training run; values that were not measured are None. Formulas: docs/metrics.md.

    Attributes:
        plan: the plan that was searched, in words; empty for other strategies.
        used_ranks: those that compute; a plan may leave others out.
        unit: `step`, or `epoch` when only epochs were logged.
        duration: seconds of a unit, maximum over ranks, over all units, without those of a
            smaller batch; of a run that changed its strategy one value, the mean step with the time
            standing still.
        n_samples: samples of the job in one such unit.
        throughput: samples per second of the job, from the median.
        tokens_per_sample: 1 or more for text; None for other samples.
        phases: mean seconds of a step by the names of PHASES, mean over the ranks that compute.
        overlap: communication covered by compute / communication, 0 to 1.
        exposed_communication_s: mean over steps and the ranks that compute, from spans.
        no_sync_exposed_s: second estimate: median step minus median `no_sync_step_s`.
        slowed_compute_s: contention: median compute in a step minus that in steps without
            synchronisation. The second estimate includes it, the first does not.
        last_loss_step: of a run that ended before the losses of its last steps were summed.
        no_sync_exposed_low_s, slowed_compute_low_s: the least that the intervals of the two medians
            leave; the difference is within noise unless it is above 0. None of a single step.
        validation_loss, accuracy: of the last evaluation on held-out samples, by the parameters;
            the others by their averages.
        ring_bytes: bytes that a ring all-reduce of the gradients sends, per rank and step.
        are_steps_judged: it is ok and kept its strategy, so that its steps should be alike.
        outlier_steps: steps far above the others.
    """

    run_id: str
    status: Status
    reason: str
    strategy: str
    model: str
    dtype: str
    n_ranks: int
    backend: str
    plan: str = ""
    used_ranks: tuple[int, ...] = ()
    unit: Literal["step", "epoch"] = "step"
    duration: Summary | None = None
    n_samples: float | None = None
    throughput: float | None = None
    tokens_per_sample: float | None = None
    phases: dict[str, float] = field(default_factory=dict)
    communication_s: float | None = None
    exposed_communication_s: float | None = None
    no_sync_exposed_s: float | None = None
    no_sync_exposed_low_s: float | None = None
    slowed_compute_s: float | None = None
    slowed_compute_low_s: float | None = None
    overlap: float | None = None
    synchronisations_per_s: float | None = None
    flops_per_s: float | None = None
    mfu: float | None = None
    mfu_without_scores: float | None = None
    mfu_of_measured_peak: float | None = None
    memory_bytes: dict[str, float] = field(default_factory=dict)
    sent_bytes_per_s: float | None = None
    received_bytes_per_s: float | None = None
    ring_bytes: float | None = None
    first_loss: float | None = None
    last_loss: float | None = None
    last_loss_step: int | None = None
    validation_loss: float | None = None
    averaged_validation_loss: float | None = None
    accuracy: float | None = None
    averaged_accuracy: float | None = None
    ranks: tuple[RankSummary, ...] = ()
    are_steps_judged: bool = False
    outlier_steps: tuple[int, ...] = ()
    warnings: tuple[Doubt, ...] = ()

    @property
    def tokens_per_s(self) -> float | None:
        if self.throughput is None or self.tokens_per_sample is None:
            return None
        return self.throughput * self.tokens_per_sample

    @property
    def throughput_per_device(self) -> float | None:
        return None if self.throughput is None else self.throughput / self.n_devices

    @property
    def n_devices(self) -> int:
        """Devices that compute."""
        return len(self.used_ranks) or self.n_ranks


def rate_over_repeats(repeats: Iterable[TrainingSummary], name: str) -> float | None:
    """A rate over repeats, by its name: the median work of a unit / the median of the units."""
    known = [
        (rate, one.duration.median)
        for one in repeats
        if one.duration is not None and (rate := getattr(one, name)) is not None
    ]
    if not known:
        return None
    work = np.median([rate * duration_s for rate, duration_s in known])
    return float(work / np.median([duration_s for _, duration_s in known]))


def _configured_batch(run: Run) -> float | None:
    return configured_number(run, "global_batch") or configured_number(run, "batch")


def _largest(values: Iterable[dict[str, float]]) -> dict[str, float]:
    peaks: dict[str, float] = {}
    for by_kind in values:
        for kind, value in by_kind.items():
            peaks[kind] = max(peaks.get(kind, 0.0), value)
    return dict(sorted(peaks.items()))


def training_summary(run: Run, peaks: dict[PeakKey, float] | None = None) -> TrainingSummary:
    """Summarise one training run. A run that is not ok has numbers but neither warnings nor
    stragglers, because its steps are few and its ranks waited for the failure. One that changed its
    strategy has neither stragglers nor outliers, because its ranks and steps differ by design.

    Args:
        peaks: `matmul_peaks` of the runs in the same results; None leaves out the MFU of measured
            peak.
    """
    times, is_epochs = full_times(run), not step_times(run)
    still = change_times(run)
    duration = _duration(list(times.values()), list(still.values())) if times else None
    steps = {rank: phase_table(records).of(times) for rank, records in sorted(run.ranks.items())}
    is_judged = run.header.status == "ok"
    ranks = tuple(rank_summary(run, rank, steps[rank]) for rank in steps)
    ranks = mark_stragglers(ranks) if is_judged and not still else ranks
    working = {r: table for r, table in steps.items() if computes(spans_of(run.ranks[r]))} or steps
    n_samples = max(samples_by_unit(run).values(), default=None) or _configured_batch(run)
    n_ranks = len(run.header.ranks) or len(run.ranks) or 1
    numbers_of_ranks = [info.rank for info in run.header.ranks] or list(range(n_ranks))
    used = tuple(rank for rank in numbers_of_ranks if rank in working or rank not in steps)
    numbers: dict[str, Any] = dict(_learned(run))
    if duration is not None:
        numbers |= _rates(run, duration, n_samples, ranks)
        numbers |= _utilization(run, duration, used, numbers.get("throughput"))
        numbers |= _communication(run, duration, working)
    summary = TrainingSummary(
        run_id=run.header.run_id,
        status=run.header.status,
        reason=run.header.reason,
        strategy=strategy_name(run),
        model=configured(run, "model", "?"),
        dtype=configured(run, "dtype", "fp32"),
        n_ranks=n_ranks,
        backend=run.header.backend,
        plan=_plan_words(run),
        used_ranks=used,
        unit="epoch" if is_epochs and times else "step",
        duration=duration,
        n_samples=n_samples,
        phases=_mean_over_ranks([rank for rank in ranks if rank.rank in working]),
        memory_bytes=_largest(rank.memory_bytes for rank in ranks),
        ranks=ranks,
        are_steps_judged=is_judged and not still,
        outlier_steps=outliers(times) if is_judged and not still else (),
        ring_bytes=_ring_bytes(run, n_ranks),
        **numbers,
    )
    summary = _with_warnings(summary) if is_judged else summary
    return add_mfu_of_measured_peak(summary, run.header.ranks, peaks or {})


def _plan_words(run: Run) -> str:
    is_searched = configured(run, "strategy") == "searched"
    return str(run.header.summary.get("strategy", ""))[:_LONGEST_PLAN] if is_searched else ""


def _duration(times_s: Sequence[float], still_s: Sequence[float]) -> Summary:
    """Of all steps; of a run that changed its strategy their mean, whose spread is no noise."""
    if not still_s:
        return summarize(times_s)
    return summarize([(sum(times_s) + sum(still_s)) / len(times_s)])


def add_mfu_of_measured_peak(
    summary: TrainingSummary, ranks: Iterable[RankInfo], peaks: dict[PeakKey, float]
) -> TrainingSummary:
    """Add the MFU of measured peak, if the peaks of all ranks that compute are known."""
    used = [info for info in ranks if info.rank in summary.used_ranks]
    measured = sum_of_peaks(used, summary.dtype, peaks)
    if not measured or summary.flops_per_s is None:
        return summary
    mfu = summary.flops_per_s / measured
    text = (
        f"MFU of measured peak is {mfu:.0%}: the measured matmul peak is too low, measure it again"
    )
    doubts = (Doubt(DoubtKind.PEAK, text),) if mfu > 1 and summary.status == "ok" else ()
    return dataclasses.replace(
        summary, mfu_of_measured_peak=mfu, warnings=(*summary.warnings, *doubts)
    )


def with_outliers_of_repeats(
    summaries: Sequence[TrainingSummary], times: Sequence[Mapping[int, float]]
) -> tuple[TrainingSummary, ...]:
    """The summaries of repeats with outliers among the steps of all, not of each alone.

    Args:
        times: seconds of each repeat's steps.
    """
    every = {
        (k, step): time_s
        for k, (summary, own) in enumerate(zip(summaries, times, strict=True))
        for step, time_s in own.items()
        if summary.are_steps_judged
    }
    far, found = outliers(every), []
    for k, summary in enumerate(summaries):
        steps = tuple(step for repeat, step in far if repeat == k)
        others = [doubt for doubt in summary.warnings if doubt.kind != DoubtKind.OUTLIERS]
        doubts = (*others, *outlier_doubts(steps, summary.unit))
        found.append(dataclasses.replace(summary, outlier_steps=steps, warnings=doubts))
    return tuple(found)


def _mean_over_ranks(ranks: Sequence[RankSummary]) -> dict[str, float]:
    known = [rank.phases for rank in ranks if rank.phases]
    return {name: float(np.mean([p[name] for p in known])) for name in PHASES} if known else {}


def _rates(
    run: Run, duration: Summary, n_samples: float | None, ranks: Sequence[RankSummary]
) -> dict[str, Any]:
    rates: dict[str, Any] = {}
    if n_samples:
        rates["throughput"] = n_samples / duration.median
    for name in ("sent", "received"):
        moved = [getattr(rank, f"{name}_bytes") for rank in ranks]
        known = [value for value in moved if value is not None]
        if known:
            rates[f"{name}_bytes_per_s"] = max(known) / duration.median
    tokens = (median_of(records, "tokens_per_sample") for records in run.ranks.values())
    rates["tokens_per_sample"] = next((n for n in tokens if n), None)
    return rates


def _utilization(
    run: Run, duration: Summary, used: Sequence[int], samples_per_s: float | None
) -> dict[str, Any]:
    """FLOP/s, and its share of the published peaks of the devices that compute."""
    batch = _configured_batch(run)  # of which the FLOPs are; that of a step may be smaller
    step_s = batch / samples_per_s if batch and samples_per_s else duration.median
    flops = [median_of(run.ranks.get(rank, []), "model_flops") for rank in used]
    counted = [value for value in flops if value is not None]
    if not counted or len(counted) < len(used):
        return {}
    flops_per_s = sum(counted) / step_s
    scores = (median_of(run.ranks.get(rank, []), "score_flops") or 0.0 for rank in used)
    of_scores = sum(scores) / step_s
    dtype = configured(run, "dtype", "fp32")
    published = [i.peak_flops_per_s.get(dtype) for i in run.header.ranks if i.rank in used]
    known = [peak for peak in published if peak]
    peak = sum(known) if len(known) == len(used) else None
    return {
        "flops_per_s": flops_per_s,
        "mfu": flops_per_s / peak if peak else None,
        "mfu_without_scores": (flops_per_s - of_scores) / peak if peak and of_scores else None,
    }


def _communication(
    run: Run, duration: Summary, working: Mapping[int, PhaseTable]
) -> dict[str, Any]:
    numbers: dict[str, Any] = {}
    tables = [table for table in working.values() if len(table.steps)]
    communication = _mean(table.communication_s for table in tables)
    if communication > 0:
        numbers["communication_s"] = communication
        numbers["overlap"] = _mean(table.overlapped_s for table in tables) / communication
        numbers["exposed_communication_s"] = _mean(
            table.phases["exposed_communication"] for table in tables
        )
    if slowest := [*largest_by_step(run, "no_sync_step_s").values()]:
        without = summarize(slowest)
        numbers["no_sync_exposed_s"] = duration.median - without.median
        if min(duration.n, without.n) > 1:  # a single step has no interval
            numbers["no_sync_exposed_low_s"] = duration.low - without.high
    by_step = values_by_step(run, "no_sync_compute_s")
    without_s = [
        s for by_rank in by_step.values() for rank, s in by_rank.items() if rank in working
    ]
    if without_s and tables:
        beside = summarize(np.concatenate([table.compute_s for table in tables]).tolist())
        alone = summarize(without_s)
        numbers["slowed_compute_s"] = beside.median - alone.median
        if min(duration.n, len(by_step)) > 1:
            numbers["slowed_compute_low_s"] = beside.low - alone.high
    if started := [*largest_by_step(run, "n_synchronisations").values()]:
        numbers["synchronisations_per_s"] = float(np.median(started)) / duration.median
    return numbers


def _mean(columns: Iterable[np.ndarray]) -> float:
    """Mean over steps and ranks; 0 without any."""
    found = list(columns)
    return float(np.concatenate(found).mean()) if found else 0.0


def _ring_bytes(run: Run, n_ranks: int) -> float | None:
    gradients = [median_of(records, "gradient_bytes") for records in run.ranks.values()]
    known = [value for value in gradients if value is not None]
    return 2 * (n_ranks - 1) / n_ranks * max(known) if known else None


HELD_OUT = ("validation_loss", "averaged_validation_loss", "accuracy", "averaged_accuracy")


def _learned(run: Run) -> dict[str, float]:
    """First and last loss, and the last ones on held-out samples."""
    found: dict[str, float] = {}
    if losses := by_first_rank(run, "loss"):
        last = max(losses)
        found = {"first_loss": losses[min(losses)], "last_loss": losses[last]}
        found |= {"last_loss_step": last} if last < max(step_times(run), default=last) else {}
    for metric in HELD_OUT:
        if values := [*by_first_rank(run, metric).values()]:
            found[metric] = values[-1]
    return found


def _with_warnings(summary: TrainingSummary) -> TrainingSummary:
    doubts = []
    if summary.duration and summary.are_steps_judged:
        doubts += [Doubt(DoubtKind.SPREAD, text) for text in distrust(summary.duration)]
    doubts += outlier_doubts(summary.outlier_steps, summary.unit)
    for rank in filter(lambda rank: rank.is_straggler, summary.ranks):
        text = f"rank {rank.rank} ({rank.info.hostname}) is a straggler"
        doubts.append(Doubt(DoubtKind.STRAGGLER, text))
    if summary.mfu is not None and summary.mfu > 1:
        text = "MFU above 1: FLOPs, times or the device's peak are wrong"
        doubts.append(Doubt(DoubtKind.MFU, text))
    return dataclasses.replace(summary, warnings=tuple(doubts))
