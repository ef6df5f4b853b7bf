"""CSV tables of others, bounded and checked.

A column of times may be in another unit than asked for: `forward_ms` or `forward (us)` is read as
`forward_s`. A time that is asked for without a unit is in seconds.
"""

import csv
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path

from harness.errors import DataError
from harness.inputs import (
    MOST_COUNT,
    decode_text,
    parse_int,
    parse_number,
    read_file,
    shorten,
)

_MOST_ROWS, _MOST_COLUMNS = 500_000, 1000
_LONGEST_NAME = 200  # of a column, because neither joining nor matching names is linear
UNITS_S = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}
# forward_s, step time (ms); not images_per_s
_TIME = re.compile(rf"(?P<base>.*?)(?<!per)[\s_(\[]+(?P<unit>{'|'.join(UNITS_S)})[)\]]?")
_REMEDY = "leave out the row of a run that failed"
_ALIKE = 0.7  # of two names, of which one may be the other misspelt


class Row:
    """One row of a table, by columns, scaled to their units; of equal names the first counts."""

    def __init__(self, where: str, cells: Mapping[str, str], scales: Mapping[str, float]) -> None:
        self.where, self._cells, self._scales = where, cells, scales

    @property
    def columns(self) -> list[str]:
        return list(self._cells)

    def text(self, column: str) -> str:
        return self._cells[column].strip()

    def count(self, column: str, at_least: int = 1, at_most: int = MOST_COUNT) -> int:
        """A whole number; raises DataError if it is none, or out of bounds."""
        name, text = f"{self.where}: {column}", self._cells[column]
        return parse_int(text, name, at_least=at_least, at_most=at_most, error=DataError)

    def number(self, column: str, remedy: str = "") -> float:
        """A number >= 0; raises DataError as `count`."""
        name = f"{self.where}: {column}"
        value = parse_number(self._cells[column], name, error=DataError, remedy=remedy)
        return value * self._scales.get(column, 1.0)

    def seconds(self, column: str) -> float:
        """A measured time above 0; raises DataError as `count`."""
        value = self.number(column, _REMEDY)
        if value <= 0:
            raise DataError(f"{self.where}: {column} is {value}, not above 0: {_REMEDY}")
        return value


def _header_of(path: Path) -> list[str]:
    """Names of the columns; empty if it is no table that can be read."""
    try:
        with path.open("rb") as file:
            text = decode_text(file.read(4096).split(b"\n")[0], str(path), DataError)
        line = text.partition("\n")[0]  # of a file whose lines end with a carriage return
        return _names(next(csv.reader([line], delimiter=_delimiter(line)), []))
    except (OSError, DataError, csv.Error):
        return []


def _delimiter(line: str) -> str:
    """The character between the cells of a header: a comma, a semicolon or a tab."""
    return max(",;\t", key=line.count)


def find_tables(folder: Path, columns: Sequence[str]) -> list[Path]:
    """CSV files of a directory whose headers have some columns, or most of them."""
    return [p for p in sorted(folder.glob("*.csv")) if 2 * _n_found(p, columns) > len(columns)]


def has_columns(path: Path, columns: Sequence[str]) -> bool:
    """Whether it is a table with all of some columns."""
    return _n_found(path, columns) == len(columns)


def _n_found(path: Path, columns: Sequence[str]) -> int:
    return len({_asked(name, columns)[0] for name in _header_of(path)} & set(columns))


def _asked(name: str, columns: Sequence[str]) -> tuple[str, float]:
    """The column that a name of a header stands for, else the name; the factor from its unit."""
    if len(name) > _LONGEST_NAME:
        return name, 1.0
    time = _TIME.fullmatch(name.lower())
    for column in columns:
        if name.lower() == column.lower():
            return column, 1.0
        asked = _TIME.fullmatch(column.lower())
        base, unit_s = (asked["base"], UNITS_S[asked["unit"]]) if asked else (column.lower(), 1.0)
        if time is not None and time["base"] == base:
            return column, UNITS_S[time["unit"]] / unit_s
    return name, 1.0


def read_tables(folder: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Rows of all these files; raises as `read_table`, also where a file lacks one column."""
    for path in find_tables(folder, columns):
        yield from read_table(path, columns)


def _names(cells: Sequence[str]) -> list[str]:
    """Names of columns; one with commas in brackets, such as `replicas(gpu,x)`, is joined again."""
    found: list[str] = []
    for cell in cells:
        last = found[-1] if found and len(found[-1]) < _LONGEST_NAME else ""
        if last.count("(") > last.count(")"):
            found[-1] += f",{cell.strip()}"
        else:
            found.append(cell.strip())
    return found


def read_table(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> list[Row]:
    """All rows of a CSV file.

    Args:
        columns, optional: that must and may be there, in small or capital letters, and if they
            are times, in any unit.

    Raises:
        DataError: missing, not text, without a column or with one twice, or a row of another
            length.
    """
    lines = _lines_of(path)
    found = [_asked(name, (*columns, *optional)) for name in _names((lines or [[]])[0])]
    header, scales = [name for name, _ in found], dict(reversed(found))
    _check_header(path, header, columns, optional)
    rows = []
    for k, cells in enumerate(lines[1:], 2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise DataError(f"{path}:{k} has {len(cells)} cells, its header {len(header)}")
        row: dict[str, str] = {}
        for name, cell in zip(header, cells, strict=True):
            row.setdefault(name, cell)
        rows.append(Row(f"{path}:{k}", row, scales))
    if not rows:
        raise DataError(f"{path} has no row below its header: add one, or remove the file")
    return rows


def _lines_of(path: Path) -> list[list[str]]:
    text = decode_text(read_file(path, "table", DataError), str(path), DataError)
    if text.lstrip()[:1] in ("{", "["):
        raise DataError(f"{path} is JSON, not a table: write CSV, one row a line")
    first, n_rows = text.partition("\n")[0], text.count("\n")
    delimiter = _delimiter(first)
    if n_rows > _MOST_ROWS or first.count(delimiter) > _MOST_COLUMNS:
        raise DataError(
            f"{path} has {n_rows} rows and {first.count(delimiter)} columns: {_MOST_ROWS} and "
            f"{_MOST_COLUMNS} are the most"
        )
    try:
        return list(csv.reader(io.StringIO(text), strict=True, delimiter=delimiter))
    except csv.Error as error:
        raise DataError(f"{path} is no CSV ({error}): write one row a line") from None


def _check_header(
    path: Path, header: Sequence[str], columns: Sequence[str], optional: Sequence[str]
) -> None:
    lacking = [name for name in columns if name not in header]
    if lacking:
        raise DataError(
            f"{path} has no column {lacking[0]!r}, only {shorten(', '.join(header))}: rename or "
            "add it"
        )
    others = [name for name in header if name not in (*columns, *optional)]
    for name in optional:
        near = get_close_matches(name, others, 1, _ALIKE)
        if name not in header and near:
            raise DataError(f"{path} has a column {near[0]!r}: is it {name!r}? rename or remove it")
    twice = [name for name in (*columns, *optional) if header.count(name) > 1]
    if twice:
        raise DataError(f"{path} has column {twice[0]!r} twice: keep one")
