"""How much of a step the ranks of a pipeline idle, measured and predicted."""

from statistics import median
from typing import Any

import pandas as pd

from harness.measure.derive.pipeline import PipelineSummary
from harness.measure.statistics import known_median
from harness.plot.catalog import TrainingCase, merged
from harness.plot.figures import Axes, Canvas, Figure, Rows, of_training
from harness.plot.style import (
    MUTED,
    colour_of,
    draw_bar,
    draw_bar_panels,
    joint_legend,
    label_bars,
    mark_bar,
    note_failures,
    range_words,
    spread_caption,
    write_beside,
)
from harness.units import format_count


def _predicted(case: TrainingCase) -> float | None:
    """Median over the repeats that were predicted."""
    return known_median(run.predicted.predicted_bubble for run in case.case.runs if run.predicted)


def _rows(case: TrainingCase) -> Rows:
    """A row for the mean over ranks, without a rank, then one for each rank."""
    found = [run.pipeline for run in case.case.runs] if case.case.is_ok else []
    known = [summary for summary in found if summary is not None]
    base = case.identity
    if not known:
        return [base] if case.case.is_failed_pipeline else []
    base |= {
        "n_repeats": len(known),
        "n_stages": known[0].n_stages,
        "n_microbatches": known[0].n_microbatches,
    }
    over = merged([summary.bubble for summary in known])
    mean = base | {"bubble": over.median, "low": over.low, "high": over.high, "n_values": over.n}
    mean["predicted_bubble"] = _predicted(case)
    return [mean, *(base | row for row in _rank_rows(known))]


def _rank_rows(known: list[PipelineSummary]) -> Rows:
    ranks = sorted({rank for summary in known for rank in summary.bubble_by_rank})
    by_rank = {
        rank: [s.bubble_by_rank[rank] for s in known if rank in s.bubble_by_rank] for rank in ranks
    }
    return [{"rank": rank, "bubble": median(shares)} for rank, shares in by_rank.items()]


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """A bar for each pipeline, a dot for each rank, a mark where the bubble was predicted."""
    groups = table[table["bubble"].notna()].groupby("model", sort=True)
    panels = draw_bar_panels(canvas, groups, _draw_model, bars=("label",), row_in=0.56)
    joint_legend(canvas, panels, n_columns=3)
    note_failures(canvas, table)


def _draw_model(axes: Axes, model: str, rows: pd.DataFrame) -> None:
    means = rows[rows["rank"].isna()]
    for y, (_, row) in enumerate(means.iterrows()):
        value = row["bubble"] * 100
        interval, colour = (row["low"] * 100, row["high"] * 100), colour_of(str(row["strategy"]))
        draw_bar(axes, value, y, interval, height=0.62, color=colour, alpha=0.85)
        ranks = rows[(rows["label"] == row["label"]) & rows["rank"].notna()]
        axes.plot(
            ranks["bubble"] * 100, [y] * len(ranks), "o", mfc="white", mec=MUTED, markersize=4.5,
            label="each rank",
        )  # fmt: skip
        predicted = row["predicted_bubble"]
        if not pd.isna(predicted):
            mark_bar(axes, predicted * 100, y, "predicted", half=0.38)
        box = {"boxstyle": "round,pad=0.2", "fc": "white", "ec": "none"}
        write_beside(axes, f"{value:.1f} %{range_words(row['n_values'])}", 0, y, bbox=box)
    label_bars(axes, [_label(row) for _, row in means.iterrows()])
    most = float(rows[["bubble", "predicted_bubble", "high"]].max().max())
    axes.set_xlim(0, min(112.0, max(5.0, most * 110)))
    axes.set_xlabel("% of a step in which a rank neither computes nor updates")


def _label(row: Any) -> str:
    stages = format_count(int(row["n_stages"]), "stage")
    return f"{row['label']} · {stages}, {format_count(int(row['n_microbatches']), 'microbatch')}"


FIGURE = Figure(
    caption=(
        "Share of a step in which the ranks of a pipeline idle: they neither compute nor run the "
        "optimizer, because the pipeline fills or drains, another stage is slower, or a transfer "
        "or gradient has not arrived. The bar is the mean over ranks, dots are single ranks, the "
        f"black mark is the simulated step. {spread_caption('Whiskers')}"
    ),
    better="lower is better",
    needs="a run of two or more stages: ./entry.sh train --strategy pipeline",
    rows=of_training(_rows),
    measured=("bubble",),
    draw=draw,
    unit=("model", "label"),
)
