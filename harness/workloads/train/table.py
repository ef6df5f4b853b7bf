"""The tables that rank 0 prints after training: throughput, phases, communication, devices,
warnings; then one row per strategy, measured and predicted. Repeats share a row of medians.
"""

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from harness.measure.derive.changes import as_planned
from harness.measure.derive.devices import matmul_peaks
from harness.measure.derive.pipeline import pipeline_summary
from harness.measure.derive.strategies import StrategyRow, strategy_tables
from harness.measure.derive.training import (
    TrainingSummary,
    change_times,
    rate_over_repeats,
    training_summary,
)
from harness.measure.statistics import known_mean, known_median, summarize
from harness.measure.store import Run, headers_in, read_run
from harness.measure.text import cell, columns, interval_words
from harness.units import (
    format_bandwidth,
    format_bytes,
    format_duration,
    format_flops,
    format_number,
)
from harness.workloads.train.config import is_file

_HEADS = ["strategies", "by", "repeats", "samples/s", "step", "99% interval", "exposed comm",
          "bubble", "memory", "predicted", "error", "speed-up"]  # fmt: skip
# Memory shown: that of the GPU's allocator, else the process's resident set.
_MEMORY_KINDS = ("allocated", "rss")

Repeat = tuple[Run, TrainingSummary]


def compared_text(runs: Sequence[Run], summaries: Sequence[TrainingSummary]) -> str:
    """Return the table, then each strategy's verdict against the baseline."""
    repeats = {s.run_id: (run, s) for run, s in zip(runs, summaries, strict=True)}
    rows = list(chain.from_iterable(strategy_tables(repeats.values())))
    compared = [(row, [repeats[run_id] for run_id in row.run_ids]) for row in rows]
    heads, cells = _HEADS, [_cells(row, found) for row, found in compared]
    if len({row[0] for row in cells}) == 1:
        heads = [f"strategies of {cells[0][0]}", *_HEADS[2:]]
        cells = [row[1:] for row in cells]
    lines = [columns(heads, cells)]
    lines += [f"{row.strategy} against {row.against}: {row.verdict}" for row in rows if row.verdict]
    lines += [_stale_text(row, found) for row, found in compared if _is_asynchronous(found)]
    lines += [
        f"{row.strategy} does not train like one device: it freezes layers"
        for row, found in compared
        if any(run.header.config.get("freeze", "none") != "none" for run, _ in found)
    ]
    return "\n".join(lines)


def _cells(row: StrategyRow, repeats: Sequence[Repeat]) -> list[str]:
    step_s = row.median_s
    predicted_s = known_median(
        run.header.number("predicted_step_s") for run, _ in repeats if not change_times(run)
    )
    return [
        row.workload,
        row.strategy,
        str(len(repeats))
        if len(repeats) == row.n_started
        else f"{len(repeats)} of {row.n_started}",
        cell(row.throughput, format_number),
        cell(step_s, format_duration),
        interval_words(row.interval) if row.interval else "-",
        cell(known_mean(s.exposed_communication_s for _, s in repeats), format_duration),
        cell(known_median(_bubble(run) for run, _ in repeats), ".0%"),
        cell(_peak(_memory(summary) for _, summary in repeats), format_bytes),
        cell(predicted_s, format_duration),
        "-" if not predicted_s or not step_s else f"{predicted_s / step_s - 1:+.0%}",
        cell(row.speedup, ".2f"),
    ]


def _bubble(run: Run) -> float | None:
    found = pipeline_summary(as_planned(run))
    return None if found is None else found.bubble.median


def _memory(summary: TrainingSummary) -> float | None:
    return next((summary.memory_bytes[k] for k in _MEMORY_KINDS if k in summary.memory_bytes), None)


def _peak(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _is_asynchronous(repeats: Sequence[Repeat]) -> bool:
    configs = [run.header.config for run, _ in repeats]
    trained = [str(c.get("strategy", "")) for c in configs if c.get("asynchronous")]
    return any(strategy == "pipeline" or is_file(strategy) for strategy in trained)


def _stale_text(row: StrategyRow, repeats: Sequence[Repeat]) -> str:
    n_stages = repeats[0][0].header.summary.get("n_stages", "S")
    return (
        f"{row.strategy} does not train like one device: every microbatch is a minibatch, and "
        f"stage s of {n_stages} (from 0) computes gradients with weights that are {n_stages} - 1 - "
        "s updates old"
    )


_PHASES = {
    "data": "data",
    "host_to_device": "h2d",
    "forward": "forward",
    "backward": "backward",
    "exposed_communication": "exposed comm",
    "optimizer": "optimizer",
    "other": "other",
}


def train_text(runs: list[Run]) -> str:
    """Return four tables over all runs, their failures and warnings, and the strategies' table."""
    peaks = matmul_peaks(
        read_run(path, header)[0]
        for directory in {run.path.parent for run in runs}
        for path, header in headers_in(directory, "*-matmul-*")
    )
    summaries = [training_summary(run, peaks) for run in runs]
    rows = _rows_of_repeats(runs, summaries)
    done = [(name, summary) for name, summary in rows if summary.duration is not None]
    named = [
        (f"{_name(run, summary)} #{run.header.repeat}", summary)
        for run, summary in zip(runs, summaries, strict=True)
    ]
    parts = [
        _throughput(rows),
        _phases(done),
        _communication(done),
        _device(done),
        _warnings(named),
        compared_text(runs, summaries),
    ]
    return "\n\n".join(part for part in parts if part)


def _rows_of_repeats(
    runs: Sequence[Run], summaries: Sequence[TrainingSummary]
) -> list[tuple[str, TrainingSummary]]:
    """Return a name and a summary for each run, or for each set of repeats that ended ok."""
    repeats: dict[tuple[str, str], list[Repeat]] = {}
    for run, summary in zip(runs, summaries, strict=True):
        repeats.setdefault((run.header.key, summary.status), []).append((run, summary))
    rows = []
    for (_, status), found in repeats.items():
        if status == "ok" and len(found) > 1:
            first, of_repeats = found[0][0], [summary for _, summary in found]
            name = f"{_name(first, of_repeats[0])}, {len(found)} repeats"
            rows.append((name, _over_repeats(of_repeats)))
        else:
            rows += [(f"{_name(run, s)} #{run.header.repeat}", s) for run, s in found]
    return rows


_PARTS = ("phases", "communication_s", "exposed_communication_s", "no_sync_exposed_s",
          "slowed_compute_s", "overlap")  # fmt: skip
_RATES = ("throughput", "synchronisations_per_s", "flops_per_s", "mfu", "mfu_without_scores",
          "mfu_of_measured_peak", "sent_bytes_per_s", "received_bytes_per_s")  # fmt: skip


def _over_repeats(repeats: Sequence[TrainingSummary]) -> TrainingSummary:
    """Return the first summary with each number replaced by its median over the repeats, of parts
    of a step their mean, of memory the peak; rates are those of the median step."""
    steps = [s.duration.median for s in repeats if s.duration is not None]
    found: dict[str, Any] = {"duration": summarize(steps) if steps else None}
    for name in (field.name for field in fields(TrainingSummary)):
        values = [getattr(summary, name) for summary in repeats]
        centre = known_mean if name in _PARTS else known_median
        centre = _peak if name == "memory_bytes" else centre
        if isinstance(values[0], dict):
            found[name] = {k: centre(v.get(k) for v in values) for k in values[0]}
        elif any(isinstance(value, float) for value in values):
            found[name] = centre(values)
    found |= {name: rate_over_repeats(repeats, name) for name in _RATES}
    return replace(repeats[0], **found)


def _name(run: Run, summary: TrainingSummary) -> str:
    config = run.header.config
    words = (
        config.get("model"),
        summary.strategy,
        config.get("dtype"),
        f"batch {config.get('batch')}",
        f"on {len(run.header.ranks)}",
    )
    return " ".join(str(word) for word in words)


def _throughput(rows: Sequence[tuple[str, TrainingSummary]]) -> str:
    heads = ["run", "status", "step", "99% interval", "samples/s", "per device", "loss",
             "accuracy", "averaged"]  # fmt: skip
    cells = [[name, summary.status, *_rate(summary)] for name, summary in rows]
    if any(summary.tokens_per_s for _, summary in rows):
        heads.insert(5, "tokens/s")
        for row, (_, summary) in zip(cells, rows, strict=True):
            row.insert(5, cell(summary.tokens_per_s, format_number))
    return columns(heads, cells)


def _rate(summary: TrainingSummary) -> list[str]:
    step = summary.duration
    if step is None:
        return ["-"] * 7
    return [
        format_duration(step.median),
        interval_words(step),
        cell(summary.throughput, format_number),
        cell(summary.throughput_per_device, format_number),
        "-"
        if summary.first_loss is None
        else f"{summary.first_loss:.4g} to {cell(summary.last_loss, '.4g')}",
        cell(summary.accuracy, ".1%"),
        cell(summary.averaged_accuracy, ".1%"),
    ]


def _phases(rows: Sequence[tuple[str, TrainingSummary]]) -> str:
    cells = [
        [name, *(format_duration(summary.phases.get(phase, 0.0)) for phase in _PHASES)]
        for name, summary in rows
        if summary.phases
    ]
    return columns(["mean step", *_PHASES.values()], cells)


def _communication(rows: Sequence[tuple[str, TrainingSummary]]) -> str:
    heads = ["run", "communication", "overlapped", "exposed", "step - no_sync",
             "compute slowed", "sync/s", "sent", "received", "ring needs"]  # fmt: skip
    cells = [
        [
            name,
            cell(summary.communication_s, format_duration),
            cell(summary.overlap, ".0%"),
            cell(summary.exposed_communication_s, format_duration),
            cell(summary.no_sync_exposed_s, format_duration),
            cell(summary.slowed_compute_s, format_duration),
            cell(summary.synchronisations_per_s, format_number),
            cell(summary.sent_bytes_per_s, format_bandwidth),
            cell(summary.received_bytes_per_s, format_bandwidth),
            "-" if summary.ring_bytes is None else f"{format_bytes(summary.ring_bytes)}/step",
        ]
        for name, summary in rows
        if summary.communication_s
    ]
    return columns(heads, cells)


def _device(rows: Sequence[tuple[str, TrainingSummary]]) -> str:
    cells = [
        [
            name,
            cell(summary.flops_per_s, format_flops),
            cell(summary.mfu, ".0%"),
            cell(summary.mfu_without_scores, ".0%"),
            cell(summary.mfu_of_measured_peak, ".0%"),
            ", ".join(f"{kind} {format_bytes(n)}" for kind, n in summary.memory_bytes.items()),
        ]
        for name, summary in rows
    ]
    return columns(
        ["run", "rate", "MFU", "without scores", "MFU of measured peak", "memory peak"], cells
    )


def _warnings(rows: Sequence[tuple[str, TrainingSummary]]) -> str:
    """Return a line for each failure, and one for the warnings of each set of runs."""
    lines = [
        f"{name}: {summary.status}: {summary.reason.strip().splitlines()[0]}"
        for name, summary in rows
        if summary.reason.strip()
    ]
    runs_of: dict[str, list[str]] = {}
    for name, summary in rows:
        for warning in summary.warnings:
            runs_of.setdefault(warning.text, []).append(name)
    texts_of: dict[tuple[str, ...], list[str]] = {}
    for text, names in runs_of.items():
        texts_of.setdefault(tuple(names), []).append(text)
    for (first, *others), texts in texts_of.items():
        more = f" and {len(others)} more" if others else ""
        lines.append(f"warning: {first}{more}: {'; '.join(texts)}")
    return "\n".join(lines)
