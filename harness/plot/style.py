"""How figures look: one palette that colour-blind readers can tell apart, one set of sizes.

Colours are Okabe and Ito's (Color Universal Design), darkened where white is the background.
"""

from __future__ import annotations

import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, cast

from harness.domain.run import STATUS_WORDS
from harness.inputs import by_number

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from matplotlib.axes import Axes as Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation
    from matplotlib.transforms import BboxBase

    Canvas = Figure
else:  # for annotations: matplotlib is imported when a figure is drawn
    Axes = Canvas = Any

WIDTH_IN = 9.0
LEGEND_ROW_IN = 0.17
# Of a legend's entry: its marker with the space around, and a letter.
_ENTRY_IN, _LETTER_IN = 0.5, 0.058
# Of a bar's label: a line; of a panel: its height beside the bars.
_LINE_IN, _PANEL_EXTRA_IN = 0.135, 1.1
FAILED = "#B00020"
MUTED = "#6B7280"
LIMIT = "#111111"

STRATEGIES = {
    "single": "#5F6368",
    "ddp": "#0072B2",
    "pipeline": "#D55E00",
    "searched": "#009E73",
    "tensor": "#CC79A7",
    "hybrid": "#E69F00",
    "fsdp": "#56B4E9",
    "deepspeed": "#7A5195",
    "executor-single": "#9AA0A6",
    "executor-ddp": "#003F63",
    "summa": "#843C39",
}
# Of strategies that go by a name of their own, such as a file's.
OTHER_STRATEGIES = ("#8C6D31", "#A55194", "#6B6ECF", "#637939", "#AD494A", "#393B79")
# How much lighter, or darker, those are that differ from one of STRATEGIES by a schedule or so.
SHADES = (-0.45, -0.3, -0.15, 0.2, 0.35, 0.5, 0.62)
PHASE_COLOURS = {
    "data": "#B8BCC2",
    "host_to_device": "#E6C229",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "compute": "#004B75",
    "exposed_communication": "#D55E00",
    "optimizer": "#009E73",
    "other": "#E9EAEC",
}
# Colour of each kind of span; communication has one colour, exposed or hidden.
KIND_COLOURS = PHASE_COLOURS | {
    "communication": PHASE_COLOURS["exposed_communication"],
    "recompute": "#CC79A7",
}
LONGEST_TITLE, LONGEST_ENTRY = 60, 120  # letters above a panel of bars, and in a legend
MAX_FAILURES = 10  # that are listed below a figure
FEWEST = 8  # values that a 99 % interval of the median needs
SERIES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#5F6368", "#7A5195")
DOMAIN = re.compile(r"\.[A-Za-z][^:]*")  # up to a rank, and none of an address
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "text.parse_math": False,  # names from results are text, `$` included
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#9AA0A6",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E7EB",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "lines.linewidth": 1.6,
    "lines.markersize": 4.5,
    "svg.hashsalt": "harness",  # equal input, equal bytes
    "figure.facecolor": "white",
}


@contextmanager
def drawing_style() -> Iterator[None]:
    """Apply the style for a while; matplotlib is imported here and not before."""
    os.environ["MPLBACKEND"] = "agg"  # figures are files; an unknown backend fails the import
    import matplotlib as mpl

    with mpl.rc_context(RC):
        yield


def colour_of(strategy: str) -> str:
    """A strategy's colour, the same in all figures; `pipeline-gpipe` has a shade of `pipeline`'s,
    and unknown names get a fixed one as well."""
    if strategy in STRATEGIES:
        return STRATEGIES[strategy]
    for name, colour in STRATEGIES.items():
        if strategy.startswith((f"{name}_", f"{name}-")):
            return _shade(colour, strategy.removeprefix(name))
    colour = OTHER_STRATEGIES[zlib.crc32(strategy.encode()) % len(OTHER_STRATEGIES)]
    return _shade(colour, strategy[::-1])


def _shade(colour: str, variant: str) -> str:
    amount = SHADES[zlib.crc32(variant.encode()) % len(SHADES)]
    end = 255 if amount > 0 else 0
    channels = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
    return "#" + "".join(f"{round(c + (end - c) * abs(amount)):02X}" for c in channels)


def series_style(names: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of each name, by its place in the sorted names; no two are equal."""
    return {
        name: (SERIES[i % len(SERIES)], MARKERS[(i + i // len(SERIES)) % len(MARKERS)])
        for i, name in enumerate(sorted(set(names), key=by_number))
    }


def status_words(status: str, reason: str = "") -> str:
    """The text in place of the number of a row that is not ok."""
    words = STATUS_WORDS.get(status, status)
    reason = reason.strip().partition("\n")[0]
    return f"{words} ({shorten(reason, 60)})" if reason else words


def shorten(text: str, limit: int) -> str:
    """Cut a text that is too long for its place."""
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def short_hosts(hosts: Iterable[str], limit: int) -> list[str]:
    """Hosts without their domains, and of long ones the end, which tells them apart."""
    own = (DOMAIN.sub("", host) for host in hosts)
    return [host if len(host) <= limit else f"…{host[1 - limit :]}" for host in own]


def wrap_label(text: str, limit: int = 44) -> str:
    """Break a label at its separators into lines of about `limit` characters, and a longer part of
    it at its commas."""
    lines = [""]
    for part in text.split(" · "):
        is_long, separator = len(part) > limit + 4, " · "
        for word in part.split(", ") if is_long else [part]:
            joined = f"{lines[-1]}{separator}{word}" if lines[-1] else word
            if len(joined) <= limit or not lines[-1]:
                lines[-1] = joined
            else:
                lines.append(word)
            separator = ", "
    return "\n".join(shorten(line, limit + 4) for line in lines)


def spread_caption(marks: str) -> str:
    """Explain whiskers or shades in a caption."""
    return (
        f"{marks} are 99 % intervals of the median, over repeats if there are several; fewer than "
        f"{FEWEST} values show their range."
    )


def range_words(n_values: float) -> str:
    """The text next to a whisker that is a range; empty for an interval."""
    if n_values >= FEWEST:
        return ""
    return f" (range of {n_values:.0f})" if n_values > 1 else " (1 value)"


def rank_words(ranks: Sequence[int]) -> str:
    """`0-2` for consecutive ascending ranks, else a list."""
    if len(ranks) > 1 and ranks[-1] - ranks[0] == len(ranks) - 1:
        return f"{ranks[0]}-{ranks[-1]}"
    return ", ".join(str(rank) for rank in ranks)


def mark_failed(axes: Axes, y: float, status: str, reason: str) -> None:
    """Write the reason in place of a missing bar; a run that is ok has not measured it."""
    is_ok = status == "ok"
    write_beside(
        axes,
        reason if is_ok else f"✕ {status_words(status, reason)}",
        0,
        y,
        xycoords=axes.get_yaxis_transform(),  # from the left edge, wherever zero is
        color=MUTED if is_ok else FAILED,
    )


def note_failures(canvas: Canvas, table: pd.DataFrame) -> None:
    """List below a figure the rows that are not ok."""
    failed = table[table["status"] != "ok"]
    lines = [
        f"✕ {shorten(str(row['label']), 60)}: {status_words(row['status'], row['reason'])}"
        for _, row in failed.drop_duplicates(["label", "status", "reason"]).iterrows()
    ]
    if len(lines) > MAX_FAILURES:
        n_more = len(lines) - MAX_FAILURES
        lines = [*lines[:MAX_FAILURES], f"and {n_more} more that are not ok"]
    if lines:
        canvas.supxlabel("\n".join(lines), fontsize=8, color=FAILED, ha="left", x=0.01)
        canvas.set_figheight(canvas.get_figheight() + len(lines) * _LINE_IN)


def note_cut(canvas: Canvas, n_shown: int, n_all: int, things: str) -> None:
    """Say above a figure that it leaves some out, unless it says so already."""
    if n_all > n_shown and not canvas.get_suptitle():
        words = f"{n_shown} of {n_all} {things}; all are in the table"
        if canvas.legends:  # which a title of the figure would cover
            canvas.legends[0].set_title(words)
            canvas.set_figheight(canvas.get_figheight() + LEGEND_ROW_IN)
        else:
            canvas.suptitle(words)


def _make_room(axes: Axes, rows_in: float) -> None:
    """Make a panel taller, and its figure with it, where its rows need more height."""
    canvas, place = axes.get_figure(root=True), axes.get_subplotspec()
    if canvas is None or place is None:
        return
    grid, row = place.get_gridspec(), place.rowspan.start
    ratios: list[float] = list(cast(Any, grid.get_height_ratios()))
    height_in = canvas.get_figheight()
    lacking_in = rows_in + _PANEL_EXTRA_IN - height_in * ratios[row] / sum(ratios)
    if lacking_in > 0:
        heights = [height_in * ratio / sum(ratios) for ratio in ratios]
        heights[row] += lacking_in
        grid.set_height_ratios(heights)
        canvas.set_figheight(sum(heights))


def draw_bar_panels(
    canvas: Canvas,
    groups: Iterable[tuple[Any, pd.DataFrame]],
    draw: Callable[[Axes, str, pd.DataFrame], None],
    *,
    bars: Sequence[str] = (),
    row_in: float = 0.42,
    extra_in: float = 1.1,
) -> list[Axes]:
    """Draw each group of a table's rows into a panel of its own, as tall as its bars need.

    Args:
        bars: columns with a bar for each of their values; empty for a bar for each row.
    """
    named = list(groups)
    sizes = [rows.groupby(list(bars)).ngroups if bars else len(rows) for _, rows in named]
    heights = [max(1, n) * row_in + extra_in for n in sizes]
    canvas.set_size_inches(WIDTH_IN, sum(heights) + 0.3)
    panels = canvas.subplots(len(sizes), 1, squeeze=False, height_ratios=heights)[:, 0]
    for axes, (name, rows) in zip(panels, named, strict=True):
        axes.set_title(shorten(str(name), LONGEST_TITLE))
        draw(axes, str(name), rows)
    return list(panels)


def draw_bar(
    axes: Axes, value: float, y: float, interval: tuple[float, float], **looks: Any
) -> None:
    """A horizontal bar with a whisker."""
    axes.barh(y, value, **looks)
    errors = [[value - interval[0]], [interval[1] - value]]
    axes.errorbar(value, y, xerr=errors, color=LIMIT, capsize=3, linewidth=1)


def stack_bars(axes: Axes, parts: Iterable[tuple[str, str, np.ndarray]], **looks: Any) -> None:
    """Horizontal bars of parts, each with its words, its colour and its width in every bar."""
    left: Any = 0.0
    for words, colour, widths in parts:
        axes.barh(range(len(widths)), widths, left=left, color=colour, label=words, **looks)
        left = left + widths


def write_beside(
    axes: Axes, words: str, x: float, y: float, *, gap: int = 5, size: float = 8, **looks: Any
) -> None:
    """Write words at the right of a point, such as the end of a bar."""
    place: dict[str, Any] = {"xytext": (gap, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(words, (x, y), fontsize=size, **place, **looks)


def move_clear(note: Annotation, taken: list[BboxBase], step_pt: float) -> None:
    """Move a note up by steps until it covers none of the places taken, and take its place.

    Args:
        step_pt: negative: down.
    """
    while any(note.get_window_extent().overlaps(place) for place in taken):
        x, y = note.xyann
        note.xyann = (x, y + step_pt)
    taken.append(note.get_window_extent())


def mark_bar(axes: Axes, x: float, y: float, words: str = "", *, half: float = 0.42) -> None:
    """A black mark across a bar; `words` are its entry of the legend."""
    axes.plot([x] * 2, [y - half, y + half], color=LIMIT, linewidth=2, label=words or None)


def grid_panels(canvas: Canvas, n: int, *, height_in: float) -> list[Axes]:
    """`n` equal panels in rows of two; the rest of the last row stays empty."""
    columns = min(n, 2)
    rows = math.ceil(n / columns)
    canvas.set_size_inches(WIDTH_IN, rows * height_in + 0.4)
    panels = list(canvas.subplots(rows, columns, squeeze=False).flat)
    for unused in panels[n:]:
        unused.set_axis_off()
    return panels[:n]


def joint_legend(canvas: Canvas, panels: Iterable[Axes], *, n_columns: int) -> None:
    """One legend above all panels, with each entry of any of them once; in fewer columns where its
    words are long."""
    entries = {
        words: handle
        for axes in panels
        for handle, words in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    longest_in = _ENTRY_IN + _LETTER_IN * max(map(len, entries), default=0)
    n_columns = max(1, min(n_columns, len(entries), int(WIDTH_IN / longest_in)))
    n_more = math.ceil(len(entries) / n_columns) - 1
    canvas.set_figheight(canvas.get_figheight() + n_more * LEGEND_ROW_IN)
    names = [shorten(words, LONGEST_ENTRY) for words in entries]
    canvas.legend(list(entries.values()), names, loc="outside upper center", ncols=n_columns)


def flops_unit(flops_per_s: float) -> tuple[float, str]:
    """Scale and unit in which the largest of some rates reads well."""
    return (1e-12, "TFLOP/s") if flops_per_s >= 1e12 else (1e-9, "GFLOP/s")


def time_unit(duration_s: float) -> tuple[float, str]:
    """Scale and unit in which the longest of some durations reads well."""
    if duration_s >= 2:
        return 1.0, "s"
    return (1e3, "ms") if duration_s >= 2e-3 else (1e6, "µs")


def plain_log_axis(axes: Axes, which: Literal["x", "y"]) -> None:
    """A logarithmic axis with plain numbers at 1, 2 and 5 of every decade."""
    import numpy as np
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axis = axes.xaxis if which == "x" else axes.yaxis
    (axes.set_xscale if which == "x" else axes.set_yscale)("log")
    axis.set_major_locator(LogLocator(base=10, subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda x, _: np.format_float_positional(x, 6, trim="-")))


def label_bars(axes: Axes, labels: Sequence[str]) -> None:
    """Name horizontal bars from the top down, and end the axis at them."""
    wrapped = [wrap_label(label) for label in labels]
    _make_room(axes, len(labels) * (max(text.count("\n") for text in wrapped) + 1.5) * _LINE_IN)
    axes.set_yticks(range(len(labels)), wrapped, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0)
