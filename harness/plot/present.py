"""Numbers and column names as a reader wants them: units from the names, SI prefixes, blanks."""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from harness.plot.style import status_words
from harness.units import format_bandwidth, format_bytes, format_duration, format_flops

if TYPE_CHECKING:
    import pandas as pd

FRACTIONS = {
    *("cv", "efficiency", "low", "high", "overlap", "mfu", "mfu_of_measured_peak"),
    *("error", "median_error", "worst_error", "regret", "profile_fit_error"),
    *("bubble", "predicted_bubble"),
}
# Of these a zero says much.
TELLING_ZEROS = {"regret", "median_error", "worst_error", "relative_error"}
COUNTS = {"step", "rank", "repeat", "source", "target", "m", "n", "k", "batch", "work", "stage"}
ABBREVIATIONS = {
    "cv": "CV",
    "mfu": "MFU",
    "mfu_of_measured_peak": "MFU of measured peak",
    "p95": "p95",
}
SUFFIXES = (
    ("_samples_per_s", " (samples/s)"),
    ("_bytes_per_s", ""),
    ("flops_per_s", "rate"),
    ("_per_s", " per second"),
    ("_bytes", ""),
    ("_s", ""),
    ("_c", " (°C)"),
)


def header_of(column: str) -> str:
    """A column's name in words: `exposed_communication_s` is `exposed communication`."""
    if column in ABBREVIATIONS:
        return ABBREVIATIONS[column]
    for suffix, words in SUFFIXES:
        if column.endswith(suffix):
            column = column.removesuffix(suffix) + words
            break
    return column.removeprefix("n_").replace("_", " ").strip()


def _is_blank(value: Any) -> bool:
    return value is None or (isinstance(value, numbers.Real) and math.isnan(float(value)))


def format_value(column: str, value: Any) -> str:
    """A cell in words, by the unit at the end of its column's name; blank when unknown."""
    if _is_blank(value) or value == "":
        return ""
    if isinstance(value, bool) or type(value).__name__ == "bool_":
        return "yes" if value else "no"
    if not isinstance(value, numbers.Real):
        return str(value)
    number = float(value)
    if column.endswith("_samples_per_s"):
        return f"{number:.4g}"
    if column.endswith("flops_per_s"):
        return format_flops(number)
    if column.endswith("_bytes_per_s"):
        return format_bandwidth(number)
    if column.endswith("_bytes"):
        return format_bytes(number)
    if column in FRACTIONS:
        return f"{number:.1%}"
    if column.startswith("n_") or column in COUNTS:
        return f"{number:,.0f}"
    if column.endswith("_s") and not column.endswith("_per_s"):
        return format_duration(number) if number else "0"
    return f"{number:.4g}"


def _is_numeric(values: Iterable[Any]) -> bool:
    known = [value for value in values if not _is_blank(value)]
    return bool(known) and all(
        isinstance(value, numbers.Real) and not isinstance(value, bool) for value in known
    )


def _is_telling(frame: pd.DataFrame, column: str) -> bool:
    """Whether a column says anything: not blank or zero throughout, not a part of the label."""
    values = list(frame[column])
    if column in ("status", "reason") or all(_is_blank(value) for value in values):
        return False
    if all(_is_blank(value) or value is False or value == 0 for value in values):
        return column in COUNTS | TELLING_ZEROS or column.startswith("n_")
    if "label" not in frame.columns or column == "label":
        return True
    texts = zip(values, frame["label"], strict=True)
    return not all(isinstance(value, str) and value in str(label) for value, label in texts)


def present(frame: pd.DataFrame) -> dict[str, Any]:
    """A table for the report: headers, cells, which columns align right, rows not ok.

    Columns that say nothing are left out; `status` with its reason in words follows the label.
    """
    shown = [str(column) for column in frame.columns if _is_telling(frame, str(column))]
    has_failures = "status" in frame.columns and bool((frame["status"] != "ok").any())
    place = shown.index("label") + 1 if "label" in shown else 0
    rows = []
    for record in frame.to_dict("records"):
        cells = [format_value(column, record[column]) for column in shown]
        status = str(record.get("status", "ok"))
        if has_failures:
            reason = record.get("reason")
            words = status_words(status, reason if isinstance(reason, str) else "")
            cells.insert(place, "ok" if status == "ok" else words)
        rows.append({"cells": cells, "is_ok": status == "ok"})
    headers = [header_of(column) for column in shown]
    styles = ["right" if _is_numeric(frame[column]) else "" for column in shown]
    if "label" in shown:
        styles[place - 1] = "words"
    if has_failures:
        headers.insert(place, "status")
        styles.insert(place, "status")
    return {"headers": headers, "rows": rows, "styles": styles}
