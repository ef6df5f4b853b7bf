"""TFLOP/s of one product on each single device, by size and dtype."""

from typing import Any

import pandas as pd

from harness.plot.catalog import RepeatGroup, merged, short_kind
from harness.plot.figures import Axes, Canvas, Figure, Rows, of_workload
from harness.plot.style import (
    FAILED,
    WIDTH_IN,
    flops_unit,
    note_failures,
    plain_log_axis,
    series_style,
    short_hosts,
    shorten,
)
from harness.units import format_number

MAX_HOST = 24  # letters of a host, and of a device
RANK_IN = 0.5  # of height, for the bars and the name of a rank
DTYPES = ("bf16", "fp16", "fp32", "fp64", "tf32")


def _rows(case: RepeatGroup) -> Rows:
    """A row per rank, dtype and size."""
    groups = case.repeats_of(lambda run: run.products, "rank", "dtype", "m", "n", "k")
    return [case.identity | _numbers(rows) for rows in groups.values()] + skipped_products(case)


def skipped_products(case: RepeatGroup) -> Rows:
    """Products that a device could not do, each reason once with its ranks."""
    ranks: dict[tuple[str, str, str], list[int]] = {}
    for rank, dtype, size, reason in sorted({p for run in case.runs for p in run.skipped_products}):
        ranks.setdefault((dtype, size, reason), []).append(rank)
    return [
        {
            "label": f"{case.cluster} · {dtype} n = {size}",
            "status": "skipped",
            "reason": f"ranks {', '.join(map(str, where))}: {reason}",
            "dtype": dtype,
        }
        for (dtype, size, reason), where in ranks.items()
    ]


def _numbers(rows: list[Any]) -> dict[str, Any]:
    """Of one product on one rank; the repeat is the unit when there are several."""
    first, time = rows[0], merged([row.time for row in rows])
    flops = 2.0 * first.m * first.n * first.k
    return {
        "n_repeats": len(rows),
        "rank": first.rank,
        "hostname": first.hostname,
        "device": short_kind(first.device_kind),
        "dtype": first.dtype,
        "m": first.m,
        "n": first.n,
        "k": first.k,
        "flops_per_s": flops / time.median,
        "low_flops_per_s": flops / time.high,
        "high_flops_per_s": flops / time.low,
        "max_flops_per_s": max(row.max_flops_per_s for row in rows),
        "cv": time.cv,
        "peak_flops_per_s": first.peak_flops_per_s,
        "relative_error": max((row.error for row in rows if row.error is not None), default=None),
        "is_above_peak": any(row.is_above_peak for row in rows),
    }


def digest(table: pd.DataFrame) -> pd.DataFrame:
    """The best size of each device and dtype, and rows that are not ok."""
    timed = table[table["flops_per_s"].notna()]
    best = timed.loc[timed.groupby(["label", "rank", "dtype"])["flops_per_s"].idxmax()]
    return pd.concat([best, table[table["status"] != "ok"]])


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """For each cluster: rate against size on the left, the best of each device on the right."""
    timed = table[table["flops_per_s"].notna()]
    groups = list(timed.groupby("label", sort=False))
    heights = [max(3.8, 1.0 + RANK_IN * rows["rank"].nunique()) for _, rows in groups]
    canvas.set_size_inches(WIDTH_IN, sum(heights) + 0.3)
    panels = canvas.subplots(len(groups), 2, squeeze=False, height_ratios=heights)
    styles = series_style(DTYPES)
    for (left, right), (label, rows) in zip(panels, groups, strict=True):
        scale, unit = flops_unit(float(rows["flops_per_s"].max()))
        scaled = rows.assign(
            rate=rows["flops_per_s"] * scale, peak=rows["peak_flops_per_s"] * scale
        )
        _draw_sizes(left, str(label), scaled, styles, unit)
        _draw_devices(right, scaled, styles, unit)
    note_failures(canvas, table)


def _style(styles: dict[str, tuple[str, str]], dtype: str) -> tuple[str, str]:
    return styles.get(dtype, ("#5F6368", "x"))


def _draw_sizes(
    axes: Axes, label: str, rows: pd.DataFrame, styles: dict[str, tuple[str, str]], unit: str
) -> None:
    from matplotlib.ticker import NullLocator

    for (dtype, rank), points in rows.groupby(["dtype", "rank"], sort=True):
        colour, marker = _style(styles, str(dtype))
        sizes = (points["m"] * points["n"] * points["k"]).astype(float) ** (1 / 3)
        is_first = rank == rows["rank"].min()
        axes.plot(
            sizes,
            points["rate"],
            color=colour,
            marker=marker,
            alpha=1.0 if is_first else 0.45,
            label=str(dtype) if is_first else None,
        )
        above = points[points["is_above_peak"].astype(bool)]
        axes.plot(sizes[above.index], above["rate"], "x", color=FAILED, ms=9)
    axes.set_xscale("log", base=2)
    ticks = sorted({int(n) for n in rows["n"]})
    axes.set_xticks(ticks, [str(n) for n in ticks], rotation=30 if len(ticks) > 5 else 0)
    axes.xaxis.set_minor_locator(NullLocator())
    plain_log_axis(axes, "y")
    axes.set_xlabel("size n of an n × n × n product")
    axes.set_ylabel(unit)
    axes.set_title(label)
    axes.legend()


def _draw_devices(
    axes: Axes, rows: pd.DataFrame, styles: dict[str, tuple[str, str]], unit: str
) -> None:
    best = rows.loc[rows.groupby(["rank", "dtype"])["flops_per_s"].idxmax()]
    ranks = sorted(best["rank"].unique())
    dtypes = sorted(best["dtype"].unique())
    height = 0.8 / len(dtypes)
    for i, dtype in enumerate(dtypes):
        bars = best[best["dtype"] == dtype]
        at = [ranks.index(rank) + (i - (len(dtypes) - 1) / 2) * height for rank in bars["rank"]]
        values = bars["rate"]
        drawn = axes.barh(at, values, height * 0.92, color=_style(styles, str(dtype))[0])
        words = [format_number(value, 3) for value in values]
        labels = axes.bar_label(drawn, words, fontsize=7, padding=3)
        peaks = bars["peak"].to_numpy(dtype=float)
        axes.plot(peaks, at, "|", color="#111111", markersize=12, markeredgewidth=2)
        for text, value, peak in zip(labels, values, peaks, strict=True):
            if value < peak < value + 0.15 * best["rate"].max():
                text.xy = (peak, text.xy[1])  # behind the mark, which would cover it
    names = best.drop_duplicates("rank").set_index("rank").loc[ranks]
    hosts = short_hosts(names["hostname"], MAX_HOST)
    words = [
        f"{host} (rank {rank:.0f})\n{shorten(device, MAX_HOST)}"
        for host, rank, device in zip(hosts, ranks, names["device"], strict=True)
    ]
    axes.set_yticks(range(len(ranks)), words, fontsize=7.5)
    axes.invert_yaxis()
    axes.margins(x=0.15)
    axes.grid(axis="y", visible=False)
    mark = " (black bar: published peak)" if best["peak"].notna().any() else ""
    axes.set_xlabel(f"best {unit}{mark}")
    axes.set_title("Best size of each device")


FIGURE = Figure(
    caption=(
        "FLOP/s of one dense matrix product on each single device: 2n³ / median time, verified "
        "against a float64 reference. Full lines are rank 0, pale lines the other ranks. A black "
        "bar is the published dense peak, if it is known; a red cross marks a rate above it, "
        "which is a wrong measurement."
    ),
    better="higher is better",
    needs="a matmul run: ./entry.sh matmul",
    rows=of_workload("matmul", _rows),
    measured=("flops_per_s",),
    draw=draw,
    unit=("label", "rank"),
    digest=digest,
)
