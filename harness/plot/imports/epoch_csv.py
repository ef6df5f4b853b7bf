"""Per-epoch CSVs: one row per rank and epoch, with the GPU's state at the epoch's end.

    Timestamp,Rank,Epoch,Computation_Time,GPU_ID,GPU_Name,GPU_Load,...,GPU_Used_Mem_MB,...

Columns are found by name, in any order and case; others are ignored. Ranks may come in any order.
MB in these files is nvidia-smi's: 2**20 bytes.
"""

import csv
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from harness.errors import ResultsError
from harness.inputs import find_int, shorten
from harness.plot.imports.runs import group, most_common, plain, read_number

DELIMITERS = ",;\t|"
MOST_CHARACTERS = 16384
# Names of each column without unit; the first that is present counts.
NAMES = {
    "timestamp": ("timestamp", "time", "datetime", "date"),
    "rank": ("rank", "globalrank", "worldrank"),
    "epoch": ("epoch", "epochnumber", "epochid"),
    "duration": (
        "epochtime", "totalepochtime", "totaltime", "epochduration", "duration", "computationtime",
    ),
    "gpu": ("gpuid", "gpuindex", "gpu", "deviceid"),
    "kind": ("gpuname", "gpumodel", "devicename"),
    "load": ("gpuload", "gpuutil", "gpuutilization"),
    "used": ("gpuusedmem", "gpumemused", "gpumemoryused", "gpuusedmemory"),
    "total": ("gputotalmem", "gpumemtotal", "gpumemorytotal", "gputotalmemory"),
    "temperature": ("gputemp", "gputemperature"),
}  # fmt: skip
# The columns that a file needs, as the error writes them.
_NEEDED = {"rank": "Rank", "epoch": "Epoch", "duration": "Epoch_Time"}
# Columns by which rows of training and of validation differ.
PHASES = ("phase", "split", "stage", "mode", "subset")
# Parts of an epoch that a computation time excludes.
PARTS = ("communicationtime", "commtime", "dataloadingtime", "datatime", "waittime", "synctime")
_SECONDS = {
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "msec": 1e-3,
    "milliseconds": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "mins": 60.0, "minutes": 60.0,
    "h": 3600.0, "hr": 3600.0, "hrs": 3600.0, "hours": 3600.0,
}  # fmt: skip
_BYTES = {
    "b": 1.0, "bytes": 1.0, "kb": 2.0**10, "kib": 2.0**10, "mb": 2.0**20, "mib": 2.0**20,
    "gb": 2.0**30, "gib": 2.0**30,
}  # fmt: skip
_OTHERS = {"c": 1.0, "degc": 1.0, "celsius": 1.0, "%": 1.0, "percent": 1.0, "pct": 1.0}
UNITS = {"duration": _SECONDS, "used": _BYTES, "total": _BYTES,
         "load": _OTHERS, "temperature": _OTHERS}  # fmt: skip
_DEFAULT = {"used": 2.0**20, "total": 2.0**20}
_IN_BRACKETS = re.compile(r"[\[(]([^\[\]()]{1,12})[\])]")
_VALUE = re.compile(r"([+-]?[0-9.][0-9.,]{0,30}(?:[eE][+-]?[0-9]{1,3})?)\s{0,4}(\S{0,10})")
# `cuda:0`, `rank 1`
_NUMBERED = re.compile(r"(?:cuda|device|gpu|rank)[ _:-]?(?=[0-9])", re.IGNORECASE)
_CLOCK = re.compile(r"(?:([0-9]{1,4}):)?([0-9]{1,2}):([0-9]{1,2}(?:[.,][0-9]{1,9})?)")


@dataclass(frozen=True)
class Column:
    """The column of a quantity, and the factor to SI units."""

    index: int
    scale: float = 1.0


def _canonical(heading: str) -> tuple[str, str]:
    """Split a heading such as `Computation_Time (ms)` or `GPU_Used_Mem_MB` into name and unit."""
    text = heading.strip().lower()
    unit = ""
    if match := _IN_BRACKETS.search(text):
        unit, text = match[1].strip(" °"), text.replace(match[0], " ")
    words = [word for word in re.split(r"[^a-z0-9%]", text) if word]
    known = _SECONDS.keys() | _BYTES.keys() | _OTHERS.keys()
    if not unit and len(words) > 1 and words[-1] in known:
        unit = words.pop()
    return "".join(words), unit


def find_columns(headings: list[str]) -> dict[str, Column]:
    """The known columns by quantity."""
    found: dict[str, Column] = {}
    names = [_canonical(heading) for heading in headings]
    plain_names = [name for name, _ in names]
    for quantity, candidates in NAMES.items():
        index = next((plain_names.index(name) for name in candidates if name in plain_names), None)
        if index is not None:
            scale = _scale(quantity, names[index][1])
            if scale is not None or quantity == "duration":  # `check_columns` refuses that one
                found[quantity] = Column(index, scale or 1.0)
    if "rank" not in found and "gpu" in found:  # a row for each GPU
        found["rank"] = Column(found["gpu"].index)
    return found


def _scale(quantity: str, unit: str) -> float | None:
    """The factor to SI of a heading's unit; None for an unknown unit of a quantity that has one."""
    units = UNITS.get(quantity, {})
    return units.get(unit) if unit and units else _DEFAULT.get(quantity, 1.0)


def check_columns(headings: list[str], source: str) -> dict[str, Column]:
    """As `find_columns`.

    Raises:
        ResultsError: rank, epoch or time is missing, the time's unit is unknown, or the time covers
            only a part of the epoch.
    """
    columns = find_columns(headings)
    missing = [name for quantity, name in _NEEDED.items() if quantity not in columns]
    if missing:
        known = shorten(", ".join(headings))
        raise ResultsError(
            f"{source} has no column {' and no '.join(missing)}, only {known}: rename or add it, "
            "with cells parted by commas, semicolons or tabs"
        )
    time = headings[columns["duration"].index]
    if _scale("duration", _canonical(time)[1]) is None:
        raise ResultsError(
            f"{source} has a column {shorten(time)}, whose unit is unknown: write s, ms, min or h"
        )
    names = [_canonical(heading)[0] for heading in headings]
    twice = [q for q in _NEEDED if names.count(names[columns[q].index]) > 1]
    if twice:
        name = shorten(headings[columns[twice[0]].index])
        raise ResultsError(f"{source} has the column {name} twice: leave one out")
    parts = [name for name in names if name in PARTS]
    if parts and names[columns["duration"].index] == "computationtime":
        raise ResultsError(
            f"{source} has computation time and {', '.join(parts)}, but no column Epoch_Time with "
            "the whole: add one"
        )
    return columns


def find_delimiter(line: str) -> str | None:
    """The separator of a per-epoch CSV's headings; None for any other line."""
    if len(line) > MOST_CHARACTERS:
        return None
    for delimiter in DELIMITERS:
        columns = find_columns(split(line, delimiter))
        if columns.keys() >= _NEEDED.keys():
            return delimiter
    return None


def split(line: str, delimiter: str) -> list[str]:
    """The cells of a line; an unterminated quote includes the rest."""
    if len(line) > csv.field_size_limit():
        return [line]
    reader = csv.reader([line], delimiter=delimiter, skipinitialspace=delimiter != "\t")
    return [cell.strip() for cell in next(reader, [])]


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without blank lines, Excel's `sep=;` and comments, except headings
    in a comment, as numpy writes them."""
    is_first, comment = True, ""
    for number, raw in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
        line = plain(raw)
        if line.startswith("#"):
            comment = line.lstrip("# ")
        elif line.strip() and not line.lower().startswith("sep="):
            if is_first and find_delimiter(comment) is not None:
                yield number - 1, comment
            is_first = False
            yield number, line


def read_cell(cells: list[str], columns: dict[str, Column], quantity: str) -> float | None:
    """The number of a cell in SI (a load in percent); the cell's unit overrides the heading's."""
    column = columns.get(quantity)
    if column is None or column.index >= len(cells):
        return None
    text = cells[column.index]
    if quantity in ("rank", "gpu"):
        text = _NUMBERED.sub("", text, count=1)
    if quantity == "duration" and (match := _CLOCK.fullmatch(text)):
        hours, minutes, seconds = match.groups()
        return int(hours or 0) * 3600 + int(minutes) * 60 + float(seconds.replace(",", "."))
    match = _VALUE.fullmatch(text)
    value = read_number(match[1], -1e3, 1e15) if match else None
    if match is None or value is None:
        return None
    unit = match[2].lower().strip("°[]()")
    scale = UNITS.get(quantity, {}).get(unit) if unit else column.scale
    return None if scale is None else value * scale


_MOST_RANKS = 16384
_MOST_EPOCHS = 10**7
_MOST_S = 1e9

# The largest accepted rank is _SPARE_RANKS + _MOST_RANKS_PER_RANK x the number of ranks with lines.
_SPARE_RANKS, _MOST_RANKS_PER_RANK = 1000, 10

NO_NUMBER = "rank or epoch is no whole number, or the time no number above 0"
OTHER_PHASE = "a phase other than training"
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
    if not lines:
        raise ResultsError(f"{path} is empty")
    first = lines[0][1]
    delimiter = find_delimiter(first)
    delimiter = delimiter or max(DELIMITERS, key=first.count)
    headings = split(first, delimiter) if len(first) < MOST_CHARACTERS else []
    columns = check_columns(headings, str(path))
    cells_of = [(number, split(line, delimiter)) for number, line in lines[1:]]
    fraction = columns["duration"].index + 1 if delimiter == "," else None
    n_more = _n_index_columns(headings, [cells for _, cells in cells_of], fraction)
    rows: list[tuple[int, EpochRow]] = []
    skipped: list[tuple[int, str]] = []
    is_cut = not text.endswith(("\n", "\r"))
    phase = _phase_column(headings, [cells[n_more:] for _, cells in cells_of])
    for number, all_cells in cells_of:
        cells = all_cells[n_more:]
        if all_cells == headings:
            continue  # a repeated header, because a second training was appended
        while len(cells) > len(headings) and not cells[-1]:
            cells.pop()  # a delimiter ends the line
        if len(cells) != len(headings):
            skipped.append((number, f"{len(cells)} of {len(headings)} columns"))
            continue
        if is_cut and number == lines[-1][0]:
            # The last field of an incomplete line may be truncated and still be a number.
            cells[-1] = ""
        row = _row(cells, columns)
        if phase is not None and not _is_training(cells[phase]):
            skipped.append((number, OTHER_PHASE))
        elif row is None:
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


def _is_training(phase: str) -> bool:
    return phase.lower().startswith("train")


def _phase_column(headings: list[str], cells_of: list[list[str]]) -> int | None:
    """The column that tells rows of training from others; None if there is none."""
    for index, heading in enumerate(headings):
        if _canonical(heading)[0] in PHASES:
            found = {cells[index] for cells in cells_of if len(cells) == len(headings)}
            if any(map(_is_training, found)):
                return index
    return None


def _n_index_columns(headings: list[str], cells_of: list[list[str]], fraction: int | None) -> int:
    """1 if every line begins with a row number without a heading, as R writes; else 0.

    Args:
        fraction: cell of a time's fraction, if a decimal comma divides the time in two cells.
    """
    lines = [cells for cells in cells_of if cells != headings]
    if {len(cells) for cells in lines} != {len(headings) + 1} or not any(c[-1] for c in lines):
        return 0
    numbers = [find_int(cells[0]) for cells in lines]
    first = numbers[0]
    if first is None or numbers != list(range(first, first + len(lines))):
        return 0
    is_divided = fraction is not None and all(find_int(c[fraction]) is not None for c in lines)
    return 0 if is_divided else 1
