"""Predicted against measured steps of published sets, one panel a set."""

from typing import Any

import pandas as pd

from harness.domain.prediction import ValidatedPoint, Validation
from harness.plot.catalog import Catalog
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.style import LIMIT, MUTED, SERIES, WIDTH_IN, joint_legend, plain_log_axis

N_COLUMNS, PANEL_IN = 2, 4.2
POINTS = {True: (SERIES[0], "judged"), False: (MUTED, "calibrates: not judged")}


def _row(validation: Validation, point: ValidatedPoint) -> dict[str, Any]:
    row: dict[str, Any] = {
        "set": validation.set,
        "label": f"{validation.set} · {point.cell} · {point.name}",
        "cell": point.cell,
        "status": "ok" if point.measured_s else "failed",
        "reason": "" if point.measured_s else "the run failed where it was measured",
        "judged": not point.calibrates,
        "measured_s": point.measured_s,
        "predicted_s": point.predicted_s,
        "median_error": validation.median_error,
    }
    if point.measured_s:
        row["error"] = point.predicted_s / point.measured_s - 1
    return row


def rows(catalog: Catalog) -> Rows:
    """One row per published step; error is predicted / measured - 1."""
    return [_row(one, point) for one in catalog.validations for point in one.points]


def digest(table: pd.DataFrame) -> pd.DataFrame:
    """One row per set."""
    known = table[table["measured_s"].notna() & table["judged"]]
    rows = [
        {
            "set": name,
            "n_points": len(rows),
            "median_error": rows["error"].abs().median(),
            "p90_error": rows["error"].abs().quantile(0.9),
        }
        for name, rows in known.groupby("set", sort=True)
    ]
    return pd.DataFrame(rows, columns=["set", "n_points", "median_error", "p90_error"])


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """A point per step; grey points calibrate. The band is 10 % around the diagonal."""
    known = table[table["measured_s"].notna() & (table["predicted_s"] > 0)]
    groups = list(known.groupby("set", sort=True))
    n_rows = -(-len(groups) // N_COLUMNS)
    canvas.set_size_inches(WIDTH_IN, PANEL_IN * n_rows)
    panels = canvas.subplots(n_rows, N_COLUMNS, squeeze=False).ravel()
    for axes, (name, rows) in zip(panels, groups, strict=False):
        _draw_set(axes, str(name), rows)
    for axes in panels[len(groups) :]:
        axes.set_axis_off()
    joint_legend(canvas, panels[: len(groups)], n_columns=4)


def _draw_set(axes: Axes, name: str, rows: pd.DataFrame) -> None:
    times = rows[["measured_s", "predicted_s"]]
    ends = [float(times.min().min()) / 1.3, float(times.max().max()) * 1.3]
    low, high = ([factor * end for end in ends] for factor in (0.9, 1.1))
    axes.fill_between(ends, low, high, color=MUTED, alpha=0.2, linewidth=0, label="within 10 %")
    axes.plot(ends, ends, color=LIMIT, linewidth=0.8, label="exact")
    for judged, (colour, words) in POINTS.items():
        own = rows[rows["judged"] == judged]
        if len(own):
            axes.plot(
                *(own["measured_s"], own["predicted_s"], "o"),
                color=colour, markersize=2.5, label=words,
            )  # fmt: skip
    for which in ("x", "y"):
        plain_log_axis(axes, which)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    axes.set_aspect("equal", adjustable="box")
    axes.set_xlabel("measured step (s)")
    axes.set_ylabel("predicted step (s)")
    error = rows["median_error"].iloc[0]
    axes.set_title(name if pd.isna(error) else f"{name}: median error {error:.1%}", fontsize=9)


FIGURE = Figure(
    caption=(
        "Steps that others measured on GPU clusters, and what the simulator predicts for them. On "
        "the diagonal both are equal; the band is 10 % around it. Grey points gave a number to "
        "the prediction, so they are not judged. Runs that failed are in the table only."
    ),
    better="closer to the diagonal is better",
    needs="published steps: python -m harness.plan validate DIR --output results",
    rows=rows,
    measured=("measured_s",),
    draw=draw,
    digest=digest,
    unit=("set",),
)
