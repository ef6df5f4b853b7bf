"""Logs of other programs, converted to runs `imported-<name>/` for the same figures.

READERS has a row for each kind of log; a new import of a log replaces its runs.
"""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from harness.errors import ResultsError
from harness.measure.places import make_directory
from harness.plot.imports import deepspeed_log, epochs, torchtitan_log
from harness.plot.imports.runs import ImportFacts, Log, read_text

__all__ = ["READERS", "ImportFacts", "ImportOptions", "import_logs"]

SUFFIXES = {".csv", ".log", ".txt"}
Problems = list[tuple[Path, str]]

# The first that matches reads a log.
READERS = {
    "per-epoch CSV": epochs.READER,
    "DeepSpeed step lines": deepspeed_log.READER,
    "torchtitan metric lines": torchtitan_log.READER,
}


@dataclass(frozen=True, kw_only=True)
class ImportOptions(ImportFacts):
    __doc__ = f"""Turn logs into runs: {", ".join(READERS)}. Importing a file again replaces its
    runs. Facts that a log lacks come from its name (vit_b16_strong_2gpu.csv) and from these flags.
    """

    paths: Annotated[
        tuple[Path, ...],
        tyro.conf.Positional,
        tyro.conf.arg(metavar="PATH ...", help_behavior_hint=""),
    ]
    """Log files, or directories of them."""
    into: Path = Path("results")
    """Directory of the runs."""


def _logs(paths: Iterable[Path], problems: Problems) -> list[Path]:
    """Files to read: the given files, and files with a log's suffix in given directories."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(p for p in path.iterdir() if p.is_file() and p.suffix in SUFFIXES)
        elif path.is_file():
            found.append(path)
        else:
            problems.append((path, "does not exist"))
    return list(dict.fromkeys(found))


def _run_names(paths: Sequence[Path]) -> dict[Path, str]:
    """A directory name for each file; files of equal names are prefixed by their folder's."""
    stems = Counter(path.stem for path in paths)
    names = {}
    for path in paths:
        words = [path.stem] if stems[path.stem] == 1 else [path.resolve().parent.name, path.stem]
        names[path] = "imported-" + re.sub(r"[^A-Za-z0-9._-]+", "-", "-".join(words))
    return names


def import_logs(
    paths: Iterable[Path], into: Path, facts: ImportFacts
) -> tuple[list[Path], Problems]:
    """Import files and directories; returns the written runs, and skipped files with reasons.

    An unusable file does not stop the others.
    """
    problems: Problems = []
    logs = _logs(paths, problems)
    names = _run_names(logs)
    if logs:
        make_directory("--into", into)
    written: list[Path] = []
    for path in logs:
        skipped: list[str] = []
        try:
            text = read_text(path)
            usual = epochs.READER if path.suffix.lower() == ".csv" else None
            reader = next((one for one in READERS.values() if one.matches(text)), usual)
            if reader is None:
                remedy = ": harness.plan import --collectives reads nccl-tests"
                remedy = remedy if "busbw" in text else ""
                skipped.append(f"neither a {' nor '.join(READERS)}{remedy}")
            else:
                found = reader.read(Log(path, text, names[path], facts, skipped))
                written += [run.write(into) for run in found]
        except (ResultsError, OSError) as error:
            skipped.append(str(error).removeprefix(f"{path} "))
        problems += [(path, reason) for reason in skipped]
    return written, problems
