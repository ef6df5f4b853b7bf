"""Tables and shapes as plain text, for the terminal."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps

from harness.measure.statistics import CONFIDENCE, Summary
from harness.measure.store import Run
from harness.units import format_duration

_WIDEST_RULE = 100


def columns(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Align rows under their heads, to the left, without columns that have `-` in every row; empty
    without rows."""
    if not rows:
        return ""
    shown = [i for i in range(len(heads)) if any(row[i] != "-" for row in rows)]
    cells = [[row[i] for i in shown] for row in (heads, *rows)]
    return "\n".join(_align(cells, [False] * len(shown)))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a table with a rule under its header; numbers align right, words left."""
    is_number = [
        all(row[i][:1].isdigit() or row[i] == "-" for row in rows) for i in range(len(header))
    ]
    lines = _align([header, *rows], is_number)
    lines.insert(1, "-" * min(_WIDEST_RULE, max(len(line) for line in lines)))
    return lines


def for_each_run(parts: Callable[[Run], Iterable[str]]) -> Callable[[Sequence[Run]], str]:
    """Show the parts of each run that are not empty, one after another; a failed run as a line."""

    @wraps(parts)
    def text(runs: Sequence[Run]) -> str:
        found: list[str] = []
        for run in runs:
            header = run.header
            if header.status == "ok":
                found += filter(None, parts(run))
            else:
                found.append(f"{header.config.get('model', header.run_id)}: {header.ending}")
        return "\n\n".join(found)

    return text


def _align(rows: Sequence[Sequence[str]], is_right: Sequence[bool]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(is_right))]
    return [
        "  ".join(
            cell.rjust(width) if right else cell.ljust(width)
            for cell, width, right in zip(row, widths, is_right, strict=True)
        ).rstrip()
        for row in rows
    ]


def interval_words(durations: Summary) -> str:
    """The interval of some durations in words; says if it is only their range, or one value."""
    return _ends_in_words(
        durations, format_duration(durations.low), format_duration(durations.high)
    )


def rate_interval_words(durations: Summary, work: float, show: Callable[[float], str]) -> str:
    """The interval of the rate at which some durations do work, as `interval_words`."""
    return _ends_in_words(durations, show(work / durations.high), show(work / durations.low))


def _ends_in_words(durations: Summary, low: str, high: str) -> str:
    if durations.n == 1:
        return "1 value"
    words = f"{low} to {high}"
    return words if durations.coverage >= CONFIDENCE else f"{words} (range)"


def noise_texts(timed: Mapping[str, Iterable[tuple[str, Summary]]]) -> list[str]:
    """One line for each kind of measurement whose samples vary; names the worst.

    Args:
        timed: names and times by the word for the kind, such as "products".
    """
    lines = []
    for kind, rows in timed.items():
        every = list(rows)
        noisy = [(name, time) for name, time in every if time.noise]
        if noisy:
            name, worst = max(noisy, key=lambda row: row[1].cv)
            lines.append(
                f"samples of {len(noisy)} of {len(every)} {kind} vary (most: {name}, "
                f"{', '.join(worst.noise)}): end other work and measure again"
            )
    return lines


def format_shape(shape: Mapping[str, int]) -> str:
    """A shape as text: `sample 64 x feature 256`; `-` when unknown."""
    return " x ".join(f"{dim} {size}" for dim, size in shape.items()) or "-"


def cell(value: float | None, show: Callable[[float], str] | str) -> str:
    """A number as text, `-` when unknown.

    Args:
        show: a function, or a format such as `.0%`.
    """
    if value is None:
        return "-"
    return format(value, show) if isinstance(show, str) else show(value)
