"""Print the flags and variables that give uv the package sources of pip's configuration.

uv does not read pip's configuration. Reads `pip config list` on standard input; prints one flag or
NAME=VALUE per line. Sources are variables: they may hold passwords, and all users see arguments.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable

# uv's variable and its separator by pip's setting; None: uv accepts only one value.
_VARIABLES = {
    "find-links": ("UV_FIND_LINKS", ","),
    "index-url": ("UV_DEFAULT_INDEX", None),
    "extra-index-url": ("UV_INDEX", " "),
}


def parse(lines: Iterable[str]) -> dict[str, list[str]]:
    """Read lines `scope.key='value'` into distinct values by key, in order.

    Skips other lines, because pip may also print messages.
    """
    settings: dict[str, list[str]] = {}
    for line in lines:
        name, separator, quoted = line.strip().partition("=")
        try:
            value = ast.literal_eval(quoted) if separator else ""
        except (SyntaxError, ValueError):
            continue
        known = settings.setdefault(name.rpartition(".")[2], [])
        known.extend(word for word in str(value).split() if word not in known)
    return settings


def flags(settings: dict[str, list[str]]) -> list[str]:
    """The uv flags for pip's settings.

    By default uv takes a package from the first index that has it, whereas pip compares all.
    """
    words = ["--index-strategy", "unsafe-best-match"]
    if "true" in (value.lower() for value in settings.get("no-index", [])):
        words.append("--no-index")
    return words


def variables(settings: dict[str, list[str]]) -> list[str]:
    """The uv variables, NAME=VALUE each, for pip's sources."""
    return [
        f"{name}={values[0] if separator is None else separator.join(values)}"
        for key, (name, separator) in _VARIABLES.items()
        if (values := settings.get(key))
    ]


if __name__ == "__main__":
    found = parse(sys.stdin)
    print("\n".join([*flags(found), *variables(found)]))
