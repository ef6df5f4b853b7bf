"""Sources of the programs that run on the hosts."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def remote_text(name: str) -> str:
    """The source of a program, by its path below harness/nodes."""
    return (resources.files("harness.nodes") / name).read_text()
