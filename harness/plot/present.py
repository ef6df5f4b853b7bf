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

FRACTIONS = {"cv", "efficiency", "low", "high", "overlap", "mfu", "mamfu"}
COUNTS = {"step", "rank", "repeat", "source", "target", "m", "n", "k", "batch", "work"}
ABBREVIATIONS = {"cv": "CV", "mfu": "MFU", "mamfu": "MAMFU", "p95": "p95"}
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
        return format_duration(number)
    return f"{number:.4g}"


def _is_numeric(column: str, values: Iterable[Any]) -> bool:
    known = [value for value in values if not _is_blank(value)]
    return bool(known) and all(
        isinstance(value, numbers.Real) and not isinstance(value, bool) for value in known
    )


def present(frame: pd.DataFrame) -> dict[str, Any]:
    """A table for the report: headers, cells, which columns align right, rows not ok.

    Columns without any value are left out, and `status` with its reason in words comes last.
    """
    shown = [
        column
        for column in frame.columns
        if column not in ("status", "reason") and not all(_is_blank(v) for v in frame[column])
    ]
    has_failures = "status" in frame.columns and bool((frame["status"] != "ok").any())
    rows = []
    for record in frame.to_dict("records"):
        cells = [format_value(str(column), record[column]) for column in shown]
        status = str(record.get("status", "ok"))
        if has_failures:
            words = status_words(status, str(record.get("reason") or ""))
            cells.append("ok" if status == "ok" else words)
        rows.append({"cells": cells, "is_ok": status == "ok"})
    headers = [header_of(str(column)) for column in shown] + (["status"] if has_failures else [])
    right = [_is_numeric(str(column), frame[column]) for column in shown] + [False]
    return {"headers": headers, "rows": rows, "right": right}
