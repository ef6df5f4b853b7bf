"""Time of every step (or epoch), with the outliers marked."""

from typing import Any

import pandas as pd

from harness.measure.statistics import summarize
from harness.plot.catalog import TrainingCase
from harness.plot.figures import Axes, Canvas, Figure, Rows, of_training
from harness.plot.style import (
    FAILED,
    LIMIT,
    colour_of,
    grid_panels,
    note_failures,
    status_words,
    wrap_label,
)
from harness.units import format_number

MAX_PANELS = 24
MAX_REPEATS = 12
RASTER_ABOVE = 2000


def _rows(case: TrainingCase) -> Rows:
    """A row per step of every run: seconds, maximum over ranks."""
    base = case.named | {"unit": case.first.unit}
    rows = []
    for repeat, (run, summary) in enumerate(zip(case.case.runs, case.summaries, strict=True)):
        # An invalid run is never a number, also not a point.
        times = run.times if case.case.status != "invalid" else {}
        far = set(summary.outlier_steps)
        rows += [
            base | {"repeat": repeat, "step": s, "duration_s": t, "is_outlier": s in far}
            for s, t in times.items()
        ]
    return rows or [base | {"is_outlier": False}]


def digest(table: pd.DataFrame) -> pd.DataFrame:
    """One row per case: how steady its steps are."""
    rows = []
    for keys, steps in table.groupby(["label", "unit", "status", "reason"], sort=False):
        row: dict[str, Any] = dict(zip(("label", "unit", "status", "reason"), keys, strict=True))
        times = steps["duration_s"].dropna()
        if len(times):
            summary = summarize(times.tolist())
            row |= {
                "n_steps": summary.n,
                "median_s": _median_s(steps),
                "p95_s": summary.p95,
                "max_s": summary.max,
                "cv": summary.cv,
                "n_outliers": int(steps["is_outlier"].sum()),
            }
        rows.append(row)
    return pd.DataFrame(rows)


def _median_s(steps: pd.DataFrame) -> float:
    """Median over repeats of the median of each."""
    return float(steps.groupby("repeat")["duration_s"].median().median())


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """A panel for each case; repeats in ever lighter tones of its colour."""
    timed = table[table["duration_s"].notna()]
    groups = list(timed.groupby(["label", "status"], sort=False))
    for axes, ((label, status), steps) in zip(
        grid_panels(canvas, len(groups), height_in=2.7), groups, strict=True
    ):
        words = str(label) if status == "ok" else f"{label} · {status_words(str(status))}"
        _draw_case(axes, words, steps)
    note_failures(canvas, table)


def _draw_case(axes: Axes, label: str, steps: pd.DataFrame) -> None:
    from matplotlib.ticker import MaxNLocator

    is_epochs = steps["unit"].iloc[0] == "epoch"
    scale = 1.0 if is_epochs else 1e3
    colour = colour_of(steps["strategy"].iloc[0])
    repeats = list(steps.groupby("repeat", sort=True))
    n_repeats = min(len(repeats), MAX_REPEATS)
    for repeat, (_, points) in enumerate(repeats[:n_repeats]):
        axes.plot(
            points["step"],
            points["duration_s"] * scale,
            marker="o" if len(points) < 40 else ".",
            markersize=4 if len(points) < 40 else 2,
            linewidth=0.8,
            color=colour,
            alpha=1 - 0.6 * repeat / n_repeats,
            rasterized=len(points) > RASTER_ABOVE,
        )
    far = steps[steps["is_outlier"].astype(bool)]
    axes.plot(far["step"], far["duration_s"] * scale, "o", mfc="none", mec=FAILED, markersize=8)
    median = _median_s(steps) * scale
    axes.axhline(median, color=LIMIT, linewidth=0.8, linestyle="--")
    # Room for the words above all points.
    axes.set_ylim(0, float(steps["duration_s"].max()) * scale * 1.25)
    unit = "s" if is_epochs else "ms"
    words = f"median {format_number(median)} {unit}"
    words += f", {len(far)} outlier{'s' if len(far) > 1 else ''}" if len(far) else ""
    words += f", {n_repeats} of {len(repeats)} repeats" if n_repeats < len(repeats) else ""
    axes.annotate(words, (0.98, 0.97), xycoords="axes fraction", ha="right", va="top", fontsize=8)
    axes.set_title(wrap_label(label, 42), fontsize=8.5)
    axes.set_ylabel(f"{steps['unit'].iloc[0]} time ({unit})")
    axes.set_xlabel(str(steps["unit"].iloc[0]))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


FIGURE = Figure(
    caption=(
        "Wall time of each step after warm-up (or epoch, if only epochs were logged): the maximum "
        "over ranks. The dashed line is the median over repeats. Red circles are outliers: more "
        "than three interquartile ranges above the third quartile, and more than 10 % above the "
        "median, over the steps of all repeats, which have lighter tones."
    ),
    better="lower and flatter is better",
    needs="a training run: ./entry.sh train",
    rows=of_training(_rows),
    measured=("duration_s",),
    draw=draw,
    unit=("label", "status"),
    most=MAX_PANELS,
    digest=digest,
)
