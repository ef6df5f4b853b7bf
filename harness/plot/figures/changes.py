"""Changes of strategy in a run: seconds standing still and bytes moved, predicted and measured."""

from typing import Any

import pandas as pd

from harness.measure.derive.changes import ChangeRow
from harness.plot.catalog import Catalog
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.style import (
    draw_bar_panels,
    joint_legend,
    label_bars,
    note_cut,
    note_failures,
    wrap_label,
    write_beside,
)
from harness.units import format_bytes

NUMBERS = (
    *("step", "before", "after", "why", "still_s", "predicted_still_s", "build_s"),
    *("step_before_s", "step_after_s", "predicted_before_s", "predicted_after_s"),
    "break_even_steps",
)
MAX_RUNS = 6
SIDES = {
    "still_s": ("#0072B2", "measured: training stands still"),
    "predicted_still_s": ("#D55E00", "predicted: the slowest link moves its bytes"),
}


def _row(base: dict[str, Any], change: ChangeRow) -> dict[str, Any]:
    pairs = change.moved_bytes
    busiest = max(pairs, key=lambda pair: pairs[pair], default=None)
    return base | {name: getattr(change, name) for name in NUMBERS} | {
        "moved_bytes": sum(pairs.values()),
        "cached_bytes": change.cached_bytes,
        "predicted_bytes": sum(change.predicted_bytes.values()),
        "busiest_pair": ""
        if busiest is None
        else f"{busiest[0]} to {busiest[1]}: {format_bytes(pairs[busiest])}",
    }  # fmt: skip


def rows(catalog: Catalog) -> Rows:
    """A row per change of strategy, of every run."""
    return [
        _row(case.named | {"run_id": run.header.run_id}, change)
        for case in catalog.training
        for run in case.case.runs
        for change in run.changes
    ]


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """A panel for each run, with two bars for each change."""
    groups = list(table.groupby(["label", "run_id"], sort=False))
    shown = [(label, rows) for (label, _), rows in groups[:MAX_RUNS]]
    panels = draw_bar_panels(canvas, shown, _draw_run, row_in=0.55)
    panels[-1].set_xlabel("seconds")
    joint_legend(canvas, panels, n_columns=2)
    note_cut(canvas, len(shown), len(groups), "runs")
    note_failures(canvas, table)


def _draw_run(axes: Axes, label: str, rows: pd.DataFrame) -> None:
    for y, (_, row) in enumerate(rows.iterrows()):
        for offset, (side, (colour, words)) in zip((-0.2, 0.2), SIDES.items(), strict=True):
            axes.barh(y + offset, row[side], 0.36, color=colour, label="" if y else words)
        moved, cached = format_bytes(row["moved_bytes"]), row["cached_bytes"]
        moved += f" + {format_bytes(cached)} of activations" if cached else ""
        write_beside(axes, moved, row["still_s"], y - 0.2, gap=4, size=7.5)
    reasons = rows["why"].str.replace(r"[:,] ", " · ", regex=True)
    label_bars(axes, [f"step {n} · {why}" for n, why in zip(rows["step"], reasons, strict=True)])
    axes.set_title(wrap_label(label, 70), loc="left")
    axes.set_xlim(left=0)
    axes.margins(x=0.25)


FIGURE = Figure(
    caption=(
        "A change moves a running training to another strategy between two steps. Blue: seconds "
        "in which no rank trained, with the bytes of the state that moved and of cached "
        "activations. Orange: the time that the slowest "
        "link or network interface needs for the predicted bytes. The next engine is built beside "
        "training before that (column build_s). break_even_steps: steps until shorter steps have "
        "recovered the time."
    ),
    better="shorter is better",
    needs="a training run that changes: ./entry.sh train --change STEP:FILE",
    rows=rows,
    draw=draw,
)
