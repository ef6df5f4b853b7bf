"""The HTML report: figures, tables and environment in one file that needs no other.

Everything that comes from results is escaped by the template; figures are images (data URLs), in
which nothing can run.
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from harness.domain.run import RunHeader
from harness.measure.derive import StrategyRow
from harness.measure.derive.finding import MOST_REPEATS
from harness.measure.statistics import CONFIDENCE, Summary
from harness.plot.catalog import Catalog
from harness.plot.headlines import Answer, answers, library_versions, warnings
from harness.plot.numbers import RunNumbers
from harness.plot.present import present
from harness.plot.render import Drawn, Rendered
from harness.plot.style import status_words
from harness.units import format_bytes, format_duration

MAX_TABLE_ROWS = 200
MAX_LISTED = 200  # warnings of a kind, and files and lines that were skipped


def _data_url(svg: bytes) -> str:
    return "data:image/svg+xml;base64," + base64.b64encode(svg).decode()


def _section(drawn: Drawn) -> dict[str, Any]:
    table = drawn.shown
    return {
        "name": drawn.figure.name,
        "title": drawn.figure.title,
        "caption": drawn.figure.caption,
        "better": drawn.figure.better,
        "image": _data_url(drawn.image),
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
        "run_id": header.run_id,
        "workload": header.workload,
        "repeat": header.repeat,
        "start": _start_words(header.start_utc),
        "duration": format_duration(header.duration_s) if header.duration_s is not None else "",
        "hosts": ", ".join(dict.fromkeys(rank.hostname for rank in header.ranks)),
        "backend": header.backend,
        "commit": header.commit[:12],
        "command": " ".join(header.argv),
        "status": header.status if header.status == "ok" else status_words(header.status),
        "reason": header.reason,
        "is_ok": header.status == "ok",
    }


def _devices(headers: Sequence[RunHeader]) -> list[dict[str, str]]:
    """Every rank's device once, in the order of their first run."""
    rows: dict[tuple[Any, ...], dict[str, str]] = {}
    for header in headers:
        nics = {node.name: node.nic_bytes_per_s for node in header.cluster.nodes}
        for rank in header.ranks:
            nic = nics.get(rank.hostname)
            row = {
                "host": rank.hostname,
                "device": rank.device,
                "kind": rank.device_kind,
                "cores": f"{rank.n_cores:g}" if rank.n_cores else "",
                "memory": format_bytes(rank.memory_bytes) if rank.memory_bytes > 1 else "",
                "interface": rank.interface,
                "network": f"{nic * 8e-9:.3g} Gbit/s" if nic else "",
            }
            rows[tuple(row.values())] = row
    return list(rows.values())


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
    return {
        "strategy": row.strategy,
        "cell": cell,
        "is_ok": bool(n_ok),
        "repeats": str(n_ok) if n_ok == row.n_started else f"{n_ok} of {row.n_started}",
        "rate": f"{row.throughput:.4g}" if row.throughput else "",
        "step": "" if row.median_s is None else format_duration(row.median_s),
        "interval": _interval(row.interval) if n_ok else "",
        "is_range": row.interval is not None and row.interval.coverage < CONFIDENCE,
        "speedup": "" if row.speedup is None else f"{row.speedup:.2f}",
        "outcome": row.verdict.outcome if row.verdict else "",
        "verdict": verdict,
        "detail": detail,
    }


def _verdict(row: StrategyRow, against: str) -> tuple[str, str]:
    """The verdict of one strategy in a word, and by how much or how little it is decided."""
    if not row.step_s:
        return ", ".join(dict.fromkeys(map(status_words, row.failures))) or "no step timed", ""
    if row.verdict is None:
        return ("baseline" if row.strategy == against else ""), ""
    if row.verdict.outcome == "inconclusive":
        n_more = row.verdict.n_more
        is_near = n_more <= MOST_REPEATS
        return (
            "inconclusive",
            f"about {n_more} more repeats" if is_near else "repeats vary too much",
        )
    if row.verdict.outcome == "same":
        return "same", "within 10%"
    return row.verdict.outcome, f"p = {row.verdict.p:.2g}"


def _interval(step_s: Summary | None) -> str:
    if step_s is None:
        return ""
    return f"{format_duration(step_s.low)} to {format_duration(step_s.high)}"


def build_report(catalog: Catalog, rendered: Rendered, root: Path) -> str:
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
    first = rendered.attempt("answers", lambda: [_answer(found) for found in answers(catalog)])
    doubts = rendered.attempt("warnings", lambda: warnings(catalog)) or {}
    return template.render(
        css=(files / "report.css").read_text(encoding="utf-8"),
        root=root.resolve().name,
        answers=first or [],
        sections=[_section(figure) for figure in rendered.drawn],
        missing=rendered.missing,
        failed=rendered.failed,
        runs=[_run_row(run) for run in catalog.runs],
        statuses=[f"{n} {status}" for status, n in sorted(counts.items())],
        devices=_devices(headers),
        versions=library_versions(headers),
        warnings=[(kind, len(lines), _first(lines)) for kind, lines in doubts.items()],
        skipped=[(_shown(path, root), reason) for path, reason in catalog.skipped[:MAX_LISTED]],
        n_skipped=len(catalog.skipped),
    )


def _first(lines: Sequence[str]) -> list[str]:
    """As many as a reader will read, and how many more there are."""
    n_more = len(lines) - MAX_LISTED
    return [*lines[:MAX_LISTED], *([f"and {n_more} more"] if n_more > 0 else [])]


def _shown(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
