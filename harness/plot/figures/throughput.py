"""Samples per second of the whole job, by strategy, for each model."""

from typing import Any

import pandas as pd

from harness.measure.derive.training import rate_over_repeats
from harness.plot.catalog import TrainingCase, merged
from harness.plot.figures import Axes, Canvas, Figure, Rows, of_training
from harness.plot.style import (
    colour_of,
    draw_bar,
    draw_bar_panels,
    label_bars,
    mark_failed,
    range_words,
    spread_caption,
    write_beside,
)
from harness.units import format_number

COLUMNS = (
    *("model", "label", "strategy", "plan", "cluster", "n_devices", "batch", "dtype", "status"),
    *("reason", "n_repeats", "n_values", "throughput_samples_per_s", "low_samples_per_s"),
    *("high_samples_per_s", "per_device_samples_per_s", "cv", "mfu", "mfu_of_measured_peak"),
)


def _rows(case: TrainingCase) -> Rows:
    """One row; rates are blank where the run is not ok."""
    row: dict[str, Any] = {
        **case.identity,
        "plan": case.first.plan,
        "cluster": case.case.cluster,
        "n_devices": case.case.n_devices,
        "batch": case.batch,
        "dtype": case.first.dtype,
        "n_repeats": len(case.summaries),
    }
    known = [s for s in case.summaries if s.throughput is not None and s.duration is not None]
    return [row | _numbers(known) if case.case.is_ok and known else row]


def _numbers(known: list[Any]) -> dict[str, Any]:
    """Over repeats when there are several, else over the steps of the only one."""
    time = merged([summary.duration for summary in known])
    rate = rate_over_repeats(known, "throughput") or 0.0
    return {
        "n_values": time.n,
        "throughput_samples_per_s": rate,
        "low_samples_per_s": rate * time.median / time.high,
        "high_samples_per_s": rate * time.median / time.low,
        "per_device_samples_per_s": rate / known[0].n_devices,
        "cv": time.cv,
        "mfu": rate_over_repeats(known, "mfu"),
        "mfu_of_measured_peak": rate_over_repeats(known, "mfu_of_measured_peak"),
    }


def draw(table: pd.DataFrame, canvas: Canvas) -> None:
    """Horizontal bars with intervals, a panel for each model."""
    draw_bar_panels(canvas, table.groupby("model", sort=True), _draw_model)


def _draw_model(axes: Axes, model: str, rows: pd.DataFrame) -> None:
    widest = rows["high_samples_per_s"].max()
    for y, (_, row) in enumerate(rows.iterrows()):
        value = row["throughput_samples_per_s"]
        if pd.isna(value):
            reason = row["reason"] if row["status"] != "ok" else "no samples per second recorded"
            mark_failed(axes, y, row["status"], reason)
            continue
        interval = row["low_samples_per_s"], row["high_samples_per_s"]
        draw_bar(axes, value, y, interval, height=0.68, color=colour_of(row["strategy"]))
        words = f"{format_number(value)}{range_words(row['n_values'])}"
        write_beside(axes, words, row["high_samples_per_s"], y)
    label_bars(axes, list(rows["label"]))
    axes.set_xlim(0, widest * 1.22 if widest > 0 else 1)
    axes.set_xlabel("samples per second, whole job")


FIGURE = Figure(
    caption=(
        "Samples per second of the whole job: global batch / median step time (of logs of epochs: "
        "samples of an epoch / its time; batches smaller than others are left out). The bar is the "
        "median over repeats, or over the steps of a single run. "
        f"{spread_caption('Whiskers')} A red cross marks a run without a result."
    ),
    better="higher is better",
    needs="a training run: ./entry.sh train",
    rows=of_training(_rows),
    columns=COLUMNS,
    draw=draw,
    unit=("model", "label"),
)
