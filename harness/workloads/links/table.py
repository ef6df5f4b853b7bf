"""The tables that rank 0 prints after links: pairs, collectives by size, overhead."""

from __future__ import annotations

import numpy as np

from harness.measure.derive import (
    CollectiveRow,
    LinkMatrix,
    best_link_bytes_per_s,
    collective_table,
    link_matrices,
    nic_limit_bytes_per_s,
    overhead_table,
)
from harness.measure.store import Run
from harness.measure.text import columns, run_texts
from harness.units import format_bandwidth, format_bytes, format_duration


def links_text(runs: list[Run]) -> str:
    """Return the tables of every run, one after another."""
    return run_texts(runs, _parts)


def _parts(run: Run) -> list[str]:
    left_out = run.header.texts("left_out")
    return [
        *(_matrix(matrix) for matrix in link_matrices(run)),
        _collectives(run),
        _overhead(run),
        "\n".join(f"left out: {text}" for text in left_out),
    ]


def _matrix(matrix: LinkMatrix) -> str:
    heads = [f"{matrix.transport} from \\ to", *matrix.names]
    rows = [
        [name, *(_pair(matrix, source, target) for target in range(len(matrix.names)))]
        for source, name in enumerate(matrix.names)
    ]
    title = f"half round trip, and bandwidth at {format_bytes(matrix.n_bytes)}, one pair at a time:"
    return f"{title}\n{columns(heads, rows)}"


def _pair(matrix: LinkMatrix, source: int, target: int) -> str:
    latency_s = float(matrix.latency_s[source, target])
    bandwidth = float(matrix.bandwidth_bytes_per_s[source, target])
    if np.isnan(latency_s):
        return "-"
    rate = "-" if np.isnan(bandwidth) else format_bandwidth(bandwidth)
    return f"{format_duration(latency_s)}, {rate}"


def _collectives(run: Run) -> str:
    limit, name = nic_limit_bytes_per_s(run), "of NIC limit"
    if limit is None:
        limit, name = best_link_bytes_per_s(run), "of best link"
    heads = ["operation", "transport", "size", "time", "CV", "algbw", "busbw", name]
    return columns(heads, [_cells(row, limit) for row in collective_table(run)])


def _overhead(run: Run) -> str:
    rows = overhead_table(run)
    if not rows:
        return ""
    cells = [[row.name, f"{row.speed:.0%}", _taken(row.taken_s_per_byte)] for row in rows]
    return columns(["computing on", "speed during send_recv", "overhead per byte"], cells)


def _taken(seconds: float) -> str:
    return f"{seconds * 1e9:.2f} ns" if seconds < 1e-6 else format_duration(seconds)


def _cells(row: CollectiveRow, limit: float | None) -> list[str]:
    return [
        row.operation,
        row.transport,
        format_bytes(row.n_bytes),
        format_duration(row.time.median),
        f"{row.time.cv:.0%}",
        format_bandwidth(row.algbw),
        format_bandwidth(row.busbw),
        f"{row.busbw / limit:.0%}" if limit else "-",
    ]
