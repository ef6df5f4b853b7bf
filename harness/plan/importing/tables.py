"""CSV tables of others, bounded and checked."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from harness.errors import DataError
from harness.inputs import decode_text, parse_int, parse_number, read_file, shorten

_MOST_ROWS = 1_000_000


class Row:
    """One row of a table, by the names of its columns; of equal names the first counts."""

    def __init__(self, where: str, cells: Mapping[str, str]) -> None:
        self.where, self._cells = where, cells

    @property
    def columns(self) -> list[str]:
        return list(self._cells)

    def text(self, column: str) -> str:
        return self._cells[column].strip()

    def count(self, column: str, at_least: int = 1) -> int:
        """A whole number.

        Raises:
            DataError: it is none, or below `at_least`.
        """
        name = f"{self.where}: {column}"
        return parse_int(self._cells[column], name, at_least=at_least, error=DataError)

    def number(self, column: str) -> float:
        """A number >= 0; raises DataError as `count`."""
        return parse_number(self._cells[column], f"{self.where}: {column}", error=DataError)

    def seconds(self, column: str) -> float:
        """A time above 0; raises DataError as `count`."""
        value = self.number(column)
        if value <= 0:
            raise DataError(f"{self.where}: {column} is {value}: a time must be above 0")
        return value


def header_of(path: Path) -> list[str]:
    """Names of the columns; empty if it is no table that can be read."""
    try:
        with path.open("rb") as file:
            line = decode_text(file.read(4096).split(b"\n")[0], str(path), DataError)
    except (OSError, DataError):
        return []
    return _names(next(csv.reader([line], delimiter=_delimiter(line)), []))


def _delimiter(line: str) -> str:
    """What parts the cells of a header: a comma, a semicolon or a tab."""
    return max(",;\t", key=line.count)


def find_tables(folder: Path, columns: Sequence[str]) -> list[Path]:
    """CSV files of a directory whose headers have some columns, or most of them."""
    return [p for p in sorted(folder.glob("*.csv")) if _has_most(p, columns)]


def _has_most(path: Path, columns: Sequence[str]) -> bool:
    header = {name.lower() for name in header_of(path)}
    return 2 * sum(name.lower() in header for name in columns) > len(columns)


def read_tables(folder: Path, columns: Sequence[str]) -> Iterator[Row]:
    """Rows of all these files; raises as `read_table`, also where a file lacks one column."""
    for path in find_tables(folder, columns):
        yield from read_table(path, columns)


def _names(cells: Sequence[str]) -> list[str]:
    """Names of columns; one with commas in brackets, such as `replicas(gpu,x)`, is joined again."""
    found: list[str] = []
    for cell in cells:
        if found and found[-1].count("(") > found[-1].count(")"):
            found[-1] += f",{cell.strip()}"
        else:
            found.append(cell.strip())
    return found


def read_table(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> list[Row]:
    """All rows of a CSV file.

    Args:
        columns, optional: that must and may be there, in small or capital letters.

    Raises:
        DataError: missing, not text, without a column, or a row of another length.
    """
    text = decode_text(read_file(path, "table", DataError), str(path), DataError)
    try:
        delimiter = _delimiter(text.partition("\n")[0])
        lines = list(csv.reader(io.StringIO(text), strict=True, delimiter=delimiter))
    except csv.Error as error:
        raise DataError(f"{path} is no CSV ({error}): write one row a line") from None
    names = {name.lower(): name for name in (*columns, *optional)}
    header = [names.get(name.lower(), name) for name in _names((lines or [[]])[0])]
    lacking = [name for name in columns if name not in header]
    if lacking:
        raise DataError(
            f"{path} has no column {lacking[0]!r}, only {shorten(', '.join(header))}: rename or "
            "add it"
        )
    if len(lines) > _MOST_ROWS:
        raise DataError(f"{path} has {len(lines)} rows: {_MOST_ROWS} are the most")
    rows = []
    for k, cells in enumerate(lines[1:], 2):
        if not any(cell.strip() for cell in cells):
            continue
        if len(cells) != len(header):
            raise DataError(f"{path}:{k} has {len(cells)} cells, its header {len(header)}")
        rows.append(Row(f"{path}:{k}", dict(reversed(list(zip(header, cells, strict=True))))))
    if not rows:
        raise DataError(f"{path} has no row below its header")
    return rows
