"""Predicted against measured step time of every run that was predicted."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from harness.inputs import by_number
from harness.plot.catalog import Catalog
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.predicted import PlannedCase, PlannedRepeat, planned_cases
from harness.plot.style import (
    FAILED,
    LIMIT,
    WIDTH_IN,
    colour_of,
    move_clear,
    note_failures,
    plain_log_axis,
    series_style,
    shorten,
    time_unit,
)

if TYPE_CHECKING:
    from matplotlib.transforms import BboxBase

BANDS = (0.2, 0.1)
MISS = 0.2
MAX_NAMED = 8
MAX_LEGEND = 12
NAME_PT = 9
ROOM = 0.3  # of the figure's width, for a name next to its point


def _row(case: PlannedCase, planned: PlannedRepeat) -> dict[str, Any]:
    summary, compared = case.training.first, planned.compared
    row = case.training.named | {
        "plan": compared.plan,
        "method": compared.method,
        "cluster": case.training.case.cluster,
        "batch": case.training.batch,
        "dtype": summary.dtype,
        "repeat": planned.repeat,
        "predicted_s": compared.predicted_s,
        "profile_fit_error": compared.profile_fit_error,
        "search_s": compared.search_s,
    }
    measured = compared.measured
    if measured is not None:
        row |= {"measured_s": measured.median, "low_s": measured.low, "high_s": measured.high}
        row["error"] = compared.error
    return row


def rows(catalog: Catalog) -> Rows:
    """One row per run that was predicted; error is predicted / measured - 1."""
    return [_row(case, repeat) for case in planned_cases(catalog) for repeat in case.repeats]


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """A point per run; colour is the strategy, the marker the model."""
    known = table[table["measured_s"].notna()]
    canvas.set_size_inches(WIDTH_IN, 6.2)
    axes = canvas.subplots()
    scale, unit = time_unit(float(known[["measured_s", "predicted_s"]].max().max()))
    low, high = _limits(known, scale)
    _draw_bands(axes, low, high)
    _draw_points(axes, known, scale)
    plain_log_axis(axes, "x")
    plain_log_axis(axes, "y")
    axes.set_xlim(low, high)
    axes.set_ylim(low, high)
    axes.set_aspect("equal", adjustable="box")
    axes.set_xlabel(f"measured step ({unit})")
    axes.set_ylabel(f"predicted step ({unit})")
    axes.set_title(_headline(known))
    _draw_legend(axes, known)
    note_failures(canvas, table)
    canvas.draw_without_rendering()  # names clear each other where the layout has put them
    _name_misses(axes, known, scale)


def _limits(known: pd.DataFrame, scale: float) -> tuple[float, float]:
    times = known[["measured_s", "predicted_s", "low_s", "high_s"]]
    positive = times[times > 0]
    return float(positive.min().min()) * scale / 1.35, float(times.max().max()) * scale * 1.35


def _headline(known: pd.DataFrame) -> str:
    errors = known["error"].abs()
    n_near = int((errors <= 0.1).sum())
    words = f"{len(known)} runs: median |error| {errors.median():.1%}, {n_near} within 10 %"
    return words if len(known) > 1 else f"1 run: error {known['error'].iloc[0]:+.1%}"


def _draw_bands(axes: Axes, low: float, high: float) -> None:
    for share, tone in zip(BANDS, ("#F1F3F5", "#DDE3EA"), strict=True):
        axes.fill_between(
            [low, high],
            [low * (1 - share), high * (1 - share)],
            [low * (1 + share), high * (1 + share)],
            color=tone,
            linewidth=0,
            label=f"± {share:.0%}",
            zorder=0.5,
        )
    axes.plot([low, high], [low, high], color=LIMIT, linewidth=0.9, label="exact", zorder=1)


def _draw_points(axes: Axes, known: pd.DataFrame, scale: float) -> None:
    markers = series_style(known["model"])
    for (model, strategy), rows in known.groupby(["model", "strategy"], sort=True):
        measured = rows["measured_s"] * scale
        errors = [measured - rows["low_s"] * scale, rows["high_s"] * scale - measured]
        axes.errorbar(
            measured,
            rows["predicted_s"] * scale,
            xerr=errors,
            fmt=markers[str(model)][1],
            color=colour_of(str(strategy)),
            markeredgecolor="white",
            markeredgewidth=0.5,
            markersize=6.5,
            elinewidth=0.8,
            zorder=3,
        )


def _name_misses(axes: Axes, known: pd.DataFrame, scale: float) -> None:
    """Name the worst predictions next to their points."""
    missed = known[known["error"].abs() > MISS].sort_values("error", key=abs, ascending=False)
    worst = missed.drop_duplicates("label")[:MAX_NAMED]
    low, high = np.log(axes.get_xlim())
    taken: list[BboxBase] = []
    for _, row in worst.iterrows():
        is_above = row["error"] > 0
        place = (np.log(row["measured_s"] * scale) - low) / (high - low)
        is_inside = place > ROOM if is_above else place < 1 - ROOM
        # Away from the diagonal, or towards it if the name would leave the figure.
        is_left = is_above == is_inside
        note = axes.annotate(
            f"{shorten(str(row['model']), 16)} {shorten(str(row['strategy']), 26)} "
            f"{row['error']:+.0%}",
            (row["measured_s"] * scale, row["predicted_s"] * scale),
            xytext=(-7 if is_left else 7, NAME_PT if is_above else -NAME_PT),
            textcoords="offset points",
            ha="right" if is_left else "left",
            va="center",
            fontsize=7.5,
            color=FAILED,
            bbox={"boxstyle": "square,pad=0.1", "fc": "white", "ec": "none", "alpha": 0.8},
            zorder=2.5,
        )
        move_clear(note, taken, NAME_PT if is_above else -NAME_PT)


def _draw_legend(axes: Axes, known: pd.DataFrame) -> None:
    from matplotlib.lines import Line2D

    handles, _ = axes.get_legend_handles_labels()
    bands = [handle for handle in handles if not str(handle.get_label()).startswith("_")]
    entries: list[Any] = [*bands, Line2D([], [], linestyle="", label="strategy")]
    names = sorted(set(known["strategy"].astype(str)), key=by_number)
    entries += [
        Line2D([], [], marker="o", linestyle="", color=colour_of(name), label=shorten(name, 26))
        for name in names[:MAX_LEGEND]
    ]
    if len(names) > MAX_LEGEND:
        entries.append(Line2D([], [], linestyle="", label=f"and {len(names) - MAX_LEGEND} more"))
    entries.append(Line2D([], [], linestyle="", label="model"))
    entries += [
        Line2D([], [], marker=marker, linestyle="", mfc="none", mec=LIMIT, label=shorten(model, 26))
        for model, (_, marker) in [*series_style(known["model"]).items()][:MAX_LEGEND]
    ]
    axes.legend(handles=entries, loc="upper left", bbox_to_anchor=(1.02, 1.0), borderaxespad=0)


FIGURE = Figure(
    caption=(
        "Each point is one planned run: predicted step against the median of its measured steps, "
        "with the 99 % interval (below 8 steps the range). On the diagonal the prediction is "
        "exact; below it the prediction was optimistic. Bands mark 10 % and 20 %; points outside "
        "them are named. Predictions are made before the run and never changed."
    ),
    better="nearer to the diagonal is better",
    needs="a training run by a strategy: ./entry.sh train --strategy searched",
    rows=rows,
    measured=("measured_s",),
    draw=draw,
    unit=("model", "strategy"),
    most=100,
)
