"""The HTML report: figures, tables and environment in one file that needs no other.

Everything that comes from results is escaped by the template; figures are images (data URLs), in
which nothing can run.
"""

from __future__ import annotations

import base64
from collections import Counter, defaultdict
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

from harness.domain.run import RunHeader
from harness.plot.catalog import Catalog
from harness.plot.headlines import compared_strategies, warnings
from harness.plot.numbers import RunNumbers
from harness.plot.present import present
from harness.plot.render import Drawn, Rendered
from harness.plot.style import status_words
from harness.units import format_bytes, format_duration

MAX_TABLE_ROWS = 200
MAX_LISTED = 200  # warnings, and files and lines that were skipped


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


def _versions(headers: Sequence[RunHeader]) -> list[tuple[str, str, bool]]:
    """Library, its versions over all runs, and whether they disagree."""
    found: dict[str, set[str]] = defaultdict(set)
    for header in headers:
        for library, version in header.versions.items():
            found[library].add(version)
    return [
        (name, ", ".join(sorted(versions)), len(versions) > 1)
        for name, versions in sorted(found.items())
    ]


def _warnings(catalog: Catalog) -> list[str]:
    versions = _versions([run.header for run in catalog.runs])
    return warnings(catalog) + [
        f"runs disagree on the version of {name}: {found}"
        for name, found, differ in versions
        if differ
    ]


def build_report(catalog: Catalog, rendered: Rendered, root: Path) -> str:
    """Fill the template; the result depends on the results alone.

    A part that cannot be made is added to what failed in `rendered`.
    """
    import jinja2

    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    files = resources.files("harness.plot")
    template = environment.from_string((files / "report.html").read_text(encoding="utf-8"))
    headers = [run.header for run in catalog.runs]
    counts = Counter(header.status for header in headers)
    strategies = rendered.attempt("strategies", lambda: present(compared_strategies(catalog)))
    doubts = rendered.attempt("warnings", lambda: _warnings(catalog))
    return template.render(
        css=(files / "report.css").read_text(encoding="utf-8"),
        root=root.resolve().name,
        strategies=strategies or {"rows": []},
        sections=[_section(figure) for figure in rendered.drawn],
        missing=rendered.missing,
        failed=rendered.failed,
        runs=[_run_row(run) for run in catalog.runs],
        statuses=[f"{n} {status}" for status, n in sorted(counts.items())],
        devices=_devices(headers),
        versions=_versions(headers),
        warnings=_first(doubts or [], "warnings"),
        skipped=[(_shown(path, root), reason) for path, reason in catalog.skipped[:MAX_LISTED]],
        n_skipped=len(catalog.skipped),
    )


def _first(lines: Sequence[str], what: str) -> list[str]:
    """As many as a reader will read, and how many more there are."""
    n_more = len(lines) - MAX_LISTED
    return [*lines[:MAX_LISTED], *([f"{n_more} more {what}"] if n_more > 0 else [])]


def _shown(path: Path, root: Path) -> str:
    return str(path.relative_to(root)) if path.is_relative_to(root) else str(path)
