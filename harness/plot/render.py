"""Draws figures to files: equal tables give equal bytes."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness.errors import ConfigError, first_line
from harness.measure.store import write_atomically
from harness.plot.catalog import Catalog
from harness.plot.figure import Figure
from harness.plot.figures import load_figure
from harness.plot.style import drawing_style

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
_log = logging.getLogger(__name__)

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
        shown: the table as the report has it.
        image: the figure as SVG, for the report.
        files: what was written: the image in the chosen format, and its table as CSV.
    """

    figure: Figure
    table: pd.DataFrame
    shown: pd.DataFrame
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


@dataclass
class Rendered:
    """What became of the figures; those that were not drawn as (name, reason).

    Attributes:
        missing: figures without data.
        failed: figures, or parts of the report, that could not be made from the data that is there.
    """

    drawn: list[Drawn] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    failed: list[tuple[str, str]] = field(default_factory=list)

    def attempt(self, name: str, make: Callable[[], T]) -> T | None:
        """Make one part; where that fails, it is named among `failed` and the others go on."""
        try:
            return make()
        except ConfigError:
            raise
        except Exception as error:  # whatever ends one figure must not end the others
            _log.debug("%s", name, exc_info=True)
            self.failed.append((name, f"{type(error).__name__}: {first_line(error)}"))
            return None


def render(catalog: Catalog, names: Iterable[str], out_dir: Path, file_format: str) -> Rendered:
    """Draw the named figures into `out_dir`.

    Raises:
        ConfigError: a file cannot be written.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    rendered = Rendered()
    for name in names:
        drawn = rendered.attempt(name, partial(_draw, name, catalog, out_dir, file_format))
        if isinstance(drawn, Drawn):
            rendered.drawn.append(drawn)
        elif drawn is not None:
            rendered.missing.append((name, drawn))
    return rendered


def _draw(name: str, catalog: Catalog, out_dir: Path, file_format: str) -> Drawn | str:
    """Draw one figure and write its files; the reason, where there is nothing to draw."""
    figure = load_figure(name)
    table = figure.table(catalog)
    if table.empty:
        return f"no data: it needs {figure.needs}"
    files = (out_dir / f"{name}.{file_format}", out_dir / f"{name}.csv")
    image, written = image_bytes(figure, table, "svg", file_format)
    for path, data in zip(files, (written, table.to_csv(index=False).encode()), strict=True):
        write_whole(path, data)
    shown = figure.report_table(table)
    return Drawn(figure=figure, table=table, shown=shown, image=image, files=files)


def write_whole(path: Path, data: bytes) -> None:
    """Replace a file whole.

    Raises:
        ConfigError: it cannot be written.
    """
    try:
        write_atomically(path, data)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written ({error.strerror}): make room, or give another --out"
        ) from None
