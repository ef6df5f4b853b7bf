"""The tables that rank 0 prints after training: throughput, phases, communication, devices,
warnings; then one row per strategy, measured and predicted. Repeats share a row of medians.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from itertools import chain
from typing import Any

from harness.domain.record import Sample
from harness.domain.run import telling_flags
from harness.inputs import one_line
from harness.measure.derive.changes import as_planned
from harness.measure.derive.devices import matmul_peaks
from harness.measure.derive.noise import needed_words, noise_scale
from harness.measure.derive.pipeline import pipeline_summary
from harness.measure.derive.settings import configured_number, told_apart, unlike_one_device
from harness.measure.derive.spans import samples_of
from harness.measure.derive.steps import change_times, epoch_times, step_times
from harness.measure.derive.strategies import StrategyRow, strategy_tables
from harness.measure.derive.training import (
    TrainingSummary,
    rate_over_repeats,
    training_summary,
    with_outliers_of_repeats,
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

# Memory shown: that of the GPU's allocator, else the process's resident set.
_MEMORY_KINDS = ("allocated", "rss")
_MOST_KERNELS = 10

Repeat = tuple[Run, TrainingSummary]


def compared_text(runs: Sequence[Run], summaries: Sequence[TrainingSummary]) -> str:
    """Return the table, then each strategy's verdict against the baseline."""
    repeats = {s.run_id: (run, s) for run, s in zip(runs, summaries, strict=True)}
    rows = list(chain.from_iterable(strategy_tables(repeats.values())))
    compared = [(row, [repeats[run_id] for run_id in row.run_ids]) for row in rows]
    heads, of_one = [*_COLUMNS], [*_COLUMNS.values()]
    is_one = len({row.workload for row in rows}) == 1
    if is_one:
        heads, of_one = [f"strategies of {rows[0].workload}", *heads[2:]], of_one[1:]
    lines = [columns(heads, [[of(*pair) for of in of_one] for pair in compared])]
    named = [(row, row.strategy if is_one else f"{row.workload}: {row.strategy}") for row in rows]
    lines += [f"{name} against {row.against}: {row.verdict}" for row, name in named if row.verdict]
    lines += [f"{name} is: {row.plan}" for row, name in named if row.plan]
    whys = [unlike_one_device(found[0][0]) if found else "" for _, found in compared]
    lines += [
        f"{name} does not train like one device: {why}"
        for (_, name), why in zip(named, whys, strict=True)
        if why
    ]
    return "\n".join(lines)


def _bubble(run: Run) -> float | None:
    found = pipeline_summary(as_planned(run))
    return None if found is None else found.bubble.median


def _memory(summary: TrainingSummary) -> float | None:
    return next((summary.memory_bytes[k] for k in _MEMORY_KINDS if k in summary.memory_bytes), None)


def _peak(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _predicted_s(row: StrategyRow, repeats: Sequence[Repeat]) -> float | None:
    return known_median(
        run.header.number("predicted_step_s") for run, _ in repeats if not change_times(run)
    )


def _error(row: StrategyRow, repeats: Sequence[Repeat]) -> float | None:
    predicted_s, step_s = _predicted_s(row, repeats), row.median_s
    return predicted_s / step_s - 1 if predicted_s and step_s else None


def _count(row: StrategyRow, repeats: Sequence[Repeat]) -> str:
    n = len(repeats)
    return str(n) if n == row.n_started else f"{n} of {row.n_started}"


# The columns of the strategies' table: the cell of a row and its repeats that ended ok. Columns
# without any value are left out.
_COLUMNS: dict[str, Callable[[StrategyRow, Sequence[Repeat]], str]] = {
    "strategies": lambda row, _: row.workload,
    "by": lambda row, _: row.strategy,
    "repeats": _count,
    "samples/s": lambda row, _: cell(row.throughput, format_number),
    "step": lambda row, _: cell(row.median_s, format_duration),
    "99% interval": lambda row, _: interval_words(row.interval) if row.interval else "-",
    "exposed comm, waits": lambda _, found: cell(
        known_mean(s.exposed_communication_s for _, s in found), format_duration
    ),
    "bubble": lambda _, found: cell(known_median(_bubble(run) for run, _ in found), ".0%"),
    "memory": lambda _, found: cell(_peak(_memory(s) for _, s in found), format_bytes),
    "predicted": lambda *pair: cell(_predicted_s(*pair), format_duration),
    "error": lambda *pair: cell(_error(*pair), "+.0%"),
    "speed-up": lambda row, _: row.ratio or "-",
}


def train_text(runs: list[Run]) -> str:
    """Return four tables over all runs, their failures and warnings, and the strategies' table."""
    peaks = matmul_peaks(
        read_run(path, header)[0]
        for directory in {run.path.parent for run in runs}
        for path, header in headers_in(directory, "*-matmul-*")
    )
    summaries = _over_all_steps(runs, [training_summary(run, peaks) for run in runs])
    names = told_apart(
        [_name(run, summary) for run, summary in zip(runs, summaries, strict=True)],
        [telling_flags(run.header.workload, run.header.config) for run in runs],
    )
    rows = _rows_of_repeats(runs, summaries, names)
    done = [(name, summary) for name, summary in rows if summary.duration is not None]
    named = [
        (f"{name} #{run.header.repeat}", summary)
        for run, summary, name in zip(runs, summaries, names, strict=True)
    ]
    parts = [
        _throughput(rows),
        _table("mean step", _PHASES, [(name, s) for name, s in done if s.phases]),
        _table("run", _COMMUNICATION, [(name, s) for name, s in done if s.communication_s]),
        _table("run", _DEVICE, done),
        _warnings(named),
        _noise([(name, run) for run, (name, _) in zip(runs, named, strict=True)]),
        *(_kernels(name, run) for run, (name, _) in zip(runs, named, strict=True)),
        compared_text(runs, summaries),
    ]
    return "\n\n".join(part for part in parts if part)


def _noise(named: Iterable[tuple[str, Run]]) -> str:
    """The gradient noise scale of each run with --noise-steps, and what its batch costs by it."""
    rows = []
    for name, run in named:
        found, batch = noise_scale(run.ranks.get(0, ())), configured_number(run, "batch")
        if found is not None and batch is not None:
            rows.append([name, str(found), f"{batch:g}", needed_words(batch, found)])
    heads = ["run", "gradient noise scale, samples", "batch", "samples needed"]
    return columns(heads, rows)


def _kernels(name: str, run: Run) -> str:
    """The longest kernels of the first rank in the steps of --profiler-steps; empty without."""
    rank = min(run.ranks, default=0)
    found = samples_of(run.ranks.get(rank, ()), "kernel_s")[:_MOST_KERNELS]
    rows = [
        [one_line(str(sample.labels["name"]), 80), format_duration(sample.value), _calls(sample)]
        for sample in found
    ]
    return columns([f"longest kernels of rank {rank}, {name}", "a step", "calls a step"], rows)


def _calls(sample: Sample) -> str:
    calls = sample.labels.get("calls")
    return f"{calls:g}" if isinstance(calls, float) else "-"


def _over_all_steps(
    runs: Sequence[Run], summaries: Sequence[TrainingSummary]
) -> list[TrainingSummary]:
    """Return the summaries with outliers among the steps of all repeats, as in the report."""
    found = list(summaries)
    for places in _places_of_repeats(runs).values():
        times = [step_times(runs[at]) or epoch_times(runs[at]) for at in places]
        of_repeats = with_outliers_of_repeats([summaries[at] for at in places], times)
        for at, summary in zip(places, of_repeats, strict=True):
            found[at] = summary
    return found


def _places_of_repeats(runs: Sequence[Run]) -> dict[tuple[str, str], list[int]]:
    """Return the positions of the runs that are repeats with one status."""
    places: dict[tuple[str, str], list[int]] = {}
    for at, run in enumerate(runs):
        places.setdefault((run.header.key, run.header.status), []).append(at)
    return places


def _rows_of_repeats(
    runs: Sequence[Run], summaries: Sequence[TrainingSummary], names: Sequence[str]
) -> list[tuple[str, TrainingSummary]]:
    """Return a name and a summary for each run, or for each set of repeats that ended ok."""
    rows = []
    for (_, status), places in _places_of_repeats(runs).items():
        if status == "ok" and len(places) > 1:
            name = f"{names[places[0]]}, {len(places)} repeats"
            rows.append((name, _over_repeats([summaries[at] for at in places])))
        else:
            rows += [(f"{names[at]} #{runs[at].header.repeat}", summaries[at]) for at in places]
    return rows


_PARTS = ("phases", "communication_s", "exposed_communication_s", "no_sync_exposed_s",
          "no_sync_exposed_low_s", "slowed_compute_s", "slowed_compute_low_s",
          "overlap")  # fmt: skip
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


def _loss(summary: TrainingSummary) -> str:
    first, last = summary.first_loss, cell(summary.last_loss, ".4g")
    at = "" if summary.last_loss_step is None else f" at step {summary.last_loss_step}"
    return "-" if first is None else f"{first:.4g} to {last}{at}"


_Columns = dict[str, Callable[[TrainingSummary], str]]


def _difference(seconds: float | None, low_s: float | None) -> str:
    """Seconds that communication adds, with a note unless they are above 0 beyond doubt."""
    is_clear = seconds is not None and low_s is not None and min(seconds, low_s) > 0
    note = "" if seconds is None or is_clear else " (within noise)"
    return cell(seconds, format_duration) + note


def _phase(name: str) -> Callable[[TrainingSummary], str]:
    return lambda s: format_duration(s.phases.get(name, 0.0))


_THROUGHPUT: _Columns = {
    "step": lambda s: format_duration(s.duration.median) if s.duration else "-",
    "99% interval": lambda s: interval_words(s.duration) if s.duration else "-",
    "samples/s": lambda s: cell(s.throughput, format_number),
    "tokens/s": lambda s: cell(s.tokens_per_s, format_number),
    "per device": lambda s: cell(s.throughput_per_device, format_number),
    "loss": _loss,
    "validation loss": lambda s: cell(s.validation_loss, ".4g"),
    "averaged loss": lambda s: cell(s.averaged_validation_loss, ".4g"),
    "accuracy": lambda s: cell(s.accuracy, ".1%"),
    "averaged": lambda s: cell(s.averaged_accuracy, ".1%"),
}
_PHASES: _Columns = {
    "data": _phase("data"),
    "h2d": _phase("host_to_device"),
    "forward": _phase("forward"),
    "backward": _phase("backward"),
    "exposed comm, waits": _phase("exposed_communication"),
    "optimizer": _phase("optimizer"),
    "other": _phase("other"),
}
_COMMUNICATION: _Columns = {
    "communication": lambda s: cell(s.communication_s, format_duration),
    "overlapped": lambda s: cell(s.overlap, ".0%"),
    "exposed, waits": lambda s: cell(s.exposed_communication_s, format_duration),
    "step - no_sync": lambda s: _difference(s.no_sync_exposed_s, s.no_sync_exposed_low_s),
    "compute slowed": lambda s: _difference(s.slowed_compute_s, s.slowed_compute_low_s),
    "sync/s": lambda s: cell(s.synchronisations_per_s, format_number),
    "sent": lambda s: cell(s.sent_bytes_per_s, format_bandwidth),
    "received": lambda s: cell(s.received_bytes_per_s, format_bandwidth),
    "ring needs": lambda s: cell(s.ring_bytes, lambda n: f"{format_bytes(n)}/step"),
}
_DEVICE: _Columns = {
    "rate": lambda s: cell(s.flops_per_s, format_flops),
    "MFU": lambda s: cell(s.mfu, ".0%"),
    "without scores": lambda s: cell(s.mfu_without_scores, ".0%"),
    "MFU of measured peak": lambda s: cell(s.mfu_of_measured_peak, ".0%"),
    "memory peak": lambda s: ", ".join(
        f"{kind} {format_bytes(n)}" for kind, n in s.memory_bytes.items()
    ),
}


def _throughput(rows: Sequence[tuple[str, TrainingSummary]]) -> str:
    cells = [
        [name, s.status, *(of(s) if s.duration else "-" for of in _THROUGHPUT.values())]
        for name, s in rows
    ]
    return columns(["run", "status", *_THROUGHPUT], cells)


def _table(head: str, of_columns: _Columns, rows: Sequence[tuple[str, TrainingSummary]]) -> str:
    cells = [[name, *(of(summary) for of in of_columns.values())] for name, summary in rows]
    return columns([head, *of_columns], cells)


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
