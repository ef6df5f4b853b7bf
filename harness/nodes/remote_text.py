"""The texts of the programs that run on the hosts."""

from __future__ import annotations

from functools import cache
from importlib import resources


@cache
def remote_text(name: str) -> str:
    """A program that runs on the hosts, by its file name."""
    return (resources.files("harness.nodes") / name).read_text()
