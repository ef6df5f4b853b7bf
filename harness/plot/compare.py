"""Two results directories: which measurements became slower or faster, and what else differs."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.errors import ResultsError
from harness.inputs import one_line
from harness.measure.derive.doubts import rank_settings
from harness.measure.statistics import MINIMUM_EFFECT, summarize, verdict
from harness.measure.store import Problem, find_runs, without_samples
from harness.measure.text import cell, table
from harness.plot.catalog import Catalog, read_catalog, short_kind
from harness.plot.headlines import library_versions
from harness.plot.subjects import FEWEST, KINDS, Subject, Timed, times_of, trainings_of
from harness.units import format_count

_MOST_NAMED = 3
MOST_OF_A_KIND = 10


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One measurement in both directories.

    Attributes:
        before_s, after_s: median over runs, of seconds or seconds per FLOP or byte; after_s is None
            if it fails.
        ratio: after_s / before_s.
        n_before, n_after: runs.
        outcome: `slower`, `faster` and `same` are verdicts; with `?` the intervals say so, but
            there are too few runs for a verdict; `inconclusive`; `fails`: no run is ok any more.
        note: why it fails, or that the search found another plan; else empty.
    """

    kind: str
    name: str
    before_s: float
    after_s: float | None
    ratio: float | None
    n_before: int
    n_after: int
    outcome: str
    note: str

    @property
    def is_worse(self) -> bool:
        return self.outcome in ("fails", "slower", "slower?")

    @property
    def is_changed(self) -> bool:
        return self.is_worse or self.outcome in ("faster", "faster?")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What both directories have, and what only one has.

    Attributes:
        software: version or setting that differs, before and after.
        only_before, only_after: subjects that the other directory lacks.
        failing: trainings of which only some runs are ok now, with how one of the others ended.
        problems: files that could not be read.
    """

    both: tuple[Compared, ...]
    software: tuple[tuple[str, str, str], ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    failing: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def is_worse(self) -> bool:
        return any(one.is_worse for one in self.both)


def _whole(times: Sequence[Timed]) -> Timed:
    """Median and interval over runs; of fewer than FEWEST the widest that their own give."""
    over = summarize([time.median for time in times])
    if len(times) < FEWEST:
        return Timed(over.median, min(t.low for t in times), max(t.high for t in times))
    return Timed(over.median, over.low, over.high)


def _compared(
    subject: Subject, before: Sequence[Timed], after: Sequence[Timed], note: str = ""
) -> Compared:
    old, new = _whole(before), _whole(after) if after else None
    outcome: str = "fails"
    if new is not None:
        outcome = verdict([t.median for t in after], [t.median for t in before]).outcome
        outcome = _by_intervals(old, new) if outcome == "inconclusive" else outcome
    return Compared(
        kind=subject.kind,
        name=subject.name,
        before_s=old.median,
        after_s=new and new.median,
        ratio=new and new.median / old.median,
        n_before=len(before),
        n_after=len(after),
        outcome=outcome,
        note=note,
    )


def _by_intervals(old: Timed, new: Timed) -> str:
    ratio = new.median / old.median
    if new.low > old.high and ratio >= MINIMUM_EFFECT:
        return "slower?"
    if new.high < old.low and ratio <= 1 / MINIMUM_EFFECT:
        return "faster?"
    is_within = new.high < old.low * MINIMUM_EFFECT and old.high < new.low * MINIMUM_EFFECT
    return "same?" if is_within else "inconclusive"


def _software(before: Catalog, after: Catalog) -> Iterator[tuple[str, str, str]]:
    """Devices, versions, settings of hosts and environment variables that differ, in words."""
    sides = []
    for catalog in (before, after):
        headers = [run.header for run in catalog.runs]
        commits = {header.commit[:12] for header in headers if header.commit}
        known = {name: words for name, words, _ in library_versions(headers)}
        known |= {name: words for name, words, _ in rank_settings(headers)}
        ranks = [rank for header in headers for rank in header.ranks]
        devices = {f"{short_kind(rank.device_kind)} of {rank.hostname}" for rank in ranks}
        known |= {"devices": ", ".join(sorted(devices))}
        sides.append({"commit": ", ".join(sorted(commits))} | known)
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        old, new = (side.get(name) or "not recorded" for side in sides)
        if old != new:
            yield name, old, new


def _read(root: Path) -> Catalog:
    found, problems = find_runs(root)
    if not found:
        beside = f", but {len(problems)} other entries" if problems else ""
        raise ResultsError(f"{root} holds no run{beside}: make one with ./entry.sh, or import logs")
    own, left_out = without_samples(found)
    return read_catalog(own, [*problems, *left_out])


def compare(before: Path, after: Path) -> Comparison:
    """Compare two results directories (or runs).

    Of a device and a pair of devices the largest size counts that both directories have.

    Raises:
        ResultsError: a directory has no run, or they have no measurement in common.
    """
    sides = _read(before), _read(after)
    trainings = trainings_of(run for side in sides for run in side.runs)
    old, new = (times_of(side.runs, trainings) for side in sides)
    endings: dict[Subject, list[str]] = defaultdict(list)
    for run in sides[1].runs:
        if id(run) in trainings and run.header.status != "ok":
            endings[trainings[id(run)]].append(run.header.ending)
    plans: dict[Subject, set[str]] = defaultdict(set)
    for run in (run for side in sides for run in side.runs):
        if run.summary is not None and run.summary.plan:
            plans[trainings[id(run)]].add(run.summary.plan)
    order = {kind: place for place, kind in enumerate(KINDS)}
    both: list[Compared] = []
    only: tuple[list[str], list[str]] = [], []
    for subject in sorted({*old, *new}, key=lambda one: (order[one.kind], one.name)):
        sizes = set(old.get(subject, ())) & set(new.get(subject, ()))
        if sizes:
            times = [side[subject][max(sizes)] for side in (old, new)]
            note = "with another plan" if len(plans[subject]) > 1 else ""
            both.append(_compared(subject, times[0], times[1], note))
        elif subject in old and subject in endings:
            both.append(_compared(subject, old[subject][0], (), endings[subject][-1]))
        else:
            for names, side in zip(only, (old, new), strict=True):
                names += [str(subject)] * (subject in side)
    if not both:
        own, others = (_named(names) or "no run that is ok" for names in only)
        raise ResultsError(
            f"{before} ({own}) and {after} ({others}) have no measurement in common: run the same "
            "workloads on the same hosts"
        )
    return Comparison(
        both=tuple(both),
        software=tuple(_software(*sides)),
        only_before=tuple(only[0]),
        only_after=tuple(only[1]),
        failing=tuple(
            one_line(
                f"{subject}: {len(ended)} of {len(ended) + len(new[subject][0])} runs, {ended[-1]}"
            )
            for subject, ended in endings.items()
            if subject in new
        ),
        problems=tuple(problem for side in sides for problem in side.skipped),
    )


def sentence(both: Collection[Compared]) -> str:
    """How many measurements are slower, and of what kind; how many are not."""
    count = Counter(one.outcome.rstrip("?") for one in both)
    slower = Counter(one.kind for one in both if one.is_worse and one.outcome != "fails")
    kinds = ", ".join(f"{kind} {n}" for kind, n in slower.items())
    found = f"{count['slower']} of {format_count(len(both), 'measurement')} slower"
    others = [f"{found} ({kinds})" if kinds else found]
    others += [f"{count['fails']} failing"] * bool(count["fails"])
    others += [f"{count[name]} {name}" for name in ("faster", "same", "inconclusive")]
    return ", ".join(others)


def as_text(found: Comparison, *, is_whole: bool) -> str:
    """For a terminal.

    Args:
        is_whole: list all measurements, not only those that changed most.
    """
    lines = [sentence(found.both)]
    changed = [one for one in found.both if one.is_changed]
    shown = list(found.both) if is_whole else _most_of_each_kind(changed)
    if shown:
        heads = ["measurement", "before", "after", "times as long", "runs", "outcome"]
        lines += ["", *table(heads, [_row(one) for one in shown])]
        if len(changed) > len(shown):
            lines.append(f"and {len(changed) - len(shown)} smaller changes: --all lists them")
        if any(one.outcome.endswith("?") for one in shown):
            lines.append(
                "?: by the intervals of too few runs for a verdict; seven of each settle it"
            )
    if found.software:
        lines += ["", "Devices, versions and settings that differ:"]
        lines += [one_line(f"  {name}: {old} -> {new}") for name, old, new in found.software]
    for side, names in (("before", found.only_before), ("after", found.only_after)):
        lines += [f"Only {side}: {_named(names)}"] * bool(names)
    lines += [f"Not ok after: {words}" for words in found.failing]
    return "\n".join(lines)


def _most_of_each_kind(changed: Iterable[Compared]) -> list[Compared]:
    """The largest changes of each kind, at most MOST_OF_A_KIND."""
    by_kind: dict[str, list[Compared]] = defaultdict(list)
    for one in sorted(changed, key=lambda one: -abs(math.log(one.ratio or math.inf))):
        by_kind[one.kind].append(one)
    return [one for kind in KINDS for one in by_kind[kind][:MOST_OF_A_KIND]]


def _named(names: Sequence[str]) -> str:
    n_more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {n_more} more" if n_more > 0 else "")


def _row(one: Compared) -> list[str]:
    show = KINDS[one.kind]
    return [
        str(Subject(one.kind, one.name)),
        show(one.before_s),
        cell(one.after_s, show),
        cell(one.ratio, ".2f"),
        f"{one.n_before} and {one.n_after}",
        one_line(f"{one.outcome}, {one.note}") if one.note else one.outcome,
    ]


def as_json(found: Comparison) -> str:
    """One object; durations in seconds, those of rates in seconds per FLOP or byte."""
    document = {
        "sentence": sentence(found.both),
        "measurements": [asdict(one) for one in found.both],
        "software": [
            {"name": name, "before": old, "after": new} for name, old, new in found.software
        ],
        "only_before": found.only_before,
        "only_after": found.only_after,
        "failing": found.failing,
        "skipped": [(str(path), reason) for path, reason in found.problems],
    }
    return json.dumps(document, indent=1)
