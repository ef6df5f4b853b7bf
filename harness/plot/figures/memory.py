"""Peak memory of a device, by kind of reading, against the device's memory."""

import pandas as pd

from harness.plot.catalog import TrainingCase
from harness.plot.figures import Axes, Canvas, Figure, Rows, of_training
from harness.plot.style import (
    MUTED,
    draw_bar_panels,
    joint_legend,
    label_bars,
    mark_bar,
    mark_failed,
    write_beside,
)
from harness.units import format_number

# Tones that no strategy has.
KINDS = {
    "predicted": ("#C8B48A", "predicted by the simulator"),
    "allocated": ("#2B3A4A", "tensors (allocated)"),
    "reserved": ("#5B7083", "held by the allocator (reserved)"),
    "rss": ("#93A5B5", "process (resident set)"),
    "used": ("#CBD5DD", "device in use, by anybody"),
}
GIB = 2.0**30
FURTHEST = 5.0  # times the longest bar, that a device's memory is drawn to scale


def _predicted_peak(case: TrainingCase) -> tuple[float, int, int] | None:
    """Bytes, rank and limit of the device that is predicted to be the fullest."""
    peaks = []
    for run in case.case.runs:
        limits = {info.rank: info.memory_bytes for info in run.header.ranks}
        peaks += [
            (float(peak.predicted_bytes), peak.rank, limits[peak.rank])
            for peak in (run.predicted.memory if run.predicted else ())
            if peak.predicted_bytes is not None
        ]
    return max(peaks, default=None)


def _rows(case: TrainingCase) -> Rows:
    """A row per kind of reading: the rank with the highest peak."""
    base = case.identity
    peaks: dict[str, tuple[float, int, int]] = {}
    for summary in case.summaries:
        for rank in summary.ranks:
            for kind, n_bytes in rank.memory_bytes.items():
                entry = (n_bytes, rank.rank, rank.info.memory_bytes)
                peaks[kind] = max(peaks.get(kind, (0.0, 0, 0)), entry)
    if (predicted := _predicted_peak(case)) is not None:
        peaks["predicted"] = predicted
    if case.case.is_ok and not peaks:
        return []
    if not case.case.is_ok:
        limits = [info.memory_bytes for info in case.case.header.ranks]
        return [base | {"device_bytes": min(limits, default=None)}]
    return [
        base | {"kind": kind, "rank": rank, "peak_bytes": n_bytes, "device_bytes": limit or None}
        for kind, (n_bytes, rank, limit) in sorted(peaks.items())
    ]


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """Grouped horizontal bars, a panel for each model."""
    groups = table.groupby("model", sort=True)
    panels = draw_bar_panels(canvas, groups, _draw_model, bars=("label", "status"), row_in=0.5)
    joint_legend(canvas, panels, n_columns=3)


def _draw_model(axes: Axes, model: str, rows: pd.DataFrame) -> None:
    cases = list(rows.groupby(["label", "status"], sort=False))
    kinds = [kind for kind in KINDS if (rows["kind"] == kind).any()]
    height = 0.76 / max(1, len(kinds))
    widest = float(rows["peak_bytes"].max()) / GIB
    for y, (_, of_case) in enumerate(cases):
        if of_case["peak_bytes"].isna().all():
            mark_failed(axes, y, of_case["status"].iloc[0], of_case["reason"].iloc[0])
        for i, kind in enumerate(kinds):
            colour, words = KINDS[kind]
            for _, row in of_case[of_case["kind"] == kind].iterrows():
                at = y + (i - (len(kinds) - 1) / 2) * height
                value = row["peak_bytes"] / GIB
                axes.barh(at, value, height * 0.92, color=colour, label=words)
                write_beside(axes, format_number(value, 3), value, at, gap=4, size=7.5)
        limit = of_case["device_bytes"].min()
        if not pd.isna(limit):
            _draw_limit(axes, y, limit / GIB, widest)
    label_bars(axes, [str(label) for (label, _), _ in cases])
    axes.set_xlim(left=0)
    axes.set_xlabel("GiB, on the rank with the highest peak")


def _draw_limit(axes: Axes, y: float, limit_gib: float, widest_gib: float) -> None:
    """A mark; where it would leave no room for the bars, its number at the right edge."""
    if limit_gib <= FURTHEST * widest_gib:
        mark_bar(axes, limit_gib, y, "memory of the device")
        return
    axes.margins(x=0.3)
    axes.annotate(
        f"device: {format_number(limit_gib, 3)} GiB", (1, y), xycoords=axes.get_yaxis_transform(),
        ha="right", va="center", fontsize=7.5, color=MUTED,
    )  # fmt: skip


FIGURE = Figure(
    caption=(
        "Peak memory of the rank that used most. The black mark is the device's memory (for a "
        "CPU, the limit of its rank), written at the right if it is far larger. A run out of "
        "memory is a red cross. The simulator predicts the tensors of training only; the resident "
        "set of a process is larger, because it also holds the interpreter and the libraries."
    ),
    better="lower is better",
    needs="a training run: ./entry.sh train",
    rows=of_training(_rows),
    measured=("peak_bytes",),
    draw=draw,
    unit=("model", "label", "status"),
)
