"""Changes of strategy in a run: seconds standing still and bytes moved, predicted and measured."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.measure.derive.changes import ChangeRow
from harness.plot.catalog import Catalog
from harness.plot.figure import Figure, Rows
from harness.plot.style import WIDTH_IN, label_bars, note_failures, write_beside
from harness.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Canvas

NUMBERS = (
    *("step", "before", "after", "why", "still_s", "predicted_still_s", "build_s"),
    *("step_before_s", "step_after_s", "predicted_before_s", "predicted_after_s"),
    "break_even_steps",
)
SIDES = {
    "still_s": ("#0072B2", "measured: training stands still"),
    "predicted_still_s": ("#D55E00", "predicted: the slowest link moves its bytes"),
}


def _row(base: dict[str, Any], change: ChangeRow) -> dict[str, Any]:
    pairs = change.moved_bytes
    busiest = max(pairs, key=lambda pair: pairs[pair], default=None)
    return base | {name: getattr(change, name) for name in NUMBERS} | {
        "label": f"{base['label']} · step {change.step}: {change.before} to {change.after}",
        "moved_bytes": sum(pairs.values()),
        "predicted_bytes": sum(change.predicted_bytes.values()),
        "busiest_pair": ""
        if busiest is None
        else f"{busiest[0]} to {busiest[1]}: {format_bytes(pairs[busiest])}",
    }  # fmt: skip


def rows(catalog: Catalog) -> Rows:
    """A row per change of strategy, of every run."""
    return [
        _row(case.named, change)
        for case in catalog.training
        for run in case.case.runs
        for change in run.changes
    ]


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """Two bars for each change."""
    canvas.set_size_inches(WIDTH_IN, 1.6 + 0.55 * len(table))
    axes = canvas.subplots()
    for y, (_, row) in enumerate(table.iterrows()):
        for offset, (side, (colour, words)) in zip((-0.2, 0.2), SIDES.items(), strict=True):
            axes.barh(y + offset, row[side], 0.36, color=colour, label="" if y else words)
        moved = format_bytes(row["moved_bytes"])
        write_beside(axes, moved, row["still_s"], y - 0.2, gap=4, size=7.5)
    label_bars(axes, list(table["label"]))
    axes.set_xlim(left=0)
    axes.margins(x=0.15)
    axes.set_xlabel("seconds")
    canvas.legend(loc="outside upper center", ncols=2, fontsize=8)
    note_failures(canvas, table)


FIGURE = Figure(
    caption=(
        "A change moves a running training to another strategy between two steps. Blue: seconds "
        "in which no rank trained, with the bytes that moved. Orange: the time that the slowest "
        "link or network interface needs for the predicted bytes. The next engine is built beside "
        "training before that (column build_s). break_even_steps: steps until shorter steps have "
        "recovered the time."
    ),
    better="shorter is better",
    needs="a training run that changes: ./entry.sh train --change STEP:FILE",
    rows=rows,
    draw=draw,
)
