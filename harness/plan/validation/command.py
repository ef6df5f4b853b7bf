"""`python -m harness.plan validate`: predict published steps, and print the errors.

The data sets that `validate` reads, and how it finds them in a directory.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import msgspec

from harness.domain.validation import PartScores, Validation, validation_file
from harness.errors import DataError
from harness.measure.store import write_atomically
from harness.measure.text import cell, table
from harness.plan.report import ProgressLine
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
from harness.plan.validation.judge import judge
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


# Fields of the file that the JSON line leaves out.
_ONLY_IN_FILE = ("points", "schema", "version")


def validate_sets(args: argparse.Namespace) -> Iterator[Validation]:
    """Each set of the directories, when it is done.

    Raises:
        HarnessError: a directory holds no set, or a file is malformed.
    """
    if args.output is not None:
        args.output.mkdir(parents=True, exist_ok=True)
    for name, folder in [found for path in args.folders for found in find_sets(path)]:
        line = ProgressLine()
        try:
            validation = judge(name, READERS[name].read(folder), partial(_show, line, name))
        finally:
            line.clear()
        if args.output is not None:
            write_atomically(args.output / validation_file(name), validation.to_json())
        yield validation


def _show(line: ProgressLine, name: str, done: int, of: int) -> None:
    line.show(f"{name}: {done} of {of} steps predicted")


def json_line(validation: Validation) -> str:
    """One JSON object without the points."""
    fields = msgspec.to_builtins(validation)
    return msgspec.json.encode(
        {name: value for name, value in fields.items() if name not in _ONLY_IN_FILE}
    ).decode()


def lines(validations: Sequence[Validation]) -> list[str]:
    """A row per set, then the assumptions, calibrations and missing terms of each."""
    heads = [
        "set",
        "points",
        "judged",
        "median",
        "p90",
        "Spearman",
        "regret",
        "source's",
        "trivial",
    ]
    rows = []
    for one in validations:
        others = (one.source_median_error, one.trivial_median_error)
        rows.append(
            [one.set, str(one.n_points), *_cells(one), *(cell(error, ".0%") for error in others)]
        )
        rows += [[f"  {part.part}", "", *_cells(part), "", ""] for part in one.parts]
    found = table(heads, rows)
    for one in validations:
        found += ["", f"{one.set}:"]
        failures = [*_failures(one), *(line for part in one.parts for line in _failures(part))]
        found += [f"  {line}" for line in (*one.notes, *failures, *one.missing)]
        if one.memory_median_error is not None:
            found.append(f"  memory: median error {one.memory_median_error:.1%} of the peak")
        found += [f"  not judged: {n} ({why})" for why, n in one.not_expressed.items()]
    return found


def _cells(scores: Validation | PartScores) -> list[str]:
    return [
        str(scores.n_expressed),
        cell(scores.median_error, ".1%"),
        cell(scores.p90_error, ".1%"),
        cell(scores.spearman, ".3f"),
        cell(scores.regret, ".1%"),
    ]


def _failures(scores: Validation | PartScores) -> Iterator[str]:
    if scores.n_failed:
        of = f"{scores.part}: " if isinstance(scores, PartScores) else ""
        yield (
            f"{of}{scores.n_failed_called} of {scores.n_failed} runs that failed are predicted not "
            f"to fit, and {scores.n_ran_called_failed} that ran"
        )


def run(args: argparse.Namespace) -> None:
    """Print all sets; with --json each as soon as it is done."""
    if args.json:
        for one in validate_sets(args):
            print(json_line(one), flush=True)
    else:
        print("\n".join(lines(list(validate_sets(args)))))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    sets = "\n".join(f"  {name:<17}{reader.looks_for}" for name, reader in READERS.items())
    parser.description = "Predict the steps of published measurements, and print how well."
    parser.epilog = f"sets, and the files by which they are known:\n{sets}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "folders", type=Path, nargs="+", metavar="DIR", help="a set, or a directory of sets"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each set")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write validation-SET.json here; in a results directory the report draws it",
    )
