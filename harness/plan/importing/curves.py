"""Curves of collectives: nccl-tests' output, and CSV files with a size and a time on each line."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from harness.domain.cluster import CollectivePoint
from harness.errors import DataError
from harness.inputs import decode_text, find_int, find_number, read_file, shorten
from harness.plan.importing.tables import Row, read_table

_UNITS_S = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
_RANK = re.compile(r"^#\s+Rank\s+\d+\s", re.MULTILINE)
_TEST = re.compile(r"\b(all_reduce|all_gather|reduce_scatter|broadcast|alltoall)_perf\b")
_MOST_RANKS = 2**20
# Columns of a line of nccl-tests: size, count, type, operation, root, then time, algbw and busbw.
_SIZE, _TIME, _FEWEST = 0, 5, 8


def read_collectives(path: Path, n_ranks: int | None = None) -> list[CollectivePoint]:
    """The curve in a file, nccl-tests' or CSV.

    Args:
        n_ranks: that took part; None if the file, or its name (`AR_GPU8_...`), says so.

    Raises:
        DataError: it holds no curve, or nothing says how many ranks took part.
    """
    text = decode_text(read_file(path, "curve", DataError, is_given=True), str(path), DataError)
    if "busbw" in text and "#" in text and "," not in text.partition("\n")[0]:
        return _nccl_tests(text, str(path), n_ranks)
    return read_curve(path, n_ranks)


def _nccl_tests(text: str, source: str, n_ranks: int | None) -> list[CollectivePoint]:
    n = n_ranks or len(_RANK.findall(text))
    if n < 2:
        raise DataError(f"{source} names {n} ranks: give --ranks N, how many took part")
    test = _TEST.search(text)
    operation = "all_reduce" if test is None else test[1].replace("alltoall", "all_to_all")
    points = {}
    for line in text.splitlines():
        cells = line.split()
        if line.startswith("#") or len(cells) < _FEWEST:
            continue
        size, time = find_int(cells[_SIZE], 1), find_number(cells[_TIME])
        if size and time:
            points[size] = time * 1e-6
    return _points(points, operation, n, source)


def read_curve(path: Path, n_ranks: int | None = None) -> list[CollectivePoint]:
    """An all-reduce curve of a CSV file: a column `size(B)`, and `time` with its unit in brackets.

    Raises:
        DataError: as `read_collectives`.
    """
    n = n_ranks or _ranks_of_name(path.name)
    if n is None:
        raise DataError(f"{path} does not say how many ranks took part: give --ranks N")
    rows = read_table(path, [])
    size, time, unit_s = _columns(rows[0], path)
    points = {}
    for row in rows:
        n_bytes, seconds = row.count(size, 0), row.number(time) * unit_s
        if n_bytes > 0 and seconds > 0:
            points[n_bytes] = seconds
    return _points(points, "all_reduce", n, str(path))


def _ranks_of_name(name: str) -> int | None:
    found = re.search(r"gpus?[_-]?(\d+)|(\d+)[_-]?(?:gpus?|ranks?)", name.lower())
    return None if found is None else find_int(found[1] or found[2], 2, _MOST_RANKS)


def _columns(row: Row, path: Path) -> tuple[str, str, float]:
    """Columns of sizes and of times, and the times' unit."""
    size = next((name for name in row.columns if name.lower().startswith("size")), None)
    for name in row.columns:
        unit = re.fullmatch(r"time\s*[(\[](\w+)[)\]]|time_(\w+)", name.lower())
        seconds = unit and _UNITS_S.get(unit[1] or unit[2])
        if size is not None and seconds:
            return size, name, seconds
    raise DataError(
        f"{path} has columns {shorten(', '.join(row.columns))}: it needs size(B) and time(us), or "
        "another unit of time"
    )


def _points(
    seconds: dict[int, float], operation: str, n_ranks: int, source: str
) -> list[CollectivePoint]:
    if not seconds:
        raise DataError(f"{source} has no line with a size and a time: it is no curve")
    return [
        CollectivePoint(
            operation=operation,
            transport="nccl",
            n_ranks=n_ranks,
            n_bytes=n_bytes,
            duration_s=duration_s,
        )
        for n_bytes, duration_s in sorted(seconds.items())
    ]


def thinned(points: Sequence[CollectivePoint], step: float = 1.1) -> list[CollectivePoint]:
    """Points whose sizes grow by a factor, for a curve with many; the last one stays."""
    found: list[CollectivePoint] = []
    for point in sorted(points, key=lambda point: point.n_bytes):
        if not found or point.n_bytes >= step * found[-1].n_bytes:
            found.append(point)
    return [*found[:-1], points[-1]] if found else []


def bandwidth_of(points: Sequence[CollectivePoint]) -> float:
    """Bytes/s of one device's link, from the largest all-reduce: 2 (n - 1) / n of its bytes cross
    each link of a ring."""
    last = max(points, key=lambda point: point.n_bytes)
    return 2 * (last.n_ranks - 1) / last.n_ranks * last.n_bytes / last.duration_s
