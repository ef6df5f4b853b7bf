"""Print the flags and variables that give uv the package sources of pip's configuration.

uv does not read pip's configuration. Reads `pip config list` on standard input; prints one
flag a line, so that values may hold spaces.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable

_FLAGS = {
    "find-links": "--find-links",
    "index-url": "--default-index",
    "extra-index-url": "--index",
}


def parse(lines: Iterable[str]) -> dict[str, list[str]]:
    """Read `scope.key='value'` lines into values by key, each once, in order.

    Lines of another shape are skipped, as pip may print anything beside its settings.
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

    With more than one index uv takes a package from the first which knows it; pip compares all.
    """
    words = []
    for key, flag in _FLAGS.items():
        for value in settings.get(key, []):
            words += [flag, value]
    if "true" in (value.lower() for value in settings.get("no-index", [])):
        words.append("--no-index")
    return ["--index-strategy", "unsafe-best-match", *words]


if __name__ == "__main__":
    print("\n".join(flags(parse(sys.stdin))))
