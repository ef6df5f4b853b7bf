"""The tables that rank 0 prints after matmul: devices, memory bandwidth, distributed products."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from harness.domain.record import Sample
from harness.measure.derive import (
    MatmulRow,
    MemoryRow,
    SummaRow,
    low_peak_warnings,
    matmul_table,
    memory_table,
    summa_table,
)
from harness.measure.store import Run
from harness.measure.text import columns, run_texts
from harness.units import format_bandwidth, format_bytes, format_duration, format_flops


def matmul_text(runs: list[Run]) -> str:
    """Return the tables of every run, one after another."""
    return run_texts(runs, _parts)


def _parts(run: Run) -> list[str]:
    summa = summa_table(run)
    warnings = "\n".join(low_peak_warnings(summa))
    return [_devices(run), _memory(run), _skipped(run), _distributed(summa), warnings]


def _devices(run: Run) -> str:
    """One row per device and dtype, at the size with the best rate."""
    rows = sorted(matmul_table(run), key=lambda row: (row.dtype, row.rank))
    best = [
        max(group, key=lambda row: row.flops_per_s)
        for _, group in groupby(rows, key=lambda row: (row.dtype, row.rank))
    ]
    heads = ["device", "dtype", "best n", "median", "99% interval", "max", "of peak", "error"]
    return columns(heads, [_device_cells(row) for row in best])


def _device_cells(row: MatmulRow) -> list[str]:
    peak = row.peak_flops_per_s
    return [
        f"{row.rank} {row.hostname}",
        row.dtype,
        str(row.n),
        format_flops(row.flops_per_s),
        f"{format_flops(row.low)} to {format_flops(row.high)}",
        format_flops(row.max_flops_per_s),
        f"{row.flops_per_s / peak:.0%}" if peak else "-",
        f"{row.error:.1e}" if row.error is not None else "-",
    ]


def _memory(run: Run) -> str:
    rows = [_memory_cells(row) for row in memory_table(run)]
    return columns(["device", "memory", "array", "median", "99% interval"], rows)


def _memory_cells(row: MemoryRow) -> list[str]:
    return [
        f"{row.rank} {row.hostname}",
        row.kernel,
        format_bytes(row.n_bytes),
        format_bandwidth(row.bytes_per_s),
        f"{format_bandwidth(row.low)} to {format_bandwidth(row.high)}",
    ]


def _skipped(run: Run) -> str:
    """Return a line for each reason why a size and dtype was not measured."""
    reasons: dict[str, list[int]] = {}
    for rank, records in sorted(run.ranks.items()):
        for record in records:
            if isinstance(record, Sample) and record.metric == "matmul_skipped":
                text = f"size {record.labels['n']}: {record.labels['reason']}"
                reasons.setdefault(text, []).append(rank)
    return "\n".join(f"skipped on ranks {ranks}: {text}" for text, ranks in reasons.items())


def _distributed(rows: Sequence[SummaRow]) -> str:
    heads = ["scaling", "dtype", "n", "ranks", "time", "rate", "of local sum", "compute",
             "communication", "exposed"]  # fmt: skip
    return columns(heads, [_summa_cells(row) for row in rows])


def _summa_cells(row: SummaRow) -> list[str]:
    parts = (row.compute_s, row.communication_s, row.exposed_communication_s)
    return [
        row.scaling,
        row.dtype,
        str(row.n),
        str(row.n_ranks),
        format_duration(row.time.median),
        format_flops(row.flops_per_s),
        f"{row.efficiency:.0%}" if row.efficiency is not None else "-",
        *(format_duration(part) if part is not None else "-" for part in parts),
    ]
