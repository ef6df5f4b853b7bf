"""Time to the same loss by global batch, from measured steps and the gradient noise scale."""

import math
from collections import defaultdict
from typing import Any

import pandas as pd

from harness.measure.derive.noise import NoiseScale, choose_scale, samples_needed
from harness.measure.derive.settings import configured
from harness.measure.derive.training import rate_over_repeats
from harness.plot.catalog import Catalog, TrainingCase
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.numbers import RunNumbers
from harness.plot.style import (
    colour_of,
    grid_panels,
    joint_legend,
    note_failures,
    plain_log_axis,
    series_style,
)

PANEL_IN = 3.6
Problem = tuple[str, str]


def _problem(case: TrainingCase) -> Problem:
    """The model and the data, on which the noise scale depends."""
    return case.first.model, configured(case.case.runs[0], "data")


def _noise_scales(catalog: Catalog) -> dict[Problem, NoiseScale]:
    """Of each problem that some run has measured one of."""
    runs: dict[Problem, list[RunNumbers]] = defaultdict(list)
    for case in catalog.training:
        runs[_problem(case)] += case.case.runs if case.case.is_ok else ()
    found = {
        problem: choose_scale(
            run.noise for run in sorted(own, key=lambda run: run.header.start_utc, reverse=True)
        )
        for problem, own in runs.items()
    }
    return {problem: noise for problem, noise in found.items() if noise is not None}


def _row(case: TrainingCase, noise: NoiseScale) -> dict[str, Any]:
    words = (case.first.strategy, case.first.dtype, case.case.cluster)
    row = {**case.identity, "label": " · ".join(filter(None, words)), "batch": case.batch}
    row["data"] = _problem(case)[1]
    rate = rate_over_repeats(case.summaries, "throughput")
    if not case.case.is_ok or not rate or not case.batch:
        return row
    return row | {
        "throughput_samples_per_s": rate,
        "noise_scale_samples": noise.n_samples,
        "samples_needed": samples_needed(case.batch, noise.n_samples),
        **{
            # In proportion to `samples_needed`, also at the ends of a scale: 0 and infinity.
            name: (1.0 if math.isinf(scale) else scale + case.batch) / rate
            for name, scale in (
                ("time", noise.n_samples), ("low", noise.low), ("high", noise.high)
            )
        },
    }  # fmt: skip


def rows(catalog: Catalog) -> Rows:
    """A row per case of a problem with a noise scale and two or more batches: `relative_time` is
    the time to the same loss over that of the problem's fastest, `low` and `high` the same by the
    ends of the noise scale's interval."""
    found: dict[Problem, Rows] = defaultdict(list)
    scales = _noise_scales(catalog)
    for case in catalog.training:
        if (problem := _problem(case)) in scales:
            found[problem].append(_row(case, scales[problem]))
    tables = [own for own in found.values() if len({row["batch"] for row in own}) > 1]
    for own in tables:
        known = [row for row in own if "time" in row]
        fastest = dict(min(known, key=lambda row: row["time"], default={}))
        for row in known:
            times = [row.pop(name) / fastest[name] for name in ("time", "low", "high")]
            row |= {"relative_time": times[0], "low_time": min(times), "high_time": max(times)}
    return [row for own in tables for row in own]


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """A panel for each model and data, a line for each strategy and cluster."""
    known = table[table["relative_time"].notna()]
    groups = list(known.groupby(["model", "data"], sort=True))
    markers = series_style(table["label"])
    panels = grid_panels(canvas, len(groups), height_in=PANEL_IN)
    for axes, ((model, data), rows) in zip(panels, groups, strict=True):
        _draw_problem(axes, f"{model} · {data}" if data else str(model), rows, markers)
    joint_legend(canvas, panels, n_columns=2)
    note_failures(canvas, table)


def _draw_problem(
    axes: Axes, name: str, rows: pd.DataFrame, markers: dict[str, tuple[str, str]]
) -> None:
    noise = rows["noise_scale_samples"].iloc[0]
    words = "without bounds" if math.isinf(noise) else f"{noise:.3g} samples"
    axes.set_title(f"{name}: noise scale {words}", fontsize=9)
    for label, points in rows.sort_values("batch").groupby("label", sort=False):
        value = points["relative_time"]
        axes.errorbar(
            points["batch"],
            value,
            yerr=[value - points["low_time"], points["high_time"] - value],
            color=colour_of(points["strategy"].iloc[0]),
            marker=markers[str(label)][1],
            linewidth=1.4,
            elinewidth=1,
            capsize=3,
            label=str(label),
        )
    plain_log_axis(axes, "x")
    axes.set_xlabel("global batch (samples)")
    axes.set_ylabel("time to the same loss / the least")
    axes.set_ylim(bottom=0)


FIGURE = Figure(
    caption=(
        "How long training takes to the same loss with other global batches: (1 + batch / gradient "
        "noise scale) / measured samples per second, relative to the fastest of the model. Larger "
        "batches synchronise less often, but need more samples. The learning rate must be tuned "
        "for each batch. The noise scale is that of the newest run that measured it with bounds, "
        "for the same model and data; whiskers are the ends of its 99 % interval."
    ),
    better="lower is better",
    needs="runs with two or more --batch-size, and one of them with --noise-steps 64",
    rows=rows,
    draw=draw,
    measured=("relative_time",),
    unit=("model", "data", "label"),
    most=24,
)
