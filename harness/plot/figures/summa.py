"""One product distributed over all ranks: aggregate rate, efficiency, and where its time goes."""

from typing import Any

import pandas as pd

from harness.measure.derive.devices import SummaRow
from harness.measure.statistics import known_median
from harness.plot.catalog import Catalog, RepeatGroup, merged
from harness.plot.figures import Axes, Canvas, Figure, Rows
from harness.plot.style import (
    FAILED,
    LIMIT,
    PHASE_COLOURS,
    WIDTH_IN,
    flops_unit,
    label_bars,
    mark_bar,
    mark_failed,
    stack_bars,
    write_beside,
)
from harness.units import format_number

OF_PRODUCT = ("scaling", "dtype", "m", "n", "k", "n_ranks")


def _rows(case: RepeatGroup, catalog: Catalog) -> list[dict[str, Any]]:
    base = case.identity | {"cluster": case.cluster}
    if not case.is_ok:
        return [base]
    groups = case.repeats_of(catalog.distributed, *OF_PRODUCT)
    return [base | _numbers(rows, case.cluster) for rows in groups.values()]


def _label(row: SummaRow, cluster: str) -> str:
    sizes = f"{row.m}" if row.m == row.n == row.k else f"{row.m}×{row.n}×{row.k}"
    ranks = f"{row.n_ranks} rank{'s' if row.n_ranks > 1 else ''}"
    return f"{row.scaling} · n = {sizes} · {row.dtype} · {ranks} · {cluster}"


def _numbers(rows: list[Any], cluster: str) -> dict[str, Any]:
    first, time = rows[0], merged([row.time for row in rows])
    flops = 2.0 * first.m * first.n * first.k
    return {
        "label": _label(first, cluster),
        "n_repeats": len(rows),
        **{name: getattr(first, name) for name in OF_PRODUCT},
        "flops_per_s": flops / time.median,
        "low_flops_per_s": flops / time.high,
        "high_flops_per_s": flops / time.low,
        "efficiency": first.efficiency and first.efficiency * first.time.median / time.median,
        "time_s": time.median,
        "compute_s": known_median(row.compute_s for row in rows),
        "communication_s": known_median(row.communication_s for row in rows),
        "exposed_communication_s": known_median(row.exposed_communication_s for row in rows),
    }


def rows(catalog: Catalog) -> Rows:
    """A row per cluster, kind of scaling, dtype and size."""
    return [row for case in catalog.cases("matmul") for row in _rows(case, catalog)]


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """Aggregate rate on the left, the slowest rank's time on the right."""
    canvas.set_size_inches(WIDTH_IN, 0.45 * len(table) + 1.5)
    left, right = canvas.subplots(1, 2, sharey=True)
    _draw_rates(left, table)
    _draw_times(right, table)
    handles, words = right.get_legend_handles_labels()
    canvas.legend(handles, words, loc="outside upper right", ncols=3, fontsize=7.5)
    label_bars(left, list(table["label"]))
    right.tick_params(axis="y", length=0)
    right.grid(axis="y", visible=False)


def _draw_rates(axes: Axes, table: pd.DataFrame) -> None:
    scale, unit = flops_unit(float(table["flops_per_s"].max()))
    for y, (_, row) in enumerate(table.iterrows()):
        if pd.isna(row["flops_per_s"]):
            mark_failed(axes, y, row["status"], row["reason"])
            continue
        rate = row["flops_per_s"] * scale
        axes.barh(y, rate, 0.66, color="#0072B2")
        words, right, colour = format_number(rate, 3), rate, LIMIT
        if not pd.isna(row["efficiency"]):
            peak = rate / row["efficiency"]
            mark_bar(axes, peak, y, half=0.36)
            right = max(rate, peak)
            words += f"  ({row['efficiency']:.0%})"
            colour = FAILED if row["efficiency"] > 1 else LIMIT
        write_beside(axes, words, right, y, color=colour)
    axes.margins(x=0.28)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"aggregate {unit} (mark: sum of local peaks)")
    axes.set_title("Rate and efficiency")


def _draw_times(axes: Axes, table: pd.DataFrame) -> None:
    whole, compute, exposed = (
        table[name].fillna(0).to_numpy(dtype=float) * 1e3
        for name in ("time_s", "compute_s", "exposed_communication_s")
    )
    stack_bars(axes, [("whole product", PHASE_COLOURS["other"], whole)], height=0.66)
    parts = [
        ("compute", PHASE_COLOURS["backward"], compute),
        ("exposed communication", PHASE_COLOURS["exposed_communication"], exposed),
    ]
    stack_bars(axes, parts, height=0.4)
    axes.set_xlabel("milliseconds, slowest rank")
    axes.set_title("Time")


FIGURE = Figure(
    caption=(
        "One matrix product distributed in blocks over all ranks (SUMMA). Left: FLOP/s of all "
        "devices together; the percentage is the efficiency against the sum of the single "
        "devices' peaks (black mark). Above 100 %, in red, that peak was measured too low. Right: "
        "time of the product, with computation and exposed communication of the slowest rank."
    ),
    better="left: higher is better; right: shorter is better",
    needs="a matmul run on several ranks: ./entry.sh matmul",
    rows=rows,
    measured=("flops_per_s",),
    draw=draw,
)
