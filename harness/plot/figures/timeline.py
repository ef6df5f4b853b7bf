"""One step of every rank, as predicted and as measured, on one scale of time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from harness.measure.derive.spans import covered_by_group
from harness.plot.catalog import Catalog
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.numbers import PASSES, SIDES
from harness.plot.predicted import PlannedCase, planned_cases
from harness.plot.style import KIND_COLOURS, WIDTH_IN, note_failures, shorten, time_unit
from harness.units import format_duration

if TYPE_CHECKING:
    from matplotlib.figure import SubFigure

MAX_CASES = 8
MAX_RANKS = 16
KINDS = (
    *("data", "host_to_device", "forward", "recompute", "backward", "compute", "optimizer"),
    "communication",
)
WORDS = {"host_to_device": "host to device", "communication": "transfers and waiting"}
# Where in a rank's row, from 0 to 1, computing and communication are drawn.
WORK_BAND, COMMUNICATION_BAND = (0.36, 0.9), (0.08, 0.32)
# Of the step: a narrower bar has no room for its microbatch's number.
NARROWEST_NAMED = 0.013


def _rows(case: PlannedCase) -> list[dict[str, Any]]:
    """The first repeat's; a case without a measured step keeps one row that says why."""
    base = case.training.named
    return [base | row for row in case.first.run.timeline] or [base]


def rows(catalog: Catalog) -> Rows:
    """A row per span; times count from the step's start."""
    cases = [case for case in planned_cases(catalog) if case.first.compared.predicted_by_rank]
    return [row for case in cases for row in _rows(case)]


def digest(table: pd.DataFrame) -> pd.DataFrame:
    """Seconds in which each kind is under way, by rank and side, and when the last span ends."""
    keys = ["label", "status", "reason", "side", "rank"]
    groups = table.assign(end_s=table["start_s"] + table["duration_s"]).groupby(
        keys, sort=False, dropna=False
    )
    number = groups.ngroup().to_numpy()
    digested = groups.agg({"step_s": "first", "clock_error_s": "first", "end_s": "max"})
    for kind in KINDS:
        own = (table["kind"] == kind).to_numpy()
        start_s = table["start_s"].to_numpy(dtype=float)[own]
        end_s = start_s + table["duration_s"].to_numpy(dtype=float)[own]
        digested[f"{kind}_s"] = covered_by_group(number[own], start_s, end_s, groups.ngroups)
    columns = ["step_s", "clock_error_s", *(f"{kind}_s" for kind in KINDS), "end_s"]
    return digested[columns].reset_index()


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """For each case two panels, predicted above measured, with a row for every rank."""
    groups = list(table[table["side"].notna()].groupby("label", sort=False))
    heights = [_height_in(rows) for _, rows in groups]
    canvas.set_size_inches(WIDTH_IN, sum(heights) + 0.5)
    parts = canvas.subfigures(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for part, (label, rows) in zip(parts, groups, strict=True):
        _draw_case(part, str(label), rows)
    _draw_legend(canvas, table)
    note_failures(canvas, table)


def _height_in(rows: pd.DataFrame) -> float:
    n_rows = sum(min(MAX_RANKS, rows[rows["side"] == side]["rank"].nunique()) for side in SIDES)
    return 1.55 + 0.36 * n_rows


def _draw_case(part: SubFigure, label: str, rows: pd.DataFrame) -> None:
    sides = [rows[rows["side"] == side] for side in SIDES]
    counts = [max(1, min(MAX_RANKS, own["rank"].nunique())) for own in sides]
    end_s = float((rows["start_s"] + rows["duration_s"]).max())
    scale, unit = time_unit(end_s)
    panels = part.subplots(2, 1, sharex=True, height_ratios=counts)
    part.suptitle(shorten(label, 110), fontsize=9, fontweight="bold", x=0.01, ha="left")
    for axes, side, own in zip(panels, SIDES, sides, strict=True):
        _draw_side(axes, own, scale, end_s)
        axes.set_title(_side_title(side, own, scale, unit), fontsize=8.5, fontweight="normal")
    panels[1].set_xlabel(f"{unit} since the step began")
    panels[1].set_xlim(0, end_s * scale * 1.01)


def _side_title(side: str, own: pd.DataFrame, scale: float, unit: str) -> str:
    n_ranks = own["rank"].nunique()
    words = f"{side}: {own['step_s'].iloc[0] * scale:.4g} {unit}"
    if n_ranks > MAX_RANKS:
        words += f", the first {MAX_RANKS} of {n_ranks} ranks"
    if side == "predicted" or n_ranks < 2:
        return words
    words += f" (step {own['step'].iloc[0]:.0f}, of median duration)"
    error_s = own["clock_error_s"].iloc[0]
    if pd.isna(error_s):
        return f"{words}; clocks not measured, each rank from its own start"
    return f"{words}; clocks aligned to ± {format_duration(float(error_s))}"


def _draw_side(axes: Axes, own: pd.DataFrame, scale: float, end_s: float) -> None:
    ranks = sorted(own["rank"].unique())[:MAX_RANKS]
    for y, rank in enumerate(ranks):
        of_rank = own[own["rank"] == rank]
        for kind in KINDS:
            spans = of_rank[of_rank["kind"] == kind]
            if len(spans):
                _draw_spans(axes, spans, kind, y, scale)
        named = of_rank[of_rank["duration_s"] > NARROWEST_NAMED * end_s]
        if own["microbatch"].max() > 0:
            _name_microbatches(axes, named[named["kind"].isin(PASSES)], y, scale)
    axes.set_yticks(np.arange(len(ranks)) + 0.5, [f"rank {rank:.0f}" for rank in ranks])
    axes.set_ylim(len(ranks), 0)
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.grid(axis="y", visible=False)


def _draw_spans(axes: Axes, spans: pd.DataFrame, kind: str, y: int, scale: float) -> None:
    low, high = COMMUNICATION_BAND if kind == "communication" else WORK_BAND
    axes.broken_barh(
        [
            (s * scale, d * scale)
            for s, d in zip(spans["start_s"], spans["duration_s"], strict=True)
        ],
        (y + 1 - high, high - low),
        facecolors=KIND_COLOURS[kind],
        edgecolor="white",
        linewidth=0.3,
        rasterized=len(spans) > 2000,
    )


def _name_microbatches(axes: Axes, spans: pd.DataFrame, y: int, scale: float) -> None:
    middle = y + 1 - sum(WORK_BAND) / 2
    for _, span in spans[spans["microbatch"].notna()].iterrows():
        axes.text(
            (span["start_s"] + span["duration_s"] / 2) * scale,
            middle,
            f"{span['microbatch']:.0f}",
            ha="center",
            va="center",
            fontsize=6.5,
            color="white" if span["kind"] == "backward" else "#111111",
            clip_on=True,
        )


def _draw_legend(canvas: Canvas, table: pd.DataFrame) -> None:
    from matplotlib.patches import Patch

    kinds = [kind for kind in KINDS if (table["kind"] == kind).any()]
    handles = [Patch(color=KIND_COLOURS[kind], label=WORDS.get(kind, kind)) for kind in kinds]
    canvas.legend(handles=handles, loc="outside upper center", ncols=len(handles), fontsize=8)


FIGURE = Figure(
    caption=(
        "The simulated step above the measured step of median duration, on one time scale. Each "
        "rank has a row: computation with its microbatch above, transfers and waits in the narrow "
        "strip below. A measured wait lasts until the transfer has arrived, so it includes "
        "waiting for the sender; a predicted transfer is drawn while its bytes move. Ranks begin "
        "and end a step at different times; the step lasts as long as that of the slowest rank. "
        "Ranks are aligned by clock offsets that were measured when the run began, with the "
        "stated error. Of several repeats the first is drawn. For a whole run: python -m "
        "harness.plot trace results/<run>"
    ),
    better="shorter is better; less white (idle) is better",
    needs="a training run by a strategy: ./entry.sh train --strategy searched",
    rows=rows,
    measured=("side",),
    draw=draw,
    most=MAX_CASES,
    digest=digest,
)
