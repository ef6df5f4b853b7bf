"""The wall time of a training over all runs that it took: steps that count, and all else."""

import pandas as pd

from harness.measure.derive.goodput import continued_runs, goodput
from harness.plot.catalog import Catalog
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.style import (
    draw_bar_panels,
    joint_legend,
    label_bars,
    note_failures,
    stack_bars,
    write_beside,
)
from harness.units import format_number

PARTS = {
    "steps_s": ("#0072B2", "steps that count"),
    "repeated_s": ("#D55E00", "steps trained again"),
    "restarting_s": ("#CC79A7", "from a run's end to the next one's first step"),
    "saving_s": ("#E69F00", "saving the state"),
    "changing_s": ("#009E73", "changing the strategy"),
    "other_s": ("#BBBBBB", "other"),
}


def rows(catalog: Catalog) -> Rows:
    """A row per training that has several runs, saves its state or changes its strategy."""
    named = {
        run.header.run_id: case.identity for case in catalog.training for run in case.case.runs
    }
    runs = {run.header.run_id: run for run in catalog.runs if run.header.run_id in named}
    clocks = {run_id: run.clock for run_id, run in runs.items()}
    found = []
    for run_ids in continued_runs(run.header for run in runs.values()):
        if whole := goodput(run_ids, clocks):
            parts = {name: getattr(whole, name) for name in ("wall_s", *PARTS)}
            counts = {"n_steps": whole.n_steps, "n_repeated": whole.n_repeated}
            own = {"runs": " ".join(whole.run_ids), "goodput": whole.share}
            found.append(named[run_ids[-1]] | own | counts | parts)
    return found


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """A panel for each model with a stacked bar for each training."""
    panels = draw_bar_panels(canvas, table.groupby("model", sort=True), _draw_model, extra_in=1.15)
    joint_legend(canvas, panels, n_columns=3)
    note_failures(canvas, table)


def _draw_model(axes: Axes, model: str, rows: pd.DataFrame) -> None:
    parts = [(words, colour, rows[name].to_numpy()) for name, (colour, words) in PARTS.items()]
    stack_bars(axes, parts, height=0.68)
    for y, (_, row) in enumerate(rows.iterrows()):
        words = f"{row['goodput']:.0%} of {format_number(row['wall_s'])} s"
        write_beside(axes, words, row["wall_s"], y)
    label_bars(axes, list(rows["label"]))
    axes.set_xlim(0, rows["wall_s"].max() * 1.3)
    axes.set_xlabel("seconds")


FIGURE = Figure(
    caption=(
        "The time of a training from its first measured step to its last, over all runs of which "
        "each continues the one before; a step on the first rank that computed in it and lived to "
        "record it, all else on rank 0. Goodput is the share of the blue part: steps "
        "whose result was kept, each counted once. A step that a later run trained again is not "
        "counted. A restart lasts from the last step of a run to the first measured step of the "
        "next; it contains the time in which the loss of a rank is noticed, the loading of the "
        "state and the warm-up. Other is the time between steps."
    ),
    better="higher goodput is better",
    needs="a training that saves its state or changes: ./entry.sh train --save-every 50",
    rows=rows,
    draw=draw,
    unit=("model", "label"),
)
