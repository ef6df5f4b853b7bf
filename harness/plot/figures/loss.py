"""Training loss of each strategy by step and by time, with the loss of held-out samples."""

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pandas as pd

from harness.inputs import by_number
from harness.measure.derive.settings import rest_of_config, telling_settings
from harness.plot.catalog import Catalog, TrainingCase
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.numbers import RunNumbers
from harness.plot.style import (
    colour_of,
    grid_panels,
    joint_legend,
    note_failures,
    time_unit,
    wrap_label,
)

MAX_LINES = 24
# Points of a line; more are means of as many neighbours as leave so few.
MAX_POINTS = 200
DASHES = ("-", "--", ":", "-.")
SHOWN = ("validation_loss", "accuracy")


def rows(catalog: Catalog) -> Rows:
    """A row per step of a run, the first of its repeats, and one per evaluation."""
    found = []
    for workload, cases in _workloads(catalog.training).items():
        names = [f"{case.first.strategy} on {case.first.n_ranks}" for case in cases]
        for case, name in zip(cases, names, strict=True):
            line = name
            if names.count(name) > 1:
                line = case.label if case.case.is_ok else f"{case.label} · {case.case.status}"
            found += _rows(case, {"workload": workload, "line": line})
    return found


def _workloads(cases: Iterable[TrainingCase]) -> dict[str, list[TrainingCase]]:
    """Cases that train the same model by the same settings, by their words."""
    like: dict[str, dict[str, list[TrainingCase]]] = defaultdict(lambda: defaultdict(list))
    for case in cases:
        words = f"{case.first.model} · {case.first.dtype} · batch {case.batch or 0:g}"
        settings = json.dumps(_settings(case), sort_keys=True)
        like[words][settings].append(case)
    found: dict[str, list[TrainingCase]] = {}
    for words, groups in like.items():
        told = telling_settings([_settings(own[0]) for own in groups.values()])
        for of_group, own in zip(told, groups.values(), strict=True):
            name = " · ".join(filter(None, (words, of_group)))
            found.setdefault(name, []).extend(own)
    return found


def _settings(case: TrainingCase) -> dict[str, Any]:
    return rest_of_config(case.case.runs[0])


def _rows(case: TrainingCase, words: dict[str, str]) -> Rows:
    base = case.named | words
    run = next((run for run in case.case.runs if run.losses), None)
    if run is None or case.case.status == "invalid":
        return [base]
    return [base | row for row in _steps(run)]


def _steps(run: RunNumbers) -> list[dict[str, Any]]:
    at_s = run.reached_s()
    rows = [
        {"step": step, "time_s": at_s.get(step), "loss": loss} for step, loss in run.losses.items()
    ]
    for metric in SHOWN:
        for step, value in run.held_out.get(metric, {}).items():
            rows.append({"step": step, "time_s": at_s.get(step), metric: value})
    return rows


def digest(table: pd.DataFrame) -> pd.DataFrame:
    """One row per case: what it has learned, and in what time."""
    found = []
    for keys, steps in table.groupby(["label", "status", "reason"], sort=False):
        row: dict[str, Any] = dict(zip(("label", "status", "reason"), keys, strict=True))
        losses = steps["loss"].dropna()
        if len(losses):
            row |= {"first_loss": losses.iloc[0], "last_loss": losses.iloc[-1]}
            known = steps.loc[losses.index]
            row |= {"n_steps": len(losses), "last_step": known["step"].max()}
            row |= {"time_s": known["time_s"].max()}
        row |= {name: steps[name].dropna().iloc[-1] for name in SHOWN if _has(steps, name)}
        found.append(row)
    return pd.DataFrame(found)


def _has(steps: pd.DataFrame, name: str) -> bool:
    return name in steps and bool(steps[name].notna().any())


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """Two panels for each workload, by step and by time, with a line for each strategy."""
    known = table[table["step"].notna()]
    groups = sorted(known.groupby("workload"), key=lambda group: by_number(str(group[0])))
    # Dashes tell variants of a strategy apart, whose colours are alike.
    dashes = {line: DASHES[n % len(DASHES)] for n, line in enumerate(known["line"].unique())}
    panels = grid_panels(canvas, 2 * len(groups), height_in=3.0)
    for at, (workload, steps) in enumerate(groups):
        by_step, by_time = panels[2 * at : 2 * at + 2]
        scale, unit = time_unit(float(steps["time_s"].max() or 0))
        _draw(by_step, steps, "step", 1.0, dashes)
        _draw(by_time, steps, "time_s", scale, dashes)
        by_step.set_xlabel("step")
        by_time.set_xlabel(f"time in steps ({unit})")
        for axes in (by_step, by_time):
            axes.set_ylabel("loss")
            axes.set_title(wrap_label(str(workload), 42), fontsize=8.5)
    joint_legend(canvas, panels, n_columns=3)
    note_failures(canvas, table)


def _draw(axes: Axes, steps: pd.DataFrame, x: str, scale: float, dashes: Mapping[Any, str]) -> None:
    for line, points in steps.groupby("line", sort=False):
        colour = colour_of(str(points["strategy"].iloc[0]))
        trained = points[points["loss"].notna() & points[x].notna()].sort_values("step")
        width = max(1, math.ceil(len(trained) / MAX_POINTS))
        means = trained[[x, "loss"]].groupby(np.arange(len(trained)) // width).mean()
        axes.plot(means[x] * scale, means["loss"], dashes[line], color=colour, label=str(line))
        if _has(points, "validation_loss"):
            held = points[points["validation_loss"].notna()]
            axes.plot(
                held[x] * scale, held["validation_loss"], "o", mfc="white", mec=colour,
                markersize=4.5, label="held-out samples",
            )  # fmt: skip


FIGURE = Figure(
    caption=(
        "Mean loss of the global batch in each step, of the first repeat, by step and by the time "
        "in steps (without saves and evaluations). The line of a run that failed ends with the "
        "last sum of losses over ranks, before its last step. The time of a run that goes on with "
        "another begins at 0. Lines of more than "
        f"{MAX_POINTS} steps are means of neighbours. Circles are held-out samples after a step. "
        "Strategies that train like one device have equal lines by step. The loss of averaged "
        "replicas is the mean of each on its own samples, so held-out samples compare them."
    ),
    better="lower, and earlier, is better",
    needs="losses of steps: ./entry.sh train, or a log of torchtitan",
    rows=rows,
    measured=("loss",),
    draw=draw,
    most=MAX_LINES,
    digest=digest,
)
