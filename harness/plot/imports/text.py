"""Text and numbers of foreign logs: encodings, colours, decimal commas."""

import re
from collections import Counter

from harness.inputs import CODECS, find_number

# Terminal colours and cursor movements; their parameters are short.
_ESCAPE = re.compile("\x1b(?:\\[[0-?]{0,32}[ -/]{0,4}[@-~]|[@-Z\\\\^_])")
_N_NAMED = 3
# A comma groups thousands (1,234.5) or is decimal (1,5); three digits after one are ambiguous.
_DECIMAL_COMMA = re.compile(r"[+-]?[0-9]+,(?:[0-9]{1,2}|[0-9]{4,9})")
_THOUSANDS = re.compile(r"[+-]?[0-9]{1,3}(?:,[0-9]{3}){1,6}\.[0-9]{1,9}")
_THOUSAND_POINTS = re.compile(r"[+-]?[0-9]{1,3}(?:\.[0-9]{3}){1,6},[0-9]{1,9}")


def decode(data: bytes) -> str:
    """Decode UTF-8, or UTF-16 by its mark or zero bytes; a wrong byte affects only its line."""
    for mark, codec in CODECS:
        if data.startswith(mark):
            return data.decode(codec, errors="replace")
    head = data[:4096]
    for at, codec in ((1, "utf-16-le"), (0, "utf-16-be")):
        if head[at::2].count(0) > 0.8 * len(head[at::2]) > 0:
            return data.decode(codec, errors="replace")
    return data.decode("utf-8", errors="replace")


def plain(line: str) -> str:
    """A line without terminal colours."""
    return _ESCAPE.sub("", line) if "\x1b" in line else line


def read_number(text: str, at_least: float = 0.0, at_most: float = 1e12) -> float | None:
    """A number with a decimal point or comma, with groups of thousands if it has both; None for
    any other text, for ambiguous text (`1,234`), and out of bounds."""
    text = text.strip()
    if len(text) > 40:
        return None
    if _DECIMAL_COMMA.fullmatch(text):
        text = text.replace(",", ".")
    elif _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    elif _THOUSAND_POINTS.fullmatch(text):
        text = text.replace(".", "").replace(",", ".")
    return find_number(text, at_least, at_most)


def group(skipped: list[tuple[int, str]]) -> list[str]:
    """One line per reason: its first lines, and the number of others."""
    counts = Counter(reason for _, reason in skipped)
    shown: Counter[str] = Counter()
    problems: dict[tuple[str, int], str] = {}
    for number, reason in skipped:
        shown[reason] += 1
        if shown[reason] <= _N_NAMED:
            problems[reason, shown[reason]] = f"line {number}: {reason}"
    for reason, count in counts.items():
        if count > _N_NAMED:
            problems[reason, 0] = f"{count - _N_NAMED} more lines: {reason}"
    if len(skipped) > _N_NAMED:
        problems["", 0] = f"{len(skipped)} lines were skipped in all"
    return list(problems.values())


def most_common(skipped: list[tuple[int, str]]) -> str:
    """The most common reason of skipping, with its number of lines."""
    (reason, count), *_ = Counter(reason for _, reason in skipped).most_common(1)
    return f"{count} lines: {reason}"
