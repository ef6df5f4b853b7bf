"""Columns of a per-epoch CSV, found by name, with the unit from name or cell."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterator
from dataclasses import dataclass

from harness.errors import ResultsError
from harness.plot.imports.text import plain, read_number

MIB = 2**20
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
# Parts of an epoch that a computation time excludes.
PARTS = ("communicationtime", "commtime", "dataloadingtime", "datatime", "waittime", "synctime")
_SECONDS = {
    "s": 1.0, "sec": 1.0, "secs": 1.0, "second": 1.0, "seconds": 1.0, "ms": 1e-3, "us": 1e-6,
    "min": 60.0, "mins": 60.0, "minutes": 60.0, "h": 3600.0, "hours": 3600.0,
}  # fmt: skip
# MB of these files is nvidia-smi's: 2**20 bytes.
_BYTES = {
    "b": 1.0, "bytes": 1.0, "kb": 2.0**10, "kib": 2.0**10, "mb": 2.0**20, "mib": 2.0**20,
    "gb": 2.0**30, "gib": 2.0**30,
}  # fmt: skip
_OTHERS = {"c": 1.0, "degc": 1.0, "celsius": 1.0, "%": 1.0, "percent": 1.0, "pct": 1.0}
UNITS = {"duration": _SECONDS, "used": _BYTES, "total": _BYTES,
         "load": _OTHERS, "temperature": _OTHERS}  # fmt: skip
_DEFAULT = {"used": MIB, "total": MIB}
_IN_BRACKETS = re.compile(r"[\[(]([^\[\]()]{1,12})[\])]")
_VALUE = re.compile(r"([+-]?[0-9][0-9.,]{0,30})\s{0,4}(\S{0,10})")
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
            units = UNITS.get(quantity, {})
            scale = units.get(names[index][1], _DEFAULT.get(quantity, 1.0))
            found[quantity] = Column(index, scale)
    if "rank" not in found and "gpu" in found:  # a row for each GPU
        found["rank"] = Column(found["gpu"].index)
    return found


def check_columns(headings: list[str], source: str) -> dict[str, Column]:
    """As `find_columns`.

    Raises:
        ResultsError: rank, epoch or time is missing, or the time covers only a part of the epoch.
    """
    columns = find_columns(headings)
    missing = [name for name in ("rank", "epoch", "duration") if name not in columns]
    if missing:
        raise ResultsError(
            f"{source} has no column {', '.join(missing)} (rank, epoch and computation time are "
            "needed): is it a per-epoch CSV?"
        )
    names = [_canonical(heading)[0] for heading in headings]
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
        if columns.keys() >= {"rank", "epoch", "duration"}:
            return delimiter
    return None


def split(line: str, delimiter: str) -> list[str]:
    """The cells of a line; an unterminated quote includes the rest."""
    if len(line) > csv.field_size_limit():
        return [line]
    reader = csv.reader([line], delimiter=delimiter, skipinitialspace=delimiter != "\t")
    return [cell.strip() for cell in next(reader, [])]


def lines_of(text: str) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, without blank lines, comments and Excel's `sep=;`."""
    for number, raw in enumerate(text.lstrip("\ufeff").splitlines(), start=1):
        line = plain(raw)
        if line.strip() and not line.startswith("#") and not line.lower().startswith("sep="):
            yield number, line


def read_cell(cells: list[str], columns: dict[str, Column], quantity: str) -> float | None:
    """The number of a cell in SI (a load in percent); the cell's unit overrides the heading's."""
    column = columns.get(quantity)
    if column is None or column.index >= len(cells):
        return None
    text = cells[column.index]
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
