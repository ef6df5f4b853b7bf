"""Bounded readers of foreign input: files, text, JSON, integers and numbers.

Python's conversions accept too much (`int` digits of every script, `float` nan and infinity) or
raise other exceptions (integers of 5,000 digits, JSON nested a thousand deep). `parse_*` raise an
error that names the input; `find_*` return None, for readers that skip bad input.
"""

from __future__ import annotations

import argparse
import codecs
import contextlib
import errno
import io
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from itertools import dropwhile, pairwise, takewhile
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

from harness.errors import ConfigError, HarnessError

# Floats represent every integer up to it exactly.
MOST_COUNT = 2**53
# Products of three numbers within it are finite, and so is 1 / LEAST_NUMBER.
MOST_NUMBER = 1e30
LEAST_NUMBER = 1e-30
MOST_S = 1e10
MOST_FILE_BYTES = 128 * 2**20

_LONGEST_NUMBER = 40
_LONGEST_SHOWN = 60
_INTEGER = re.compile(r"[+-]?[0-9]+", re.ASCII)
_DIGITS = re.compile(r"([0-9]{1,15})")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)
# Of byte-order marks.
CODECS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)


def shorten(value: object, most: int = _LONGEST_SHOWN) -> str:
    """A value for an error message: quoted, on one line, cut if long."""
    try:
        text = repr(value[: most + 1] if isinstance(value, str | bytes) else value)
    except ValueError:  # an integer of more digits than Python prints
        text = "a number of too many digits"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def one_line(text: str, most: int = 300) -> str:
    """A text without control characters, cut if long."""
    text = text if len(text) <= most else f"{text[: most - 3]}..."
    return "".join(char if char.isprintable() else " " for char in text)


def is_amount(value: float, at_most: float = MOST_NUMBER) -> bool:
    """Whether it is 0, or positive and within the magnitudes for arithmetic."""
    return value == 0 or is_positive(value, at_most)


def is_positive(value: float, at_most: float = MOST_NUMBER) -> bool:
    """As `is_amount`, without 0."""
    return LEAST_NUMBER <= value <= at_most


def find_int(text: str, at_least: int = 0, at_most: int = MOST_COUNT) -> int | None:
    """The integer of ASCII digits, blanks around them allowed; None for any other text, and out
    of bounds."""
    text = text.strip()
    if len(text) > _LONGEST_NUMBER or not _INTEGER.fullmatch(text):
        return None
    value = int(text)
    return value if at_least <= value <= at_most else None


def find_ints(
    texts: Iterable[str], at_least: int = 0, at_most: int = MOST_COUNT
) -> tuple[int, ...] | None:
    """All as by `find_int`; None if it finds none in one of them."""
    found = [find_int(text, at_least, at_most) for text in texts]
    return None if None in found else tuple(number for number in found if number is not None)


def by_number(name: str) -> tuple[tuple[int, str], ...]:
    """A key by which `rank 2` is before `rank 10`."""
    numbers = [(find_int(part), part) for part in _DIGITS.split(name)]
    return tuple((-1, part) if number is None else (number, "") for number, part in numbers)


def find_number(
    text: str, at_least: float = 0.0, at_most: float = MOST_NUMBER, least: float = LEAST_NUMBER
) -> float | None:
    """As `find_int`, for a decimal number; a magnitude below `least` is out of bounds, except 0."""
    text = text.strip()
    if len(text) > _LONGEST_NUMBER or not _NUMBER.fullmatch(text):
        return None
    value = float(text)
    is_zero = value == 0 and not text.lower().partition("e")[0].strip("+-.0")
    is_within = at_least <= value <= at_most and (is_zero or abs(value) >= least)
    return value if is_within else None


def refuse_old_spelling(words: Sequence[str], renamed: Mapping[str, str]) -> None:
    """Refuse a flag by another spelling.

    Args:
        words: words of a command line.
        renamed: spelling here by the old one, or by that of other programs.
    """
    for word in words:
        flag = word.partition("=")[0].replace("_", "-")
        if flag in renamed:
            raise ConfigError(f"{flag} is {renamed[flag]} here: give that")


def refuse_empty(words: Sequence[str]) -> None:
    """Refuse an empty word of a command line, as of a shell's variable that is not set: an empty
    path would be the working directory. Behind `--` is the command line of another program."""
    words = words[: words.index("--")] if "--" in words else words
    for number, (before, word) in enumerate(pairwise(("", *words)), 1):
        if not word or (word.startswith("--") and word.endswith("=")):
            name = word[:-1] or (before if before.startswith("-") else f"argument {number}")
            raise ConfigError(f"{name} has an empty value: give one, or drop it")


_TYROS_WORDS = {
    "Error parsing ": "",
    "Unrecognized options: ": "unknown flags or values: ",
    "Could not find valid parse for arguments:": "these cannot be read:",
    "invalid literal for int() with base 10:": "no whole number:",
    "could not convert string to float:": "no number:",
}
_OF_UNION = re.compile(r"no type matching .* Got errors: .*- <class '\w+'>: ")
_RULE = re.compile(r"\W*[─-]{9}\W*")
_SUGGESTED = re.compile(r"\W {5}(--[\w-]+)")
_MISSING = re.compile(r"\W {5}(\w.*?|-.*?)\W*")


def parse_flags(kind: Any, words: Sequence[str], prog: str, **options: Any) -> Any:
    """Read a dataclass from a command line by tyro, with one line instead of its box of an error.

    No colours, because mpirun gives its ranks a terminal also where its own output is a file.

    Raises:
        ConfigError: tyro refuses the words.
        SystemExit: `--help` has been printed.
    """
    import tyro

    refuse_empty(words)
    tyro._experimental_options["ansi_codes"] = False
    box = io.StringIO()
    try:
        with contextlib.redirect_stderr(box):
            return tyro.cli(kind, args=words, prog=prog, **options)
    except SystemExit as left:
        if not left.code:
            raise
    _, *lines = box.getvalue().splitlines()
    inside = dropwhile(_RULE.fullmatch, lines)  # without UTF-8 the title has a rule below it
    told = list(takewhile(lambda line: not _RULE.fullmatch(line), inside))
    if missing := [found[1] for line in told if (found := _MISSING.fullmatch(line))]:
        told = [f"{' and '.join(missing)} must be given"]
    text = _OF_UNION.sub("", " ".join(line.strip("│ ") for line in told))
    for its, ours in _TYROS_WORDS.items():
        text = text.replace(its, ours)
    near = [found[1] for line in lines if (found := _SUGGESTED.match(line))]
    meant = f": perhaps {' or '.join(near)}" if near and text.startswith("unknown") else ""
    raise ConfigError(f"{text.rstrip('.')}{meant}; see {prog} --help")


class CommandParser(argparse.ArgumentParser):
    """Raises its errors, which `errors.run_command` prints as one line, without the usage."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, without empty words."""
        refuse_empty(sys.argv[1:] if args is None else args)
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Refuse the command line."""
        raise ConfigError(f"{message}; see {self.prog} --help")


def parse_int(
    text: str,
    name: str,
    *,
    at_least: int = 0,
    at_most: int = MOST_COUNT,
    error: type[HarnessError] = ConfigError,
    remedy: str = "",
) -> int:
    """Read an integer.

    Args:
        name: location and name for the error: `hosts.txt:3: slots`.
        remedy: advice for the error, if better than the bounds.

    Raises:
        HarnessError: `error`; no integer in ASCII digits, or out of bounds.
    """
    value = find_int(text, at_least, at_most)
    if value is None:
        raise error(
            f"{name} is {shorten(text)}: write a whole number from {at_least} to {at_most}"
            + (f"; {remedy}" if remedy else "")
        )
    return value


def parse_number(
    text: str,
    name: str,
    *,
    at_most: float = MOST_NUMBER,
    error: type[HarnessError] = ConfigError,
    remedy: str = "",
) -> float:
    """As `parse_int`, for a decimal number from 0."""
    value = find_number(text, at_most=at_most)
    if value is None:
        raise error(
            f"{name} is {shorten(text)}: write a number from 0 to {at_most:g}"
            + (f"; {remedy}" if remedy else "")
        )
    return value


def parse_json(text: str | bytes, name: str, error: type[HarnessError] = ConfigError) -> Any:
    """Read JSON whose numbers are within bounds (see `harness.domain.files.decode` for a type).

    Raises:
        HarnessError: `error`; no JSON, nested too deep, or a number that is not finite.
    """
    try:
        return json.loads(
            text, parse_int=_json_int, parse_float=_json_number, parse_constant=_json_number
        )
    except RecursionError:
        reason = "it is nested too deep"
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except ValueError as problem:
        reason = str(problem)
    raise error(f"{name} is not JSON that can be read ({reason}): {shorten(text)}")


def _json_int(text: str) -> int:
    value = find_int(text, -(2**64), 2**64)
    if value is None:
        raise ValueError(f"integer {shorten(text)} is out of range")
    return value


def _json_number(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"number {shorten(text)} is not finite")
    return value


def open_regular(path: Path) -> BinaryIO:
    """Open a file for reading; refuse a pipe or a device, because reading it may block for ever.

    Raises:
        OSError: it is not a regular file, or cannot be opened.
    """
    if path.exists() and not path.is_file():
        code = errno.EISDIR if path.is_dir() else errno.EINVAL
        raise OSError(code, os.strerror(code) if code == errno.EISDIR else "Not a regular file")
    return path.open("rb")


def read_file(
    path: Path,
    kind: str,
    error: type[HarnessError] = ConfigError,
    at_most: int = MOST_FILE_BYTES,
    *,
    is_given: bool = False,
) -> bytes:
    """Read a file of a kind, such as `graph file`.

    Args:
        is_given: a flag names it, so that it may be a pipe, such as `<(...)`.

    Raises:
        HarnessError: `error`; missing, not readable, or too large; names the path.
    """
    try:
        with path.open("rb") if is_given else open_regular(path) as file:
            data = file.read(at_most + 1)
    except (OSError, ValueError) as problem:  # a NUL in the path is a ValueError
        reason = getattr(problem, "strerror", None) or str(problem)
        raise error(f"{kind} {one_line(str(path))}: {reason}: name one that can be read") from None
    if len(data) > at_most:
        raise error(f"{kind} {path} has more than {at_most // 2**20} MiB: it is no {kind}")
    return data


def decode_text(data: bytes, source: str, error: type[HarnessError] = ConfigError) -> str:
    """Decode UTF-8, or the encoding of a byte-order mark, which is dropped; every line ends with a
    newline.

    Raises:
        HarnessError: `error`; it is not text.
    """
    codec = next((codec for mark, codec in CODECS if data.startswith(mark)), "utf-8")
    try:
        text = data.decode(codec)
    except UnicodeDecodeError as problem:
        raise error(
            f"{source} is not UTF-8 at byte {problem.start}: save it as UTF-8 text"
        ) from None
    return text.replace("\r\n", "\n").replace("\r", "\n")
