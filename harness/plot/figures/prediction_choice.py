"""Whether predictions choose well: each cell's strategies in predicted and measured order."""

from typing import Any

import pandas as pd

from harness.inputs import by_number
from harness.measure.derive.prediction import CellSummary, RankedStrategy, cell_summary
from harness.plot.catalog import Catalog
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.predicted import PlannedCase, competing, planned_cases
from harness.plot.style import (
    FAILED,
    LIMIT,
    colour_of,
    draw_bar_panels,
    joint_legend,
    label_bars,
    note_failures,
    shorten,
    status_words,
    write_beside,
)

FAILED_CHOICE = "predicted choice failed"  # in place of a regret
OF_CELL = ("n_strategies", "n_failed", "median_error", "worst_error", "rank_correlation", "regret")


def _name(case: PlannedCase, cell: str) -> str:
    """The case's label without the words of its cell."""
    in_cell = set(cell.split(" · "))
    words = [word for word in case.training.label.split(" · ") if word not in in_cell]
    return " · ".join(words) or case.training.first.strategy


def _row(
    case: PlannedCase, judged: RankedStrategy | None, cell: str, summary: CellSummary
) -> dict[str, Any]:
    """Of a case that was not measured without numbers but the predicted one."""
    name = case.training.label
    return case.training.identity | {
        "cell": cell,
        "label": _name(case, cell),
        "n_repeats": len(case.repeats),
        "predicted_s": judged.predicted_s if judged else case.predicted_s,
        "measured_s": judged.measured_s if judged else None,
        "error": judged.error if judged else None,
        "is_chosen": name == summary.chosen,
        "is_best": judged is not None and name == summary.best,
        **{column: getattr(summary, column) for column in OF_CELL},
    }


def _cell_rows(cell: str, cases: list[PlannedCase]) -> list[dict[str, Any]]:
    pairs = [(case, case.judged()) for case in cases]
    known = {judged.name: judged for _, judged in pairs if judged is not None}
    # A strategy with some failed repeats is judged by the others.
    failed = {
        case.training.label: case.predicted_s
        for case, _ in pairs
        if case.training.label not in known
    }
    summary = cell_summary(list(known.values()), failed)
    rows = [_row(case, judged, cell, summary) for case, judged in pairs]
    return sorted(rows, key=lambda row: (row["predicted_s"], by_number(row["label"])))


def rows(catalog: Catalog) -> Rows:
    """A row per strategy of each cell that has two or more, fastest predicted first; those that
    failed have no measured step."""
    found = sorted(competing(planned_cases(catalog)).items(), key=lambda one: by_number(one[0]))
    return [row for cell, cases in found if len(cases) > 1 for row in _cell_rows(cell, cases)]


def digest(table: pd.DataFrame) -> pd.DataFrame:
    """A row per cell."""
    rows = []
    for cell, strategies in table.groupby("cell", sort=False):
        row = strategies.iloc[0].to_dict() | {"cell": cell}
        row["chosen"] = strategies.loc[strategies["is_chosen"], "label"].iloc[0]
        row["regret"] = FAILED_CHOICE if pd.isna(row["regret"]) else row["regret"]
        row["best"] = strategies.loc[strategies["is_best"], "label"].iloc[0]
        rows.append(row)
    return pd.DataFrame(rows, columns=["cell", *OF_CELL[:-1], "chosen", "best", "regret"])


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """A panel for each cell, its strategies from the fastest predicted down."""
    groups = table.groupby("cell", sort=False)
    panels = draw_bar_panels(canvas, groups, _draw_cell, extra_in=1.35)
    joint_legend(canvas, panels, n_columns=3)
    note_failures(canvas, table)


def _draw_cell(axes: Axes, cell: str, rows: pd.DataFrame) -> None:
    best_s = float(rows["measured_s"].min())
    measured, predicted = rows["measured_s"] / best_s, rows["predicted_s"] / best_s
    colours = [colour_of(str(strategy)) for strategy in rows["strategy"]]
    places = range(len(rows))
    axes.hlines(places, measured, predicted, color="#C9CDD2", linewidth=2, zorder=1)
    axes.scatter(measured, places, s=52, c=colours, zorder=3, label="measured")
    axes.scatter(
        predicted, places, s=46, facecolors="white", edgecolors=colours, linewidths=1.5,
        zorder=2, label="predicted",
    )  # fmt: skip
    axes.axvline(1, color=LIMIT, linewidth=0.9, label="fastest measured")
    right = pd.concat([measured, predicted], axis=1).max(axis=1)
    for y, (_, row) in enumerate(rows.iterrows()):
        is_measured = not pd.isna(row["measured_s"])
        colour = LIMIT if is_measured else FAILED
        write_beside(axes, _words(row), right.iloc[y], y, gap=8, color=colour)
    label_bars(axes, list(rows["label"]))
    low, high = float(min(measured.min(), predicted.min())), float(right.max())
    axes.set_xlim(low - 0.04 * (high - low) - 0.02, high + 0.34 * (high - low) + 0.05)
    axes.set_xlabel("step, relative to the fastest measured")
    axes.set_title(f"{shorten(cell, 80)}\n{_verdict(rows.iloc[0])}", fontsize=8.5)


def _words(row: Any) -> str:
    """The text next to a strategy's points."""
    if not pd.isna(row["measured_s"]):
        words = f"{row['error']:+.0%}"
    elif row["status"] == "ok":
        words = "not measured"
    else:
        words = f"✕ {status_words(row['status'])}"
    return words + (", predicted to be the fastest" if row["is_chosen"] else "")


def _verdict(row: Any) -> str:
    order = row["rank_correlation"]
    regret = FAILED_CHOICE if pd.isna(row["regret"]) else f"regret {row['regret']:.1%}"
    words = [regret, f"median |error| {row['median_error']:.1%}"]
    return ", ".join(words + ([] if pd.isna(order) else [f"rank correlation {order:.2f}"]))


FIGURE = Figure(
    caption=(
        "One panel per cell (model, batch, dtype, cluster and other settings), with strategies in "
        "the order of their predicted steps. If that order is right, the filled points (measured) "
        "move right from row to row. Regret is the extra step time of the strategy that was "
        "predicted to be fastest, over the one that was measured to be fastest. Rank correlation "
        "is Spearman's and needs three strategies. Repeats count as one strategy. A "
        "failed strategy has a predicted step only, and no regret if it was the choice."
    ),
    better="lower regret is better; rank correlation 1 is best",
    needs="training runs by two or more strategies: ./entry.sh train --strategy ddp searched",
    rows=rows,
    draw=draw,
    unit=("cell", "label"),
    digest=digest,
)
