"""Mutate valid files as transfers, editors and people may damage them.

`mutate` applies one to three random changes, drawn from the generator that is passed in.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from random import Random
from typing import Any

Change = Callable[[Random, bytes], bytes]

# Replacements of a number or a word.
ODD = [
    b"0", b"-1", b"1e308", b"1e-320", b"1e400", b"1e300", b"1000000000000", b"9" * 300, b"1" * 5000,
    "²".encode(), "١٢".encode(), b"nan", b"inf", b"1_0", b"0x10", b"null", b"true", b"[]", b"{}",
    b'""', b"", b"x", b"x" * 10_000, b"$(id)", b"'", b"\x1b[31m", b"..", b"1,2", b"1;2",
]  # fmt: skip
ODD_VALUES: list[Any] = [
    None, True, -1, 0, 2**31, 2**63, 2**64, 10**12, 10**300, 1e300, 1e-320, -0.0, 1e308, "", "x",
    "²", "0", "\ud7ff", "a\nb", "x" * 10_000, [], {}, [None], {"x": None}, [[]], [0] * 10_000,
]  # fmt: skip
DEPTHS = (1, 50, 2_000, 200_000)
BLANKS = (b" ", b"\t", b"\n", b"\r\n", b",", b"0", b"|", b"[", b"=")
_MOST = 50_000
_WORD = re.compile(rb"[A-Za-z0-9_.+-]+")
_NUMBER = re.compile(rb"[0-9][0-9.eE+-]*")


def _span(random: Random, data: bytes) -> tuple[int, int]:
    start = random.randrange(len(data) + 1)
    return start, min(len(data), start + random.choice((1, 1, 2, 4, 16, 64, 400)))


def _flip(random: Random, data: bytes) -> bytes:
    out = bytearray(data)
    for _ in range(random.randint(1, 4)):
        if out:
            out[random.randrange(len(out))] = random.randrange(256)
    return bytes(out)


def _insert(random: Random, data: bytes) -> bytes:
    at = random.randrange(len(data) + 1)
    return data[:at] + random.choice([random.randbytes(3), *ODD]) + data[at:]


def _remove(random: Random, data: bytes) -> bytes:
    start, stop = _span(random, data)
    return data[:start] + data[stop:]


def _repeat(random: Random, data: bytes) -> bytes:
    start, stop = _span(random, data)
    return data[:stop] + data[start:stop] * random.choice((1, 2, 100, 3000)) + data[stop:]


def _truncate(random: Random, data: bytes) -> bytes:
    return data[: random.randrange(len(data) + 1)]


def _replace(random: Random, data: bytes, pattern: re.Pattern[bytes]) -> bytes:
    found = list(pattern.finditer(data[:_MOST]))
    if not found:
        return _insert(random, data)
    match = random.choice(found)
    return data[: match.start()] + random.choice(ODD) + data[match.end() :]


def _number(random: Random, data: bytes) -> bytes:
    return _replace(random, data, _NUMBER)


def _word(random: Random, data: bytes) -> bytes:
    return _replace(random, data, _WORD)


def _swap(random: Random, data: bytes) -> bytes:
    found = list(_WORD.finditer(data[:_MOST]))
    if len(found) < 2:
        return _flip(random, data)
    a, b = sorted(random.sample(found, 2), key=lambda match: match.start())
    return data[: a.start()] + b[0] + data[a.end() : b.start()] + a[0] + data[b.end() :]


def _lines(random: Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True) or [b""]
    at = random.randrange(len(lines))
    change = random.choice(("double", "move", "remove", "many"))
    line = lines[at]
    if change != "double":
        del lines[at]
    if change in ("double", "move"):
        lines.insert(random.randrange(len(lines) + 1), line)
    elif change == "many":
        lines[at:at] = [line] * min(2000, 1_000_000 // (len(line) + 1))
    return b"".join(lines)


def _fill(random: Random, data: bytes) -> bytes:
    at, size = random.randrange(len(data) + 1), random.choice((10, 1000, 100_000, 1_000_000))
    return data[:at] + random.choice(BLANKS) * size + data[at:]


def _nest(random: Random, data: bytes) -> bytes:
    start, stop = _span(random, data)
    n, (left, right) = random.choice(DEPTHS), random.choice(((b"[", b"]"), (b'{"a":', b"}")))
    return data[:start] + left * n + data[start:stop] + right * n + data[stop:]


def _recode(random: Random, data: bytes) -> bytes:
    text = data.decode("utf-8", errors="replace")
    return random.choice(
        (
            b"\xef\xbb\xbf" + data,
            text.encode("utf-16"),
            text.encode("utf-16-be"),
            data.replace(b"\n", b"\r\n"),
            data.replace(b"\n", b"\r"),
            text.replace(" ", "\u00a0").encode(),
            text.encode("latin-1", errors="replace") + b"\xe9",
            data * 2,
            b"",
            random.randbytes(200),
        )
    )


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON value."""
    keys = list(value) if isinstance(value, dict) else range(len(value))
    found = [(value, key) for key in keys]
    for key in keys:
        if isinstance(value[key], dict | list):
            found += _places(value[key])
    return found


def _json(random: Random, data: bytes) -> bytes:
    """Change a type or value in valid JSON; other files get another change."""
    try:
        value = json.loads(data)
        places = _places(value)
    except (ValueError, TypeError, RecursionError):
        return _number(random, data)
    if not places:
        return _flip(random, data)
    container, key = random.choice(places)
    change = random.choice(("value", "value", "value", "remove", "double", "take", "rename"))
    if change == "remove":
        del container[key]
    elif change == "take":
        other, name = random.choice(places)
        container[key] = json.loads(json.dumps(other.get(name) if isinstance(other, dict) else 7))
    elif change == "double" and isinstance(container, list):
        container.append(container[key])
    elif change in ("double", "rename") and isinstance(container, dict):
        container[random.choice(("x", "", "1", "²", key * 2))] = container.pop(key)
    else:
        container[key] = random.choice(ODD_VALUES)
    return json.dumps(value, ensure_ascii=random.random() < 0.5).encode(errors="replace")


CHANGES: tuple[Change, ...] = (
    _flip, _insert, _remove, _repeat, _truncate, _number, _number, _word, _swap, _lines, _fill,
    _nest, _recode, _json, _json, _json, _json,
)  # fmt: skip


def mutate(random: Random, data: bytes) -> bytes:
    """Apply one to three changes to a file; only simple ones if it has become large."""
    for _ in range(random.choice((1, 1, 2, 3))):
        change = random.choice(CHANGES)
        is_large = len(data) > _MOST and change in (_lines, _json, _recode)
        data = (_flip if is_large else change)(random, data)
    return data
