"""The mean step of each case, split into phases that sum to it."""

from functools import partial

import pandas as pd

from harness.measure.derive.spans import PHASES
from harness.measure.derive.training import rate_over_repeats
from harness.measure.statistics import known_mean
from harness.plot.catalog import TrainingCase
from harness.plot.figures import Axes, Canvas, Figure, Rows, of_training
from harness.plot.style import (
    PHASE_COLOURS,
    draw_bar_panels,
    joint_legend,
    label_bars,
    mark_failed,
    stack_bars,
    write_beside,
)
from harness.units import format_number

ESTIMATES = ("communication_s", "no_sync_exposed_s", "slowed_compute_s", "overlap")
WORDS = {
    "host_to_device": "host to device",
    "exposed_communication": "exposed communication and waits",
    "other": "other (no span)",
}


def _rows(case: TrainingCase) -> Rows:
    """One row where steps were logged; seconds are means over steps and the ranks that compute."""
    if case.first.unit != "step":
        return []
    row = case.identity | {"n_repeats": len(case.summaries)}
    known = [summary for summary in case.summaries if summary.phases]
    if not case.case.is_ok or not known:
        return [row]
    means = {f"{p}_s": known_mean(summary.phases[p] for summary in known) for p in PHASES}
    row |= means | {"step_s": sum(value or 0.0 for value in means.values())}
    for name in ESTIMATES:
        row[name] = known_mean(getattr(summary, name) for summary in known)
    row["synchronisations_per_s"] = rate_over_repeats(known, "synchronisations_per_s")
    return [row]


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """Stacked horizontal bars, a panel for each model; phases that never occur are left out."""
    shown = [p for p in PHASES if (table[f"{p}_s"] > 1e-3 * table["step_s"]).any()]
    draw = partial(_draw_model, shown=shown)
    panels = draw_bar_panels(canvas, table.groupby("model", sort=True), draw, extra_in=1.15)
    joint_legend(canvas, panels, n_columns=6)


def _draw_model(axes: Axes, model: str, rows: pd.DataFrame, shown: list[str]) -> None:
    widest = rows["step_s"].max() * 1e3
    parts = (
        (WORDS.get(p, p), PHASE_COLOURS[p], rows[f"{p}_s"].fillna(0).to_numpy() * 1e3)
        for p in shown
    )
    stack_bars(axes, parts, height=0.68, edgecolor="white", linewidth=0.5)
    for y, (_, row) in enumerate(rows.iterrows()):
        if pd.isna(row["step_s"]):
            mark_failed(axes, y, row["status"], row["reason"])
            continue
        exposed = row["exposed_communication_s"] / row["step_s"]
        words = f"{format_number(row['step_s'] * 1e3)} ms"
        words += f", {exposed:.0%} exposed" if exposed else ""
        write_beside(axes, words, row["step_s"] * 1e3, y)
    label_bars(axes, list(rows["label"]))
    axes.set_xlim(0, widest * 1.3 if widest > 0 else 1)
    axes.set_xlabel("milliseconds of a step")


FIGURE = Figure(
    caption=(
        "The mean step of the ranks that compute, split into phases. Exposed communication is the "
        "part of the transfers that no computation hides, and contains waiting for the other "
        "rank, which cannot be told from the transfer. In a pipeline most of it is waiting for "
        "other stages (see the figure of the bubble); in data parallelism a better link or "
        "strategy can shorten it. Other is time without a span. The table has a second estimate "
        "of exposed communication (no sync exposed): the step minus a step without communication, "
        "within noise where it is below 0. It includes slowed compute, the slowdown of "
        "computation by concurrent transfers. In a pipeline the second estimate is much smaller, "
        "because it is of the slowest rank, while the first is a mean over ranks, most of which "
        "wait for that one."
    ),
    better="shorter is better; less orange is better",
    needs="a training run with step spans: ./entry.sh train",
    rows=of_training(_rows),
    measured=("step_s",),
    draw=draw,
    unit=("model", "label"),
)
