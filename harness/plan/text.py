"""Tables and shapes as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of an aligned table: numbers right, words left."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    is_number = [all(_starts_a_number(row[i]) for row in rows) for i in range(len(header))]
    lines = [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_number, strict=True)
        ).rstrip()
        for row in cells
    ]
    lines.insert(1, "-" * max(len(line) for line in lines))
    return lines


def _starts_a_number(cell: str) -> bool:
    return cell[:1].isdigit() or cell == "-"


def format_shape(shape: Mapping[str, int]) -> str:
    """A shape in one word: `sample 64 x feature 256`; `-` when unknown."""
    return " x ".join(f"{dim} {size}" for dim, size in shape.items()) or "-"
