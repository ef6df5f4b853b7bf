"""Utilisation, temperature, memory and power of every device over the time of a run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from itertools import count
from typing import TYPE_CHECKING

import pandas as pd

from harness.plot.catalog import Catalog
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.numbers import TELEMETRY
from harness.plot.style import WIDTH_IN, series_style, shorten, wrap_label

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

_UNITS = (
    *(("load (%)", 1.0), ("temperature (°C)", 1.0)),
    *(("memory in use (GiB)", 2.0**-30), ("power (W)", 1.0)),
)
METRICS = dict(zip(TELEMETRY, _UNITS, strict=True))
MAX_RUNS = 12
MAX_NAMED = 12  # entries of a legend


def rows(catalog: Catalog) -> Rows:
    """A row per reading; times are each rank's own, from its start."""
    trained = [(run, case.whole_label) for case in catalog.training for run in case.case.runs]
    known = {id(run) for run, _ in trained}
    # A number of a launch may be that of another launch, or of a run that failed, too.
    numbers: dict[str, Iterator[int]] = defaultdict(count)
    others = [
        (run, f"{run.header.workload} · {run.header.run_id}")
        for run in catalog.runs
        if id(run) not in known
    ]
    ok_first = sorted(trained, key=lambda pair: pair[0].header.status != "ok")
    numbered = [(run, label, next(numbers[label])) for run, label in [*ok_first, *others]]
    return [
        {
            "label": label,
            "repeat": repeat,
            "status": run.header.status,
            "reason": run.header.reason,
        }
        | reading._asdict()
        for run, label, repeat in numbered
        for reading in run.readings
    ]


def digest(table: pd.DataFrame) -> pd.DataFrame:
    """Median and maximum of every metric, a row per device."""
    keys = ["label", "repeat", "device"]
    digested = table[keys].drop_duplicates().set_index(keys)
    of_metric = table.groupby([*keys, "metric"], sort=False)["value"].agg(["median", "max"])
    for metric in METRICS:
        for name in ("median", "max"):
            own = of_metric[name][of_metric.index.get_level_values("metric") == metric]
            digested[f"{name}_{metric}"] = own.droplevel("metric")
    return digested.reset_index()


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """A row of panels for each case's first run, one panel for each reading that it has."""
    first = table[table["repeat"] == table.groupby("label")["repeat"].transform("min")]
    groups = list(first.groupby("label", sort=False))
    canvas.set_size_inches(WIDTH_IN, 2.5 * len(groups) + 0.4)
    rows = canvas.subfigures(len(groups), 1, squeeze=False)[:, 0]
    for row, (label, readings) in zip(rows, groups, strict=True):
        styles = series_style(readings["device"])
        metrics = [metric for metric in METRICS if (readings["metric"] == metric).any()]
        row.suptitle(wrap_label(str(label), 90), fontsize=9, fontweight="bold", x=0.01, ha="left")
        for axes, metric in zip(
            row.subplots(1, len(metrics), squeeze=False).flat, metrics, strict=True
        ):
            _draw_metric(axes, readings[readings["metric"] == metric], metric, styles)
        _draw_legend(row)


def _draw_legend(row: SubFigure) -> None:
    """Name as many devices as fit beside the panels."""
    from matplotlib.lines import Line2D

    handles, names = row.axes[0].get_legend_handles_labels()
    if len(names) > MAX_NAMED:
        more = Line2D([], [], linestyle="")
        handles = [*handles[: MAX_NAMED - 1], more]
        names = [*names[: MAX_NAMED - 1], f"and {len(names) - MAX_NAMED + 1} more"]
    row.legend(handles, names, loc="outside right center", fontsize=7.5)


def _draw_metric(
    axes: Axes, readings: pd.DataFrame, metric: str, styles: dict[str, tuple[str, str]]
) -> None:
    words, scale = METRICS[metric]
    is_long = readings["time_s"].max() > 600
    for device, points in readings.sort_values(["rank", "time_s"]).groupby("device", sort=False):
        colour, marker = styles[str(device)]
        axes.plot(
            points["time_s"] / (60 if is_long else 1),
            points["value"] * scale,
            color=colour,
            marker=marker if len(points) < 60 else None,
            markersize=3,
            linewidth=1.1,
            label=shorten(str(device), 28),
        )
    axes.set_ylabel(words, fontsize=8)
    axes.set_xlabel("minutes" if is_long else "seconds", fontsize=8)
    axes.tick_params(labelsize=7.5)
    last = float(readings["time_s"].max()) / (60 if is_long else 1)
    axes.set_xlim(0, last * 1.05 if last > 0 else 1)
    if metric == "device_utilization_percent":
        # A CPU's load is of its rank's cores; a burst of saved-up quota reads above 100.
        axes.set_ylim(0, max(105.0, float(readings["value"].max()) * 1.05))
    else:
        axes.set_ylim(0, float(readings["value"].max()) * scale * 1.2)


FIGURE = Figure(
    caption=(
        "Load, temperature, memory and power of each device during the run. For a GPU, memory is "
        "the use of all processes. For a CPU, load (share of the rank's cores) and memory "
        "(resident set) are of the rank's process. A hot device whose load falls is throttling; "
        "an idle device waits for data or for other ranks. Of several repeats the first is drawn. "
        "Time starts with each rank."
    ),
    better="load: higher is better; temperature: lower and steady is better",
    needs="training runs: ./entry.sh train; or imported logs with the load of devices",
    rows=rows,
    draw=draw,
    most=MAX_RUNS,
    digest=digest,
)
