"""Seconds of one microbatch in every stage of a pipeline, measured and predicted."""

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import pandas as pd

from harness.measure.derive.pipeline import PipelineSummary
from harness.plot.catalog import TrainingCase
from harness.plot.figures import Axes, Canvas, Figure, Rows, of_training
from harness.plot.numbers import PASSES
from harness.plot.style import (
    KIND_COLOURS,
    draw_bar_panels,
    joint_legend,
    label_bars,
    mark_bar,
    note_failures,
    rank_words,
    shorten,
    stack_bars,
    time_unit,
    write_beside,
)
from harness.units import format_number

MAX_CASES = 24


def _stage_row(
    stage: int, known: Sequence[PipelineSummary], totals: Sequence[dict[int, float]]
) -> dict[str, Any]:
    times = [summary.stages[stage] for summary in known]
    row: dict[str, Any] = {"stage": times[0].stage, "ranks": rank_words(times[0].ranks)}
    row |= {f"{name}_s": fmean(getattr(t, f"{name}_s") for t in times) for name in PASSES}
    row["total_s"] = sum(row[f"{name}_s"] for name in PASSES)
    predicted = [total[times[0].stage] for total in totals if times[0].stage in total]
    row["predicted_total_s"] = fmean(predicted) if predicted else None
    return row


def _rows(case: TrainingCase) -> Rows:
    """A row per stage: means over repeats of the medians of each."""
    found = [run for run in case.case.runs if run.pipeline is not None and case.case.is_ok]
    known = [run.pipeline for run in found if run.pipeline is not None]
    if not known:
        return [case.named] if case.case.is_failed_pipeline else []
    totals = [run.predicted_stage_s for run in found]
    n_stages = min(summary.n_stages for summary in known)
    rows = [case.named | _stage_row(stage, known, totals) for stage in range(n_stages)]
    slowest = max(row["total_s"] for row in rows)
    return [row | {"is_slowest": math.isclose(row["total_s"], slowest)} for row in rows]


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """Stacked horizontal bars, a panel for each pipeline and a bar for each stage."""
    groups = table[table["stage"].notna()].groupby("label", sort=False)
    panels = draw_bar_panels(canvas, groups, _draw_case, row_in=0.34)
    joint_legend(canvas, panels, n_columns=4)
    note_failures(canvas, table)


def _draw_case(axes: Axes, label: str, rows: pd.DataFrame) -> None:
    longest = float(rows[["total_s", "predicted_total_s"]].max().max())
    scale, unit = time_unit(longest)
    parts = ((n, KIND_COLOURS[n], (rows[f"{n}_s"] * scale).to_numpy()) for n in PASSES)
    shown = (part for part in parts if part[2].any())
    stack_bars(axes, shown, height=0.7, edgecolor="white", linewidth=0.5)
    for y, (_, row) in enumerate(rows.iterrows()):
        predicted = row["predicted_total_s"]
        if not pd.isna(predicted):
            mark_bar(axes, predicted * scale, y, "predicted")
        words = f"{format_number(row['total_s'] * scale, 3)} {unit}"
        words += "" if pd.isna(predicted) else f", predicted {format_number(predicted * scale, 3)}"
        words += ", slowest" if row["is_slowest"] else ""
        furthest = row["total_s"] if pd.isna(predicted) else max(row["total_s"], predicted)
        write_beside(axes, words, furthest * scale, y, gap=6)
    label_bars(axes, [_stage_words(row) for _, row in rows.iterrows()])
    axes.set_xlim(0, longest * scale * 1.42)
    axes.set_xlabel(f"{unit} of one microbatch")
    axes.set_title(shorten(label, 100), fontsize=8.5)


def _stage_words(row: Any) -> str:
    ranks = str(row["ranks"])
    return f"stage {row['stage']:.0f}, rank{'' if ranks.isdigit() else 's'} {ranks}"


FIGURE = Figure(
    caption=(
        "Time of one microbatch in each stage: forward, recomputation and backward, without "
        "waits, on the slowest rank of the stage. The slowest stage limits the pipeline; equal "
        "bars are a balanced pipeline. The black mark is the simulated step."
    ),
    better="equal bars are better; shorter is better",
    needs="a run of two or more stages: ./entry.sh train --strategy pipeline",
    rows=of_training(_rows),
    measured=("stage",),
    draw=draw,
    most=MAX_CASES,
)
