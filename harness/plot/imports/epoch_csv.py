"""Per-epoch CSVs: one row per rank and epoch, with the GPU's state at the epoch's end.

    Timestamp,Rank,Epoch,Computation_Time,GPU_ID,GPU_Name,GPU_Load,...,GPU_Used_Mem_MB,...

Columns are found by name, in any order and case; others are ignored. Ranks may come in any order.
MB in these files is nvidia-smi's: 2**20 bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import ResultsError
from harness.plot.imports.epoch_columns import (
    MOST_CHARACTERS,
    Column,
    check_columns,
    find_delimiter,
    lines_of,
    read_cell,
    split,
)
from harness.plot.imports.text import group, most_common

_MOST_RANKS = 16384
_MOST_EPOCHS = 10**7
_MOST_S = 1e9

# The largest accepted rank is _SPARE_RANKS + _MOST_RANKS_PER_RANK x the number of ranks with lines.
_SPARE_RANKS, _MOST_RANKS_PER_RANK = 1000, 10

NO_NUMBER = "rank, epoch or time is not a number"
FAR_RANK = "its rank is far above the number of ranks in the file"
TWO_TIMES = "a second time for the same rank, epoch and GPU"


@dataclass(frozen=True, kw_only=True)
class EpochRow:
    """One epoch of one rank; None for values that the file lacks.

    Attributes:
        occurrence: number of earlier restarts of the rank. A log with a second training appended,
            or that goes back to an earlier epoch after a restart, holds two repeats.
        at: the epoch's end by the writer's clock, without a time zone (UTC if one was given).
        is_extra: the row only adds the readings of another GPU to an epoch of an earlier row.
    """

    rank: int
    epoch: int
    occurrence: int
    duration_s: float
    at: datetime | None
    device_id: int
    device_kind: str
    utilization_percent: float | None
    temperature_c: float | None
    memory_used_bytes: float | None
    memory_total_bytes: float | None
    is_extra: bool = False


def is_epoch_csv(text: str) -> bool:
    """Whether the first line names the columns of an epoch log."""
    first = next(lines_of(text[:65536]), None)
    return first is not None and find_delimiter(first[1]) is not None


def parse_time(text: str | None) -> datetime | None:
    """Parse an ISO 8601 time; one with a zone is converted to UTC."""
    try:
        at = datetime.fromisoformat((text or "").strip())
        return at.astimezone(UTC).replace(tzinfo=None) if at.tzinfo else at
    except (ValueError, OverflowError):
        return None


def _text(cells: list[str], columns: dict[str, Column], quantity: str) -> str:
    column = columns.get(quantity)
    return cells[column.index] if column and column.index < len(cells) else ""


def _whole(value: float | None, most: int) -> int | None:
    is_whole = value is not None and 0 <= value <= most and value == int(value)
    return int(value) if is_whole and value is not None else None


def _row(cells: list[str], columns: dict[str, Column]) -> EpochRow | None:
    rank = _whole(read_cell(cells, columns, "rank"), _MOST_RANKS)
    epoch = _whole(read_cell(cells, columns, "epoch"), _MOST_EPOCHS)
    duration_s = read_cell(cells, columns, "duration")
    if rank is None or epoch is None or duration_s is None or not 0 < duration_s <= _MOST_S:
        return None
    return EpochRow(
        rank=rank,
        epoch=epoch,
        occurrence=0,
        duration_s=duration_s,
        at=parse_time(_text(cells, columns, "timestamp")),
        device_id=_whole(read_cell(cells, columns, "gpu"), _MOST_RANKS) or 0,
        device_kind=_text(cells, columns, "kind"),
        utilization_percent=read_cell(cells, columns, "load"),
        temperature_c=read_cell(cells, columns, "temperature"),
        memory_used_bytes=read_cell(cells, columns, "used"),
        memory_total_bytes=read_cell(cells, columns, "total"),
    )


def _number_repeats(rows: Iterable[tuple[int, EpochRow]]) -> tuple[list[EpochRow], list[int]]:
    """Number each row's occurrence, and return the lines that contradict the one before.

    If a rank has an epoch twice, it restarted where its epochs go back. Consecutive rows of one
    rank and epoch for different GPUs are one epoch with the readings of each.
    """
    of_rank: dict[int, list[tuple[int, EpochRow]]] = defaultdict(list)
    for number, row in rows:
        of_rank[row.rank].append((number, row))
    found: list[tuple[int, EpochRow]] = []
    wrong: list[int] = []
    for mine in of_rank.values():
        seen = Counter((row.epoch, row.device_id) for _, row in mine)
        goes_back = max(seen.values()) > 1
        occurrence = 0
        last: EpochRow | None = None
        devices: set[int] = set()
        for number, row in mine:
            is_same = last is not None and row.epoch == last.epoch and row.device_id not in devices
            if is_same and last is not None and row.duration_s != last.duration_s:
                wrong.append(number)
                continue
            if not is_same:
                devices = set()
                occurrence += bool(goes_back and last is not None and row.epoch <= last.epoch)
            devices.add(row.device_id)
            found.append((number, replace(row, occurrence=occurrence, is_extra=is_same)))
            last = row
    return [row for _, row in sorted(found, key=lambda pair: pair[0])], wrong


def parse_epoch_csv(text: str, path: Path) -> tuple[list[EpochRow], list[str]]:
    """Read a file's text; returns its rows and a reason for each line that was skipped.

    Raises:
        ResultsError: a required column is missing, or no line is usable; names the path.
    """
    lines = list(lines_of(text))
    first = lines[0][1] if lines else ""
    delimiter = find_delimiter(first)
    headings = split(first, delimiter or ",") if len(first) < MOST_CHARACTERS else []
    columns = check_columns(headings, str(path))
    cells_of = [(number, split(line, delimiter or ",")) for number, line in lines[1:]]
    n_more = _n_index_columns(headings, [cells for _, cells in cells_of])
    rows: list[tuple[int, EpochRow]] = []
    skipped: list[tuple[int, str]] = []
    is_cut = not text.endswith(("\n", "\r"))
    for number, all_cells in cells_of:
        cells = all_cells[n_more:]
        if all_cells == headings:
            continue  # a repeated header, because a second training was appended
        n_cells = len(cells)
        while n_cells > len(headings) and not cells[n_cells - 1]:
            n_cells -= 1  # a delimiter ends the line
        cells = cells[:n_cells]
        if len(cells) != len(headings):
            skipped.append((number, f"{len(cells)} of {len(headings)} columns"))
            continue
        if is_cut and number == lines[-1][0]:
            # The last field of an incomplete line may be truncated and still be a number.
            cells[-1] = ""
        row = _row(cells, columns)
        if row is None:
            skipped.append((number, NO_NUMBER))
        else:
            rows.append((number, row))
    largest = _SPARE_RANKS + _MOST_RANKS_PER_RANK * len({row.rank for _, row in rows})
    far = [number for number, row in rows if row.rank > largest]
    found, wrong = _number_repeats((number, row) for number, row in rows if row.rank <= largest)
    skipped += [(number, FAR_RANK) for number in far]
    skipped = sorted(skipped + [(number, TWO_TIMES) for number in wrong])
    if not found:
        why = most_common(skipped) if skipped else "is it empty or cut off?"
        raise ResultsError(f"{path} holds no usable line: {why}")
    return found, group(skipped)


def _n_index_columns(headings: list[str], cells_of: list[list[str]]) -> int:
    """1 if every line begins with a row number without a heading, as R writes; else 0."""
    lengths = {len(cells) for cells in cells_of if cells != headings}
    if lengths != {len(headings) + 1} or all(not cells[-1] for cells in cells_of):
        return 0
    return 1
