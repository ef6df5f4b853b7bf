"""The data sets that `validate` reads, and how it finds them in a directory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from harness.errors import DataError
from harness.plan.validation import (
    amp,
    neusight,
    pipetransformer,
    pollux,
    sailor,
    torchgpipe,
    vit_deepspeed,
    vtrain,
)
from harness.plan.validation.points import SetReader

READERS: dict[str, SetReader] = {
    "vtrain": vtrain.READER,
    "pollux": pollux.READER,
    "scalable_vit_dt": vit_deepspeed.READER,
    "amp": amp.READER,
    "sailor": sailor.READER,
    "neusight": neusight.READER,
    "torchgpipe": torchgpipe.READER,
    "pipetransformer": pipetransformer.READER,
}


def find_sets(folder: Path) -> Iterator[tuple[str, Path]]:
    """Sets in a directory, or in the directories in it, with the names of their readers.

    Raises:
        DataError: it is no directory, or holds none.
    """
    if not folder.is_dir():
        raise DataError(f"{folder} is not a directory: name one that holds a data set")
    own = [(name, folder) for name in _matching(folder)]
    below = [
        (name, path)
        for path in sorted(folder.iterdir())
        if path.is_dir()
        for name in _matching(path)
    ]
    # Some readers look into directories too, so the directory of several sets looks like one.
    found = below if {name for name, _ in below} > {name for name, _ in own} else own
    if not found:
        known = "; ".join(f"{name}: {reader.looks_for}" for name, reader in READERS.items())
        raise DataError(f"{folder} holds no data set that can be read ({known})")
    yield from found


def _matching(folder: Path) -> list[str]:
    return [name for name, reader in READERS.items() if reader.matches(folder)]
