"""The HTML report: figures, tables and environment in one file that needs no other.

Everything that comes from results is escaped by the template; figures are images (data URLs), in
which nothing can run.

Numbers and column names as a reader wants them: units from the names, SI prefixes, blanks.
"""

from __future__ import annotations

import base64
import math
import numbers
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.domain.record import SHORTEST_S
from harness.domain.run import STATUS_WORDS, RunHeader
from harness.measure.derive.doubts import rank_settings
from harness.measure.derive.strategies import MOST_REPEATS, StrategyRow
from harness.measure.statistics import CONFIDENCE, Summary
from harness.plot.catalog import Catalog
from harness.plot.headlines import Answer, library_versions
from harness.plot.numbers import RunNumbers
from harness.plot.render import Drawn, Rendered
from harness.plot.style import status_words
from harness.units import (
    format_bandwidth,
    format_bytes,
    format_duration,
    format_flops,
    format_number,
)

if TYPE_CHECKING:
    import pandas as pd

FRACTIONS = {
    *("cv", "efficiency", "low", "high", "overlap", "mfu", "mfu_of_measured_peak"),
    *("error", "median_error", "worst_error", "regret", "profile_fit_error"),
    *("bubble", "predicted_bubble", "goodput", "accuracy"),
}
# Of these a zero says much.
TELLING_ZEROS = {"regret", "median_error", "worst_error", "relative_error"}
COUNTS = {
    *("step", "last_step", "rank", "repeat", "source", "target", "m", "n", "k", "batch", "work"),
    "stage",
}
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
        return format_duration(number) if abs(number) >= SHORTEST_S else "0"
    return format_number(number)


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
    for column in {"label", "plan"}.intersection(shown):
        styles[shown.index(column)] = "words"
    if has_failures:
        headers.insert(place, "status")
        styles.insert(place, "status")
    return {"headers": headers, "rows": rows, "styles": styles}


MAX_TABLE_ROWS = 200
MAX_LISTED = 200  # warnings of a kind


def _section(drawn: Drawn) -> dict[str, Any]:
    table = drawn.shown
    return {
        "figure": drawn.figure,
        "image": ("data:image/svg+xml;base64," + base64.b64encode(drawn.image).decode()),
        "table": present(table.head(MAX_TABLE_ROWS)),
        "n_hidden": max(0, len(table) - MAX_TABLE_ROWS),
        "csv": drawn.files[-1].name,
    }


def _start_words(text: str) -> str:
    """A start to the second; imported logs have no time zone, and none is claimed for them."""
    try:
        start = datetime.fromisoformat(text)
    except ValueError:
        return text
    if start.tzinfo is None:
        return start.strftime("%Y-%m-%d %H:%M:%S")
    return start.astimezone(UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _run_row(run: RunNumbers) -> dict[str, Any]:
    header = run.header
    return {
        "header": header,
        "start": _start_words(header.start_utc),
        "duration": format_duration(header.duration_s) if header.duration_s is not None else "",
        "hosts": ", ".join(dict.fromkeys(rank.hostname for rank in header.ranks)),
        "commit": header.commit[:12],
        "command": " ".join(header.argv),
        "status": header.status if header.status == "ok" else status_words(header.status),
        "is_ok": header.status == "ok",
    }


def _devices(headers: Sequence[RunHeader]) -> list[tuple[str, ...]]:
    """Host, device, kind, cores, memory, interface and network of every rank, once each, in the
    order of their first run."""
    rows: list[tuple[str, ...]] = []
    for header in headers:
        nics = {node.name: node.nic_bytes_per_s for node in header.cluster.nodes}
        for rank in header.ranks:
            cores = f"{rank.n_cores:g}" if rank.n_cores else ""
            memory = format_bytes(rank.memory_bytes) if rank.memory_bytes > 1 else ""
            nic = nics.get(rank.hostname)
            network = f"{format_number(nic * 8e-9, 3)} Gbit/s" if nic else ""
            own = (rank.hostname, rank.device, rank.device_kind, cores, memory, rank.interface)
            rows.append((*own, network))
    return list(dict.fromkeys(rows))


def _answer(answer: Answer) -> dict[str, Any]:
    rows = [row for _, row in answer.rows]
    against = next((row.against for row in rows if row.against), "")
    return {
        "cell": answer.cell,
        "sentence": answer.sentence,
        "rows": [
            _strategy_row(row, "" if answer.cell else cell, against) for cell, row in answer.rows
        ],
        "against": against,
    }


def _strategy_row(row: StrategyRow, cell: str, against: str) -> dict[str, Any]:
    n_ok = len(row.step_s)
    verdict, detail = _verdict(row, against)
    unit = " an epoch" if row.unit == "epoch" else ""
    return {
        "strategy": row.strategy,
        "cell": cell,
        "plan": row.plan,
        "is_ok": bool(n_ok),
        "repeats": str(n_ok) if n_ok == row.n_started else f"{n_ok} of {row.n_started}",
        "rate": format_number(row.throughput) if row.throughput else "",
        "step": "" if row.median_s is None else format_duration(row.median_s) + unit,
        "interval": _interval(row.interval) if n_ok else "",
        "is_range": row.interval is not None and row.interval.coverage < CONFIDENCE,
        "speedup": row.ratio,
        "outcome": row.verdict.outcome if row.verdict else "",
        "verdict": verdict,
        "detail": detail,
    }


def _verdict(row: StrategyRow, against: str) -> tuple[str, str]:
    """The verdict of one strategy in a word, and by how much or how little it is decided."""
    if not row.step_s:
        return ", ".join(dict.fromkeys(map(status_words, row.failures))) or "no step timed", ""
    if row.is_of_baseline:
        return "same plan", ""
    if row.verdict is None:
        return ("baseline" if row.strategy == against else ""), ""
    if row.verdict.outcome == "inconclusive":
        n_more = row.verdict.n_more
        if row.verdict.is_apart:
            return "inconclusive", f"ranges apart, {n_more} more repeats"
        is_near = n_more <= MOST_REPEATS
        words = f"about {n_more} more repeats" if is_near else "repeats vary too much"
        return "inconclusive", words
    if row.verdict.outcome == "same":
        return "same", "within 10%"
    return row.verdict.outcome, f"p = {row.verdict.p:.2g}"


def _interval(step_s: Summary | None) -> str:
    if step_s is None or step_s.n == 1:
        return ""
    return f"{format_duration(step_s.low)} to {format_duration(step_s.high)}"


def build_report(
    catalog: Catalog,
    rendered: Rendered,
    found: Sequence[Answer],
    doubts: Mapping[str, Sequence[str]],
    root: Path,
) -> str:
    """Fill the template; the result depends on the results alone.

    A part that cannot be made is added to the failures in `rendered`.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    files = resources.files("harness.plot")
    template = environment.from_string((files / "report.html").read_text(encoding="utf-8"))
    headers = [run.header for run in catalog.runs]
    counts = Counter(header.status for header in headers)
    skipped = [f"{_shown(path, root)}: {reason}" for path, reason in catalog.skipped]
    every = {**doubts, "Files and lines that could not be used": skipped}
    rows = rendered.attempt("answers", lambda: [_answer(answer) for answer in found])
    return template.render(
        css=(files / "report.css").read_text(encoding="utf-8"),
        root=root.resolve().name,
        answers=rows or [],
        sections=[_section(figure) for figure in rendered.drawn],
        missing=rendered.missing,
        failed=rendered.failed,
        runs=[_run_row(run) for run in catalog.runs],
        statuses=[f"{n} {STATUS_WORDS.get(name, name)}" for name, n in sorted(counts.items())],
        devices=_devices(headers),
        software=[("library", library_versions(headers)), ("setting", rank_settings(headers))],
        warnings=[(kind, len(lines), _first(lines)) for kind, lines in every.items() if lines],
    )


def _first(lines: Sequence[str]) -> list[str]:
    """As many as a reader will read, and how many more there are."""
    n_more = len(lines) - MAX_LISTED
    return [*lines[:MAX_LISTED], *([f"and {n_more} more"] if n_more > 0 else [])]


def _shown(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
