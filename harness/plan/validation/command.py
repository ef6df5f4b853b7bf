"""`python -m harness.plan validate`: predict published steps, and score the predictions."""

import argparse
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import numpy as np

from harness.domain.prediction import PartScores, ValidatedPoint, Validation, validation_file
from harness.errors import DataError, HarnessError
from harness.measure.places import make_directory
from harness.measure.statistics import rank_correlation
from harness.measure.store import write_atomically
from harness.measure.text import cell, table
from harness.plan.report import ProgressLine
from harness.plan.validation.points import MeasuredStep, NotExpressedError, Published, SetReader
from harness.units import format_bytes

Pairs = Sequence[tuple[float, float]]  # predicted, measured


def percentile_error(pairs: Pairs, q: float) -> float | None:
    """The q-th percentile of |predicted / measured - 1|; None without points."""
    return float(np.percentile([abs(p / m - 1) for p, m in pairs], q)) if pairs else None


def regret_of(pairs: Pairs) -> float | None:
    """Loss by choosing the predicted best, as a share of the measured best; None below 2 points.

    Points of one prediction are runs of one choice, which counts by their mean.
    """
    runs: dict[float, list[float]] = {}
    for p, m in pairs:
        runs.setdefault(float(f"{p:.9g}"), []).append(m)
    if len(runs) < 2:
        return None
    means = {p: sum(own) / len(own) for p, own in runs.items()}
    return means[min(means)] / min(means.values()) - 1


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of those that are known."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None


# Groups of points that are named for what they lack.
_N_WORST = 3


def judge(
    name: str, published: Published, progress: Callable[[int, int], None] = lambda done, of: None
) -> Validation:
    """Predict and score; `progress` gets the number of points that are done, and of all."""
    reasons: Counter[str] = Counter()
    judged: list[tuple[MeasuredStep, ValidatedPoint]] = []
    for k, point in enumerate(published.points):
        progress(k, len(published.points))
        try:
            judged.append((point, _predict(point)))
            if point.calibrates:
                reasons["calibrates the others"] += 1
        except NotExpressedError as error:
            reasons[str(error)] += 1
        except HarnessError as error:
            reasons[f"{type(error).__name__}: {error}"] += 1
    return _scored(name, published, judged, dict(reasons))


def _predict(point: MeasuredStep) -> ValidatedPoint:
    case = point.build()
    simulation = case.simulator.simulate(case.strategy)
    return ValidatedPoint(
        name=point.name,
        cell=point.cell,
        part=point.part,
        samples=point.samples,
        measured_s=point.measured_s,
        predicted_s=simulation.step_s,
        fits=simulation.fits,
        calibrates=point.calibrates,
        measured_bytes=point.memory_bytes,
        predicted_bytes=max(simulation.memory_bytes.values()),
        limit_bytes=int(case.simulator.limits.min()),
    )


def _scored(
    name: str,
    published: Published,
    judged: Sequence[tuple[MeasuredStep, ValidatedPoint]],
    reasons: dict[str, int],
) -> Validation:
    ran = [(p, v, p.measured_s) for p, v in judged if p.measured_s is not None and not p.calibrates]
    parts = sorted({point.part for point, _ in judged})
    memory = [(v.predicted_bytes, v.measured_bytes) for _, v, _ in ran if v.measured_bytes]
    theirs = [(p.source_s, s) for p, _, s in ran if p.source_s is not None]
    return Validation(
        set=name,
        n_points=len(published.points),
        **_scores([one for _, one in judged]),
        source_median_error=percentile_error(theirs, 50) or published.source_median_error,
        trivial_median_error=published.trivial_median_error,
        not_expressed=reasons,
        memory_median_error=percentile_error(memory, 50),
        parts=[
            PartScores(part=part, **_scores([one for p, one in judged if p.part == part]))
            for part in (parts if len(parts) > 1 else ())
        ],
        bias=median(v.predicted_s / s for _, v, s in ran) - 1 if ran else None,
        notes=list(published.notes),
        missing=[
            *published.missing([(p, v.predicted_s) for p, v, _ in ran]),
            *_unlike_groups(published.lacks, [(p, v.predicted_s / s) for p, v, s in ran]),
            *_missing_memory([one for _, one in judged]),
            *_failed_choices([one for _, one in judged]),
        ],
        points=[one for _, one in judged],
    )


def _scores(points: Sequence[ValidatedPoint]) -> dict[str, Any]:
    """Fields of `Validation` and `PartScores`."""
    finished = [(v, v.measured_s) for v in points if v.measured_s is not None]
    judged = [v for v in points if not v.calibrates]
    ran = [(v, s) for v, s in finished if not v.calibrates]
    steps = [(v.predicted_s, s) for v, s in ran]
    cells: dict[str, list[tuple[float, float]]] = defaultdict(list)
    choices: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one, seconds in finished:
        cells[one.cell].append((one.predicted_s / one.samples, seconds / one.samples))
        if one.fits:
            choices[one.cell].append(cells[one.cell][-1])
    failed = [one for one in judged if one.measured_s is None]
    return {
        "n_expressed": len(judged),
        "median_error": percentile_error(steps, 50),
        "p90_error": percentile_error(steps, 90),
        "spearman": mean_of(rank_correlation(*zip(*own, strict=True)) for own in cells.values()),
        "regret": mean_of(map(regret_of, choices.values())),
        "n_failed": len(failed),
        "n_failed_called": sum(not one.fits for one in failed),
        "n_ran_called_failed": sum(not one.fits for one, _ in ran),
    }


def _unlike_groups(lacks: str, ratios: Sequence[tuple[MeasuredStep, float]]) -> list[str]:
    """The groups of points whose predictions are furthest off, if groups say which term is missing;
    by ratios of predicted over measured seconds."""
    groups: dict[str, list[float]] = defaultdict(list)
    for point, ratio in ratios:
        groups[point.group].append(ratio)
    if not lacks or len(groups) < 2:
        return []
    errors = {group: median(own) - 1 for group, own in groups.items()}
    worst = sorted(errors, key=lambda group: -abs(errors[group]))[:_N_WORST]
    each = ", ".join(f"{errors[group]:+.0%} {group} ({len(groups[group])})" for group in worst)
    all_ = median(ratio for _, ratio in ratios) - 1
    return [f"{lacks}: predicted against measured is {each}; all together {all_:+.0%}"]


def _missing_memory(points: Sequence[ValidatedPoint]) -> list[str]:
    """By part: how much more memory the failed runs need that are predicted to fit."""
    spare: dict[str, list[int]] = defaultdict(list)
    for one in points:
        if one.measured_s is None and one.fits and not one.calibrates:
            spare[one.part].append(one.limit_bytes - one.predicted_bytes)
    return [
        f"memory beside tensors: {len(own)} failed runs{f' of {part}' if part else ''} are "
        f"predicted to leave {format_bytes(min(own))} to {format_bytes(max(own))} of a device free"
        for part, own in spare.items()
    ]


def _failed_choices(points: Sequence[ValidatedPoint]) -> list[str]:
    """The cells whose predicted fastest point failed, which their regret leaves out."""
    fastest: dict[str, ValidatedPoint] = {}
    for one in sorted(points, key=lambda one: one.predicted_s / one.samples):
        if one.fits:
            fastest.setdefault(one.cell, one)
    return [
        f"the predicted fastest of {cell}, {one.name}, failed: its regret is that of runs that ran"
        for cell, one in fastest.items()
        if one.measured_s is None
    ]


# Each is the module of the same name.
_SETS = (
    *("vtrain", "pollux", "scalable_vit_dt", "amp", "sailor", "neusight", "torchgpipe"),
    "pipetransformer",
)
READERS: dict[str, SetReader] = {
    name: import_module(f"harness.plan.validation.{name}").READER for name in _SETS
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
    names = {name for name, _ in own}
    if {name for name, _ in below} > names:
        found = below
    else:
        found = own + [one for one in below if one[0] not in names]
    if not found:
        known = "; ".join(f"{name}: {reader.looks_for}" for name, reader in READERS.items())
        raise DataError(f"{folder} holds no data set that can be read ({known})")
    yield from found


def _matching(folder: Path) -> list[str]:
    return [name for name, reader in READERS.items() if reader.matches(folder)]


def validate_sets(args: argparse.Namespace) -> Iterator[Validation]:
    """Each set of the directories, when it is done. All files are read before a step is predicted,
    because predictions take minutes.

    Raises:
        HarnessError: a directory holds no set, or a file is malformed.
    """
    if args.output is not None:
        make_directory("--output", args.output)
    found = [one for path in args.folders for one in find_sets(path)]
    counts = Counter(name for name, _ in found)
    name, n = counts.most_common(1)[0]
    if args.output is not None and n > 1:
        raise DataError(
            f"{n} directories hold {name}, and --output gets one file for each set: give one "
            "directory that holds them, or validate them one by one"
        )
    sets = [
        (name if counts[name] == 1 else f"{name} in {folder}", READERS[name].read(folder))
        for name, folder in found
    ]
    for name, published in sets:
        validation = _validated(name, published)
        if args.output is not None:
            write_atomically(args.output / validation_file(name), validation.to_json())
        yield validation


def _validated(name: str, published: Published) -> Validation:
    line = ProgressLine()
    try:
        return judge(
            name,
            published,
            lambda done, of: line.show(f"{name}: {done} of {of} steps predicted"),
        )
    finally:
        line.clear()


def lines(validations: Sequence[Validation]) -> list[str]:
    """A row per set, then the assumptions, calibrations and missing terms of each."""
    heads = ["set", "points", "judged", "median", "p90", "Spearman", "regret"]
    heads += ["source's", "trivial"]
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
        for fields in map(msgspec.to_builtins, validate_sets(args)):
            for only_in_file in ("points", "schema", "version"):
                del fields[only_in_file]
            print(msgspec.json.encode(fields).decode(), flush=True)
    else:
        print("\n".join(lines(list(validate_sets(args)))))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's flags."""
    sets = "\n".join(f"  {name:<17}{reader.looks_for}" for name, reader in READERS.items())
    parser.description = "Predict steps that others have measured, and print the errors."
    parser.epilog = f"sets, and the files by which they are recognised:\n{sets}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "folders",
        type=Path,
        nargs="+",
        metavar="DIR",
        help="directory of a published set, or a directory with several of these",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object for each set")
    parser.add_argument(
        "--output",
        type=Path,
        metavar="DIR",
        help="write validation-SET.json here; in a results directory the report draws it",
    )
