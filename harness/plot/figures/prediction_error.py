"""Prediction error by part of the step: the difference of every part of the step."""

import math
from typing import Any

import numpy as np
import pandas as pd

from harness.measure.derive.prediction import PARTS, mean_parts
from harness.plot.catalog import Catalog
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.predicted import PlannedCase, planned_cases
from harness.plot.style import (
    LIMIT,
    PHASE_COLOURS,
    SERIES,
    draw_bar_panels,
    joint_legend,
    label_bars,
    mark_failed,
    write_beside,
)

WORDS = {
    "contention": "contention",
    "exposed_communication": "exposed communication",
    "rest": "rest, not predicted",
}
COLOURS = {
    "compute": PHASE_COLOURS["backward"],
    "contention": SERIES[3],
    "exposed_communication": PHASE_COLOURS["exposed_communication"],
    "optimizer": PHASE_COLOURS["optimizer"],
    "rest": PHASE_COLOURS["data"],
}
SUM = "sum of parts, mean over ranks"


def _row(case: PlannedCase) -> dict[str, Any]:
    row = case.training.identity | {"n_repeats": len(case.repeats)}
    known = [
        repeat.compared
        for repeat in case.repeats
        if repeat.compared.measured_parts and repeat.compared.predicted_parts
    ]
    if not known:
        return row
    predicted = mean_parts(compared.predicted_parts for compared in known)
    measured = mean_parts(compared.measured_parts for compared in known)
    for part in PARTS:
        is_known = part in measured
        sides = (predicted[part], measured[part]) if is_known else (math.nan, math.nan)
        row[f"predicted_{part}_s"], row[f"measured_{part}_s"] = sides
        row[f"difference_{part}_s"] = sides[0] - sides[1]
    row["measured_s"] = sum(measured.values())
    row["difference_s"] = sum(predicted.values()) - row["measured_s"]
    return row


def rows(catalog: Catalog) -> Rows:
    """A row per case: means over repeats, middle steps and ranks; differences sum to the error."""
    return [_row(case) for case in planned_cases(catalog)]


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """Bars to the left of zero where less was predicted than measured; a diamond marks the sum."""
    groups = table.groupby("model", sort=True)
    panels = draw_bar_panels(canvas, groups, _draw_model, extra_in=1.15)
    joint_legend(canvas, panels, n_columns=len(PARTS) + 1)


def _draw_model(axes: Axes, model: str, rows: pd.DataFrame) -> None:
    shares = {part: rows[f"difference_{part}_s"] / rows["measured_s"] * 100 for part in PARTS}
    below, above = np.zeros(len(rows)), np.zeros(len(rows))
    for part in PARTS:
        widths = shares[part].fillna(0).to_numpy()
        lefts = np.where(widths > 0, above, below)
        axes.barh(
            range(len(rows)), widths, 0.68, left=lefts, color=COLOURS[part], edgecolor="white",
            linewidth=0.5, label=WORDS.get(part, part),
        )  # fmt: skip
        above += widths.clip(min=0)
        below += widths.clip(max=0)
    totals = rows["difference_s"] / rows["measured_s"] * 100
    axes.plot(totals, range(len(rows)), "D", color=LIMIT, markersize=5, label=SUM)
    axes.axvline(0, color=LIMIT, linewidth=0.9)
    span = max(above.max(), -below.min(), 1.0)
    for y, (_, row) in enumerate(rows.iterrows()):
        if pd.isna(totals.iloc[y]):
            mark_failed(axes, y, row["status"], row["reason"])
            continue
        write_beside(axes, f"{totals.iloc[y]:+.1f} %", above[y], y, gap=6)
    label_bars(axes, list(rows["label"]))
    axes.set_xlim(min(below) - 0.05 * span, max(above) + 0.16 * span)
    axes.set_xlabel("predicted - measured, % of the measured step")


FIGURE = Figure(
    caption=(
        "Predicted minus measured time of each part of a step, as a share of the measured step: "
        "mean over the ranks that compute and over the middle half of the steps. Bars to the "
        "left: the prediction was optimistic. The diamond is the sum of the parts; the error of "
        "the step differs from it, because that is of the slowest rank and of the median step. "
        "Contention is the slowdown of computation by concurrent transfers: predicted from the "
        "processor time per transferred byte, measured as computation minus computation in steps "
        "without communication (compute includes it if a run has no such steps). Exposed "
        "communication includes waits for other ranks. The rest (data, copies, time between "
        "spans) is not predicted."
    ),
    better="shorter bars are better",
    needs="a training run by a strategy: ./entry.sh train --strategy searched",
    rows=rows,
    measured=("measured_s",),
    draw=draw,
    unit=("model", "label"),
)
