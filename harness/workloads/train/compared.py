"""The last table of training: one row per strategy over its repeats, measured and predicted."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from harness.measure.derive import (
    StrategyRow,
    TrainingSummary,
    pipeline_summary,
    strategy_table,
)
from harness.measure.store import Run
from harness.measure.text import columns, duration_cell, interval_words, percent_cell
from harness.units import format_bytes
from harness.workloads.train.config import is_file

_HEADS = ["strategies", "by", "repeats", "samples/s", "step", "99% interval", "exposed comm",
          "bubble", "memory", "predicted", "error", "speed-up"]  # fmt: skip
# Memory shown: that of the GPU's allocator, else the process's resident set.
_MEMORY_KINDS = ("allocated", "rss")

Repeat = tuple[Run, TrainingSummary]


def compared_text(runs: Sequence[Run], summaries: Sequence[TrainingSummary]) -> str:
    """Return the table, then each strategy's verdict against the baseline."""
    repeats = {s.run_id: (run, s) for run, s in zip(runs, summaries, strict=True)}
    rows = strategy_table(list(repeats.values()), at_least=1)
    compared = [(row, [repeats[run_id] for run_id in row.run_ids]) for row in rows]
    lines = [columns(_HEADS, [_cells(row, found) for row, found in compared])]
    lines += [f"{row.strategy} against {row.against}: {row.verdict}" for row in rows if row.verdict]
    lines += [_stale_text(row, found) for row, found in compared if _is_asynchronous(found)]
    return "\n".join(lines)


def _cells(row: StrategyRow, repeats: Sequence[Repeat]) -> list[str]:
    step_s = row.median_s
    predicted_s = _median_of(repeats, lambda run, _: run.header.number("predicted_step_s"))
    return [
        row.workload,
        row.strategy,
        str(len(repeats))
        if len(repeats) == row.n_started
        else f"{len(repeats)} of {row.n_started}",
        "-" if row.throughput is None else f"{row.throughput:.4g}",
        duration_cell(step_s),
        interval_words(row.interval) if row.interval else "-",
        duration_cell(_median_of(repeats, lambda _, summary: summary.exposed_communication_s)),
        percent_cell(_median_of(repeats, lambda run, _: _bubble(run))),
        _bytes(_median_of(repeats, lambda _, summary: _memory(summary))),
        duration_cell(predicted_s),
        "-" if not predicted_s or not step_s else f"{predicted_s / step_s - 1:+.0%}",
        "-" if row.speedup is None else f"{row.speedup:.2f}",
    ]


def _median_of(
    repeats: Sequence[Repeat], value: Callable[[Run, TrainingSummary], Any]
) -> float | None:
    """Median over the repeats that have a value."""
    found = [value(run, summary) for run, summary in repeats]
    known = [float(one) for one in found if one is not None]
    return median(known) if known else None


def _bubble(run: Run) -> float | None:
    found = pipeline_summary(run)
    return None if found is None else found.bubble.median


def _memory(summary: TrainingSummary) -> float | None:
    return next((summary.memory_bytes[k] for k in _MEMORY_KINDS if k in summary.memory_bytes), None)


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


def _bytes(n_bytes: float | None) -> str:
    return "-" if n_bytes is None else format_bytes(n_bytes)
