"""Bus bandwidth of every collective against message size, with the limit of the link."""

from typing import Any

import pandas as pd

from harness.measure.derive.links import nic_limit_bytes_per_s
from harness.plot.catalog import Catalog, RepeatGroup, merged
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.style import (
    FAILED,
    LIMIT,
    MUTED,
    grid_panels,
    note_failures,
    plain_log_axis,
    series_style,
    spread_caption,
    wrap_label,
)
from harness.units import format_bandwidth, format_bytes


def _rows(case: RepeatGroup) -> list[dict[str, Any]]:
    base = case.identity | {"cluster": case.cluster}
    if not case.is_ok:
        return [base]
    base["nic_limit_bytes_per_s"] = nic_limit_bytes_per_s(case.runs[0])
    names = ("transport", "operation", "n_bytes")
    groups = case.repeats_of(lambda run: run.collectives, *names)
    return [base | _numbers(rows, case) for _, rows in sorted(groups.items())]


def _numbers(rows: list[Any], case: RepeatGroup) -> dict[str, Any]:
    first, time = rows[0], merged([row.time for row in rows])
    links = [run.best_links_bytes_per_s.get(first.transport, 0.0) for run in case.runs]
    moved_bytes = first.busbw * first.time.median
    busbw = moved_bytes / time.median
    limit = nic_limit_bytes_per_s(case.runs[0]) or max(links)
    return {
        "best_link_bytes_per_s": max(links) or None,
        "is_above_link": bool(limit) and busbw > limit,
        "label": f"{case.cluster} · {first.transport}",
        "n_repeats": len(rows),
        "operation": first.operation,
        "transport": first.transport,
        "n_ranks": first.n_ranks,
        "size_bytes": first.n_bytes,
        "time_s": time.median,
        "cv": time.cv,
        "algbw_bytes_per_s": first.n_bytes / time.median,
        "busbw_bytes_per_s": busbw,
        "low_bytes_per_s": moved_bytes / time.high,
        "high_bytes_per_s": moved_bytes / time.low,
    }


def rows(catalog: Catalog) -> Rows:
    """A row per cluster, transport, operation and message size."""
    return [row for case in catalog.cases("links") for row in _rows(case)]


def digest(table: pd.DataFrame) -> pd.DataFrame:
    """The largest message of each operation, and rows that are not ok."""
    timed = table[table["busbw_bytes_per_s"].notna()]
    largest = timed.loc[timed.groupby(["label", "operation"])["size_bytes"].idxmax()]
    return pd.concat([largest, table[table["status"] != "ok"]])


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """A panel for each cluster and transport; both axes logarithmic."""
    timed = table[table["busbw_bytes_per_s"].notna()]
    groups = list(timed.groupby("label", sort=True))
    styles = series_style(timed["operation"])
    for axes, (label, rows) in zip(
        grid_panels(canvas, len(groups), height_in=4.4), groups, strict=True
    ):
        _draw_panel(axes, str(label), rows, styles)
    note_failures(canvas, table)


def _draw_panel(
    axes: Axes, label: str, rows: pd.DataFrame, styles: dict[str, tuple[str, str]]
) -> None:
    from matplotlib.ticker import NullLocator

    for operation, points in rows.groupby("operation", sort=True):
        colour, marker = styles[str(operation)]
        points = points.sort_values("size_bytes")
        axes.plot(
            points["size_bytes"],
            points["busbw_bytes_per_s"] * 1e-9,
            color=colour,
            marker=marker,
            label=str(operation),
        )
        above = points[points["is_above_link"].astype(bool)]
        rates = above["busbw_bytes_per_s"] * 1e-9
        axes.plot(above["size_bytes"], rates, "x", color=FAILED, ms=9)
        axes.fill_between(
            points["size_bytes"],
            points["low_bytes_per_s"] * 1e-9,
            points["high_bytes_per_s"] * 1e-9,
            color=colour,
            alpha=0.15,
            linewidth=0,
        )
    for column, words, style, colour in (
        ("nic_limit_bytes_per_s", "limit of the NIC", "--", LIMIT),
        ("best_link_bytes_per_s", "best measured link", ":", MUTED),
    ):
        limit = rows[column].max()
        if not pd.isna(limit):
            text = f"{words}: {format_bandwidth(float(limit))}"
            axes.axhline(limit * 1e-9, color=colour, linestyle=style, linewidth=1.2, label=text)
    axes.set_xscale("log", base=2)
    plain_log_axis(axes, "y")
    sizes = sorted(int(size) for size in rows["size_bytes"].unique())
    shown = sizes[:: max(1, -(-len(sizes) // 7))]
    axes.set_xticks(shown, [format_bytes(size) for size in shown], rotation=30, fontsize=8)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("message size")
    axes.set_ylabel("bus bandwidth (GB/s)")
    axes.set_title(wrap_label(label, 42), fontsize=9)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)


FIGURE = Figure(
    caption=(
        "Bus bandwidth of each operation, one way (1 GB/s is 1e9 bytes per second): bytes / "
        "median time of the slowest rank, scaled by the factor of nccl-tests, so that a perfect "
        "ring reaches the speed of the link for any number of ranks. Dashed: the limit of the "
        "slowest NIC. Dotted: the best bandwidth measured between two nodes (on one node: two "
        "ranks) over this transport, in any repeat. A red cross marks a rate above the limit: the "
        "link was measured too low, or ranks share a host. Latency limits small messages. "
        f"{spread_caption('Shades')}"
    ),
    better="higher is better; at large messages, close to the dashed line",
    needs="a links run of two or more ranks: ./entry.sh links",
    rows=rows,
    measured=("busbw_bytes_per_s",),
    draw=draw,
    most=12,
    digest=digest,
)
