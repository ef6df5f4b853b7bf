"""Draws figures to files: equal tables give equal bytes."""

from __future__ import annotations

import io
import logging
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from harness.errors import HarnessError, first_line
from harness.measure.store import write_atomically
from harness.plot.catalog import Catalog, workers
from harness.plot.figures import Figure, load_figure
from harness.plot.style import drawing_style

if TYPE_CHECKING:
    import pandas as pd

T = TypeVar("T")
_log = logging.getLogger(__name__)

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
        files: the image in the chosen format, and its table as CSV.
    """

    figure: Figure
    table: pd.DataFrame
    shown: pd.DataFrame
    image: bytes
    files: tuple[Path, ...]


def image_bytes(figure: Figure, table: pd.DataFrame, *formats: str) -> list[bytes]:
    """Draw a table once, in memory, as each of the formats."""
    images = []
    with drawing_style(), warnings.catch_warnings():
        # A name in a script that the font lacks has boxes for letters.
        warnings.filterwarnings("ignore", "Glyph .* missing from font")
        from matplotlib.figure import Figure as Canvas

        from harness.plot.rounded_layout import RoundedLayout

        canvas = Canvas(layout=RoundedLayout(w_pad=WIDTH_PAD_IN))
        figure.draw_most(table, canvas)
        for file_format in formats:
            buffer = io.BytesIO()
            canvas.savefig(buffer, format=file_format, dpi=DPI, metadata=METADATA[file_format])
            images.append(buffer.getvalue())
            canvas.set_layout_engine("none")  # found once, it holds for the other formats
    return images


@dataclass
class Timings:
    """Seconds of each part, one after another."""

    seconds: dict[str, float] = field(default_factory=dict)
    _since_s: float = field(default_factory=time.perf_counter)

    def end(self, name: str) -> None:
        """Record the time since the previous part under a name."""
        now_s = time.perf_counter()
        self.seconds[name], self._since_s = now_s - self._since_s, now_s


@dataclass
class Rendered:
    """The drawn figures, and the others as (name, reason).

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
        except HarnessError:
            raise
        except Exception as error:  # whatever ends one figure must not end the others
            _log.debug("%s", name, exc_info=True)
            self.failed.append((name, f"{type(error).__name__}: {first_line(error)}"))
            return None


def render(
    catalog: Catalog, names: Iterable[str], out_dir: Path, file_format: str, timings: Timings
) -> Rendered:
    """Draw the named figures into `out_dir`.

    Raises:
        ResultsError: a file cannot be written.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    rendered = Rendered()
    drawings: list[tuple[Figure, pd.DataFrame, Future[list[bytes]]]] = []
    _import_drawing()
    with workers() as pool:
        for name in names:
            figure = load_figure(name)
            table = rendered.attempt(name, partial(figure.table, catalog))
            timings.end(f"table of {name}")
            if table is None:
                continue
            if table.empty:
                rendered.missing.append((name, f"no data: it needs {figure.needs}"))
                continue
            images = pool.submit(image_bytes, figure, table, "svg", file_format)
            drawings.append((figure, table, images))
        for figure, table, images in drawings:
            finish = partial(_finish, figure, table, images, out_dir, file_format)
            if (drawn := rendered.attempt(figure.name, finish)) is not None:
                rendered.drawn.append(drawn)
            timings.end(figure.name)
    return rendered


def _import_drawing() -> None:
    """Import the drawing libraries once, before workers fork."""
    with drawing_style():
        import matplotlib.backends.backend_agg
        import matplotlib.backends.backend_svg
        import matplotlib.figure  # noqa: F401


def _finish(
    figure: Figure,
    table: pd.DataFrame,
    images: Future[list[bytes]],
    out_dir: Path,
    file_format: str,
) -> Drawn:
    """Write a figure's files when it is drawn."""
    files = (out_dir / f"{figure.name}.{file_format}", out_dir / f"{figure.name}.csv")
    csv = table.to_csv(index=False).encode()
    shown = figure.report_table(table)
    image, written = images.result()
    for path, data in zip(files, (written, csv), strict=True):
        write_atomically(path, data)
    return Drawn(figure=figure, table=table, shown=shown, image=image, files=files)
