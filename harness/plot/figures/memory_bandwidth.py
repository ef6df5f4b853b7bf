"""Bytes per second that each device reads and writes in its own memory."""

from typing import Any

import pandas as pd

from harness.measure.derive.devices import MemoryRow
from harness.plot.catalog import RepeatGroup, merged, short_kind
from harness.plot.figures import Axes, Canvas, Figure, Rows, of_workload
from harness.plot.style import (
    SERIES,
    draw_bar_panels,
    joint_legend,
    label_bars,
    note_failures,
    range_words,
    spread_caption,
)
from harness.units import format_number

COLOURS = {"copy": SERIES[0], "triad": SERIES[4]}


def _rows(case: RepeatGroup) -> Rows:
    """A row per rank and kernel."""
    groups = case.repeats_of(lambda run: run.memory, "rank", "kernel")
    return [case.identity | _numbers(rows) for rows in groups.values()]


def _numbers(rows: list[MemoryRow]) -> dict[str, Any]:
    """Of one kernel on one rank; the repeat is the unit when there are several."""
    first, time = rows[0], merged([row.time for row in rows])
    traffic = first.bytes_per_s * first.time.median
    return {
        "n_repeats": len(rows),
        "rank": first.rank,
        "hostname": first.hostname,
        "device": short_kind(first.device_kind),
        "kernel": first.kernel,
        "array_bytes": first.n_bytes,
        "traffic_bytes_per_s": traffic / time.median,
        "n_values": time.n,
        "low_bytes_per_s": traffic / time.high,
        "high_bytes_per_s": traffic / time.low,
    }


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """Two bars for each rank, a panel for each cluster."""
    timed = table[table["traffic_bytes_per_s"].notna()]
    groups = timed.groupby("label", sort=False)
    panels = draw_bar_panels(canvas, groups, _draw_cluster, bars=("rank",))
    joint_legend(canvas, panels, n_columns=2)
    note_failures(canvas, table)


def _draw_cluster(axes: Axes, label: str, rows: pd.DataFrame) -> None:
    ranks = sorted(rows["rank"].unique())
    thin = {"elinewidth": 1, "capsize": 2, "ecolor": "#111111"}
    for shift, (kernel, colour) in zip((-0.19, 0.19), COLOURS.items(), strict=True):
        bars = rows[rows["kernel"] == kernel].sort_values("rank")
        values = bars["traffic_bytes_per_s"] * 1e-9
        errors = [values - bars["low_bytes_per_s"] * 1e-9, bars["high_bytes_per_s"] * 1e-9 - values]
        at = [ranks.index(rank) + shift for rank in bars["rank"]]
        drawn = axes.barh(at, values, 0.36, xerr=errors, color=colour, label=kernel, error_kw=thin)
        words = [
            f"{format_number(value)}{range_words(n)}"
            for value, n in zip(values, bars["n_values"], strict=True)
        ]
        axes.bar_label(drawn, words, fontsize=7.5, padding=4)
    names = rows.drop_duplicates("rank").set_index("rank")
    label_bars(
        axes, [f"{names['hostname'][r]} (rank {r:.0f}) · {names['device'][r]}" for r in ranks]
    )
    axes.margins(x=0.12)
    axes.set_xlim(left=0)
    axes.set_xlabel("GB/s, reads and writes")


FIGURE = Figure(
    caption=(
        "Rate at which each device reads and writes its own memory: traffic / median time of "
        "STREAM's copy (two arrays) and triad (three arrays), on arrays larger than the caches. "
        f"It limits memory-bound work such as the optimizer. {spread_caption('Whiskers')}"
    ),
    better="higher is better",
    needs="a matmul run: ./entry.sh matmul",
    rows=of_workload("matmul", _rows),
    measured=("traffic_bytes_per_s",),
    draw=draw,
    unit=("label", "rank"),
)
