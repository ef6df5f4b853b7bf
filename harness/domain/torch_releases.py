"""The releases of torch that the harness works with, as pyproject.toml has them."""

import re

FIRST, END = (2, 9), (3, 0)


def torch_problem(version: str) -> str:
    """What is wrong with a release of torch; empty for one that works or is unknown."""
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or FIRST <= (int(found[1]), int(found[2])) < END:
        return ""
    first, end = (".".join(map(str, release)) for release in (FIRST, END))
    return f"torch {version} is none of {first} to {end}, whose graphs of models are understood"
