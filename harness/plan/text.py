"""Tables and shapes as plain text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of an aligned table: first column left, the others right."""
    cells = [list(header), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = []
    for row in cells:
        first, *others = (
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        lines.append("  ".join([first, *others]).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return lines


def format_shape(shape: Mapping[str, int]) -> str:
    """A shape in one word: `sample 64 x feature 256`; `-` when unknown."""
    return " x ".join(f"{dim} {size}" for dim, size in shape.items()) or "-"
