"""Bandwidth and latency of every ordered pair of ranks."""

from typing import Any

import numpy as np
import pandas as pd

from harness.plot.catalog import RepeatGroup, merged
from harness.plot.figures import Axes, Canvas, Figure, Rows, of_workload
from harness.plot.style import (
    MUTED,
    WIDTH_IN,
    note_failures,
    plain_log_axis,
    short_hosts,
    wrap_label,
)
from harness.units import format_bytes

LEAST_SPAN = 2.0  # of the colours of latency
# Sides of a map, and a digit of a value in it.
MAP_IN, LETTER_IN = 2.6, 0.062
MAX_HEIGHT_IN = 4.8  # a map is as wide as half a figure, however many its ranks
MAX_TICKS, MAX_TICK = 20, 14  # hosts at a side of a map, and letters of one


def _rows(case: RepeatGroup) -> Rows:
    """A row per transport and ordered pair."""
    groups = case.repeats_of(lambda run: run.links, "transport")
    return [
        row
        for transport, matrices in sorted(groups.items())
        for row in _pairs(case, transport, matrices)
    ]


def _pairs(case: RepeatGroup, transport: str, matrices: list[Any]) -> Rows:
    """Medians over the repeats with the largest message; a pair that none measured has no row."""
    base = case.identity | {"label": f"{case.cluster} · {transport}"}
    largest = max(matrices, key=lambda matrix: matrix.n_bytes)
    names = largest.names
    like = [m for m in matrices if (m.names, m.n_bytes) == (names, largest.n_bytes)]
    stacks = {
        "bandwidth_bytes_per_s": np.stack([m.bandwidth_bytes_per_s for m in like]),
        "latency_s": np.stack([m.latency_s for m in like]),
        "median_latency_s": np.stack([m.median_latency_s for m in like]),
    }
    rows: Rows = []
    for i, source in enumerate(names):
        for j, target in enumerate(names):
            known = {k: s[:, i, j][~np.isnan(s[:, i, j])] for k, s in stacks.items()}
            if i == j or not any(values.size for values in known.values()):
                continue
            rows.append(
                base
                | {
                    "n_repeats": len(like),
                    "transport": transport,
                    "source": i,
                    "target": j,
                    "source_name": source,
                    "target_name": target,
                    "message_bytes": largest.n_bytes or None,
                }
                | {k: _median(k, v) if v.size else None for k, v in known.items()}
                | _spread([m for m in like if (i, j) in m.transfers], (i, j))
            )
    return rows


def _spread(matrices: list[Any], pair: tuple[int, int]) -> dict[str, float]:
    if not matrices:
        return {}
    time, n_bytes = merged([m.transfers[pair] for m in matrices]), matrices[0].n_bytes
    ends = {"low_bytes_per_s": n_bytes / time.high, "high_bytes_per_s": n_bytes / time.low}
    return ends | {"cv": time.cv}


def _median(column: str, values: np.ndarray) -> float:
    """Of a bandwidth, that of the median time."""
    is_rate = column.startswith("bandwidth")
    return float(1 / np.median(1 / values) if is_rate else np.median(values))


def digest(table: pd.DataFrame) -> pd.DataFrame:
    """Slowest and fastest pair of each cluster and transport, and rows that are not ok."""
    timed = table[table["bandwidth_bytes_per_s"].notna()]
    grouped = timed.groupby("label")["bandwidth_bytes_per_s"]
    ends = timed.loc[[*grouped.idxmin(), *grouped.idxmax()]].drop_duplicates()
    return pd.concat([ends.sort_values(["label", "source"]), table[table["status"] != "ok"]])


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """For each cluster and transport: bandwidth on the left, latency on the right."""
    groups = list(table[table["source"].notna()].groupby("label", sort=True))
    n = max(int(rows[["source", "target"]].max().max()) + 1 for _, rows in groups)
    canvas.set_size_inches(WIDTH_IN, len(groups) * min(MAX_HEIGHT_IN, 1.9 + 0.42 * n) + 0.3)
    panels = canvas.subplots(len(groups), 2, squeeze=False)
    for (left, right), (label, rows) in zip(panels, groups, strict=True):
        size = format_bytes(float(rows["message_bytes"].max() or 0))
        title = wrap_label(str(label), 48)
        _draw_map(
            canvas, left, rows, "bandwidth_bytes_per_s", 1e-9, f"{title}\nbandwidth, GB/s ({size})"
        )
        _draw_map(canvas, right, rows, "latency_s", 1e6, "latency, microseconds")
    note_failures(canvas, table)


def _draw_map(
    canvas: Canvas, axes: Axes, rows: pd.DataFrame, column: str, scale: float, title: str
) -> None:
    from matplotlib.colors import LogNorm, Normalize

    names = dict(zip(rows["source"], rows["source_name"], strict=True))
    names |= dict(zip(rows["target"], rows["target_name"], strict=True))
    order = sorted(names)
    grid = np.full((len(order), len(order)), np.nan)
    for _, row in rows.iterrows():
        grid[order.index(row["source"]), order.index(row["target"])] = row[column]
    grid *= scale
    axes.set_title(title, fontsize=9)
    axes.grid(visible=False)
    places = range(0, len(order), -(-len(order) // MAX_TICKS))
    ticks = short_hosts((str(names[order[place]]) for place in places), MAX_TICK)
    angle = {"rotation": 90} if len(ticks) > 10 else {"rotation": 35, "ha": "right"}
    axes.set_xticks(places, ticks, fontsize=7, **angle)
    axes.set_yticks(places, ticks, fontsize=7)
    axes.set_xlabel("to")
    axes.set_ylabel("from")
    if np.isnan(grid).all():
        axes.annotate(
            "not measured", (0.5, 0.5), xycoords="axes fraction", ha="center", color=MUTED
        )
        return
    least, most = float(np.nanmin(grid)), float(np.nanmax(grid))
    # Dark is slow in both, so that a bad link stands out.
    if column.startswith("bandwidth"):  # from 0, so that links that differ little look alike
        image = axes.imshow(grid, cmap="cividis", norm=Normalize(0, most))
        canvas.colorbar(image, ax=axes, shrink=0.8)
    else:
        scale_of_colours = LogNorm(least, max(most, LEAST_SPAN * least))
        image = axes.imshow(grid, cmap="cividis_r", norm=scale_of_colours)
        plain_log_axis(canvas.colorbar(image, ax=axes, shrink=0.8).ax, "y")
    _write_values(axes, grid, image)


def _words(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _write_values(axes: Axes, grid: np.ndarray, image: Any) -> None:
    """Where they fit into their cells."""
    room = MAP_IN / len(grid) / LETTER_IN
    for (i, j), value in np.ndenumerate(grid):
        if np.isnan(value) or len(_words(value)) > room:
            continue
        red, green, blue, _ = image.to_rgba(value)
        is_light = 0.299 * red + 0.587 * green + 0.114 * blue > 0.55
        colour = "black" if is_light else "white"
        axes.text(j, i, _words(value), ha="center", va="center", fontsize=7, color=colour)


FIGURE = Figure(
    caption=(
        "Every ordered pair of ranks: rows send to columns, and each direction is measured "
        "separately. Left: bandwidth of the largest message. Right: latency, the shortest half "
        "of a round trip of the smallest message, over both directions. Dark cells are slow in "
        "both; a dark row or column points to one node's NIC. Colours of bandwidth start at 0; "
        "those of latency are logarithmic and span at least a factor of two."
    ),
    better="bandwidth: higher is better; latency: lower is better",
    needs="a links run of two or more ranks: ./entry.sh links",
    rows=of_workload("links", _rows),
    measured=("bandwidth_bytes_per_s", "latency_s"),
    draw=draw,
    most=8,
    digest=digest,
)
