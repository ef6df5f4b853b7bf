"""Which ranks a prediction is wrong about: computing of each, predicted less measured."""

from __future__ import annotations

from statistics import fmean
from typing import TYPE_CHECKING, Any

import pandas as pd

from harness.plot.catalog import Catalog
from harness.plot.figure import Figure, Rows
from harness.plot.predicted import PlannedCase, planned_cases
from harness.plot.style import LIMIT, SERIES, draw_bar_panels, label_bars, note_failures, rank_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure as Canvas

# Of a box with ranks, as shares of the axis.
_PADDING, _LETTER = 0.016, 0.01
SHOWN = ("compute", "exposed_communication")


def _rows(case: PlannedCase) -> list[dict[str, Any]]:
    known = [r.compared for r in case.repeats if r.compared.measured_by_rank]
    sides = [(c.predicted_by_rank, c.measured_by_rank) for c in known]
    ranks = [set(predicted) & set(measured) for predicted, measured in sides]
    base = case.training.identity
    if not case.training.case.is_ok and case.training.case.n_devices > 1:
        return [base]
    rows = []
    for rank in sorted(set.intersection(*ranks)) if ranks else []:
        row = base | {
            "rank": rank,
            "n_repeats": len(known),
            "measured_s": fmean(sum(measured[rank].values()) for _, measured in sides),
        }
        for part in SHOWN:
            row[f"predicted_{part}_s"] = fmean(predicted[rank][part] for predicted, _ in sides)
            row[f"measured_{part}_s"] = fmean(measured[rank][part] for _, measured in sides)
            difference_s = row[f"predicted_{part}_s"] - row[f"measured_{part}_s"]
            row[f"difference_{part}_s"] = difference_s
        sent = [c.sent_bytes[rank] for c in known if rank in c.sent_bytes]
        if sent:
            row["predicted_sent_bytes"], row["measured_sent_bytes"] = map(
                fmean, zip(*sent, strict=True)
            )
        rows.append(row)
    return rows if len(rows) > 1 else []


def rows(catalog: Catalog) -> Rows:
    """A row per rank that computes, of cases that have several: means over repeats."""
    return [row for case in planned_cases(catalog) for row in _rows(case)]


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """A row of numbers per case, one for each rank; ranks that agree share a box."""
    groups = table[table["rank"].notna()].groupby("model", sort=True)
    draw_bar_panels(canvas, groups, _draw_model, bars="label", extra_in=1.0)
    note_failures(canvas, table)


def _draw_model(axes: Axes, model: str, rows: pd.DataFrame) -> None:
    cases = list(rows.groupby("label", sort=False))
    shares = rows["difference_compute_s"] / rows["measured_s"] * 100
    span = max(shares.max() - shares.min(), shares.abs().max(), 1.0)
    for y, (_, case) in enumerate(cases):
        values = shares[case.index].sort_values()
        axes.plot([values.iloc[0], values.iloc[-1]], [y, y], color="#C8CCD2", linewidth=2, zorder=1)
        for value, words in _together(values, case["rank"].astype(int), span):
            axes.annotate(
                words, (value, y), ha="center", va="center", fontsize=7, color="white",
                bbox={"boxstyle": "round,pad=0.25", "facecolor": SERIES[0], "edgecolor": "white"},
            )  # fmt: skip
    axes.axvline(0, color=LIMIT, linewidth=0.9)
    label_bars(axes, [str(label) for label, _ in cases])
    axes.set_xlim(min(shares.min(), 0) - 0.06 * span, max(shares.max(), 0) + 0.06 * span)
    axes.set_xlabel(
        "computing of each rank (its number), predicted - measured, % of its measured step"
    )
    axes.set_title(model)


def _together(values: pd.Series, ranks: pd.Series, span: float) -> list[tuple[float, str]]:
    """(mean, ranks in words) of ascending values; those whose words would overlap are one.

    Args:
        span: of the axis, in the values' unit.
    """
    groups: list[list[tuple[float, int]]] = []
    for value, rank in zip(values, ranks[values.index], strict=True):
        groups.append([(value, rank)])
        while len(groups) > 1 and _overlap(_placed(groups[-2]), _placed(groups[-1]), span):
            last = groups.pop()
            groups[-1] += last
    return [_placed(group) for group in groups]


def _placed(group: list[tuple[float, int]]) -> tuple[float, str]:
    return fmean(value for value, _ in group), _ranks_in_words(sorted(rank for _, rank in group))


def _overlap(left: tuple[float, str], right: tuple[float, str], span: float) -> bool:
    n_letters = len(left[1]) + len(right[1])
    return right[0] - left[0] < (_PADDING + _LETTER / 2 * n_letters) * span


def _ranks_in_words(ranks: list[int]) -> str:
    """All of up to three or of consecutive ones, else the first and how many more."""
    words = rank_words(ranks)
    is_long = len(ranks) > 3 and "," in words
    return f"{ranks[0]} and {len(ranks) - 1} more" if is_long else words


FIGURE = Figure(
    caption=(
        "Predicted minus measured computation time of each rank, as a share of the measured step: "
        "mean over repeats and over the middle half of the steps. The numbers are ranks. Left of "
        "zero the prediction was optimistic. If ranks lie on both sides, the mean over ranks "
        "looks right, although one stage's operators or one device's profile are wrong. "
        "Computation is measured in steps without communication, if the run has any."
    ),
    better="nearer to zero is better",
    needs="a training run by a strategy on several ranks: ./entry.sh train --strategy searched",
    rows=rows,
    measured=("rank",),
    draw=draw,
    unit=("model", "label"),
)
