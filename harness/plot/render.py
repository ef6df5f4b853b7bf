"""Draws figures to files: equal tables give equal bytes."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.measure.store import write_atomically
from harness.plot.catalog import Catalog
from harness.plot.figure import Figure
from harness.plot.figures import load_figure
from harness.plot.style import drawing_style

if TYPE_CHECKING:
    import pandas as pd

FORMATS = ("png", "svg", "pdf")
# Without these, files carry the time and the version of the library that drew them.
METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
}
DPI = 150
# A layout is found once, for one format; letters are wider by a per cent or two in another.
WIDTH_PAD_IN = 0.1


@dataclass(frozen=True, kw_only=True)
class Drawn:
    """A figure that was drawn.

    Attributes:
        image: the figure as SVG, for the report.
        files: what was written: the image in the chosen format, and its table as CSV.
    """

    figure: Figure
    table: pd.DataFrame
    image: bytes
    files: tuple[Path, ...]


def image_bytes(figure: Figure, table: pd.DataFrame, *formats: str) -> list[bytes]:
    """Draw a table once, in memory, as each of the formats."""
    images = []
    with drawing_style():
        from matplotlib.figure import Figure as Canvas
        from matplotlib.layout_engine import ConstrainedLayoutEngine

        canvas = Canvas(layout=ConstrainedLayoutEngine(w_pad=WIDTH_PAD_IN))
        figure.draw(table, canvas)
        for file_format in formats:
            buffer = io.BytesIO()
            canvas.savefig(buffer, format=file_format, dpi=DPI, metadata=METADATA[file_format])
            images.append(buffer.getvalue())
            canvas.set_layout_engine("none")  # found once, it holds for the other formats
    return images


def render(
    catalog: Catalog, names: Iterable[str], out_dir: Path, file_format: str
) -> tuple[list[Drawn], list[tuple[str, str]]]:
    """Draw the named figures into `out_dir`; returns those, and (name, reason) of the rest."""
    out_dir.mkdir(parents=True, exist_ok=True)
    drawn: list[Drawn] = []
    skipped: list[tuple[str, str]] = []
    for name in names:
        figure = load_figure(name)
        table = figure.table(catalog)
        if table.empty:
            skipped.append((name, f"no data: it needs {figure.needs}"))
            continue
        image_path = out_dir / f"{name}.{file_format}"
        table_path = out_dir / f"{name}.csv"
        image, written = image_bytes(figure, table, "svg", file_format)
        write_atomically(image_path, written)
        write_atomically(table_path, table.to_csv(index=False).encode())
        files = (image_path, table_path)
        drawn.append(Drawn(figure=figure, table=table, image=image, files=files))
    return drawn, skipped
