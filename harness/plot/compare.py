"""Two results directories: which measurements became slower or faster, and what else differs."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness.errors import ResultsError
from harness.inputs import one_line
from harness.measure.derive.doubts import rank_settings
from harness.measure.statistics import MINIMUM_EFFECT, summarize, verdict
from harness.measure.store import Problem, find_runs, without_samples
from harness.measure.text import cell, table
from harness.plot.catalog import Catalog, read_catalog
from harness.plot.headlines import library_versions
from harness.plot.subjects import KINDS, Subject, Timed, times_of, trainings_of
from harness.units import format_count

_MOST_NAMED = 3
MOST_OF_A_KIND = 10


@dataclass(frozen=True, kw_only=True)
class Pair:
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
    after_s: float | None = None
    ratio: float | None = None
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
    """All pairs, and what only one directory has.

    Attributes:
        software: version or setting that differs, before and after.
        only_before, only_after: subjects that the other directory lacks.
        problems: files that could not be read.
    """

    pairs: tuple[Pair, ...]
    software: tuple[tuple[str, str, str], ...]
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    problems: tuple[Problem, ...]

    @property
    def is_worse(self) -> bool:
        return any(pair.is_worse for pair in self.pairs)


def _whole(times: Sequence[Timed]) -> Timed:
    """Median and interval over runs; a single run keeps its own."""
    if len(times) == 1:
        return times[0]
    over = summarize([time.median for time in times], shortest=0)
    return Timed(over.median, over.low, over.high)


def _pair(
    subject: Subject, before: Sequence[Timed], after: Sequence[Timed], note: str = ""
) -> Pair:
    old = _whole(before)
    pair = Pair(
        kind=subject.kind, name=subject.name, before_s=old.median, n_before=len(before),
        n_after=len(after), outcome="fails", note=note,
    )  # fmt: skip
    if not after:
        return pair
    new = _whole(after)
    outcome: str = verdict([t.median for t in after], [t.median for t in before]).outcome
    if outcome == "inconclusive":
        outcome = _by_intervals(old, new)
    return replace(pair, after_s=new.median, ratio=new.median / old.median, outcome=outcome)


def _by_intervals(old: Timed, new: Timed) -> str:
    ratio, low, high = new.median / old.median, new.low / old.high, new.high / old.low
    if low > 1 and ratio >= MINIMUM_EFFECT:
        return "slower?"
    if high < 1 and ratio <= 1 / MINIMUM_EFFECT:
        return "faster?"
    is_within = low > 1 / MINIMUM_EFFECT and high < MINIMUM_EFFECT
    return "same?" if is_within else "inconclusive"


def _software(before: Catalog, after: Catalog) -> Iterator[tuple[str, str, str]]:
    """Versions, settings of hosts and environment variables that differ, in words."""
    sides = []
    for catalog in (before, after):
        headers = [run.header for run in catalog.runs]
        commits = {header.commit[:12] for header in headers if header.commit}
        known = {name: words for name, words, _ in library_versions(headers)}
        known |= {name: words for name, words, _ in rank_settings(headers)}
        sides.append({"commit": ", ".join(sorted(commits))} | known)
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        old, new = (side.get(name) or "not recorded" for side in sides)
        if old != new:
            yield name, old, new


def _read(root: Path) -> Catalog:
    found, problems = find_runs(root)
    if not found:
        raise ResultsError(f"{root} holds no run: make one with ./entry.sh, or import logs")
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
    endings = {
        trainings[id(run)]: run.header.ending for run in sides[1].runs if id(run) in trainings
    }
    plans: dict[Subject, set[str]] = defaultdict(set)
    for run in (run for side in sides for run in side.runs):
        if run.summary is not None and run.summary.plan:
            plans[trainings[id(run)]].add(run.summary.plan)
    order = {kind: place for place, kind in enumerate(KINDS)}
    pairs: list[Pair] = []
    only: tuple[list[str], list[str]] = [], []
    for subject in sorted({*old, *new}, key=lambda one: (order[one.kind], one.name)):
        sizes = set(old.get(subject, ())) & set(new.get(subject, ()))
        if sizes:
            times = [side[subject][max(sizes)] for side in (old, new)]
            note = "with another plan" if len(plans[subject]) > 1 else ""
            pairs.append(_pair(subject, times[0], times[1], note))
        elif subject in old and subject in endings:
            pairs.append(_pair(subject, old[subject][0], (), endings[subject]))
        else:
            for names, side in zip(only, (old, new), strict=True):
                names += [str(subject)] * (subject in side)
    if not pairs:
        own, others = (_named(names) or "no run that is ok" for names in only)
        raise ResultsError(
            f"{before} ({own}) and {after} ({others}) have no measurement in common: run the same "
            "workloads on the same hosts"
        )
    return Comparison(
        pairs=tuple(pairs),
        software=tuple(_software(*sides)),
        only_before=tuple(only[0]),
        only_after=tuple(only[1]),
        problems=tuple(problem for side in sides for problem in side.skipped),
    )


def sentence(pairs: Collection[Pair]) -> str:
    """How many measurements are slower, and of what kind."""
    worse = Counter(pair.kind for pair in pairs if pair.is_worse)
    count = Counter(pair.outcome.rstrip("?") for pair in pairs)
    kinds = ", ".join(f"{kind} {n}" for kind, n in worse.items())
    others = ", ".join(f"{count[name]} {name}" for name in ("faster", "same", "inconclusive"))
    found = f"{worse.total()} of {format_count(len(pairs), 'measurement')} slower"
    return f"{found} ({kinds}), {others}" if kinds else f"{found}, {others}"


def as_text(found: Comparison, *, is_whole: bool) -> str:
    """For a terminal.

    Args:
        is_whole: list all pairs, not only those that changed.
    """
    lines = [sentence(found.pairs)]
    shown = list(found.pairs) if is_whole else _most_changed(found.pairs)
    if shown:
        heads = ["measurement", "before", "after", "times as long", "runs", "outcome"]
        lines += ["", *table(heads, [_row(pair) for pair in shown])]
        if n_more := sum(pair.is_changed for pair in found.pairs if pair not in shown):
            lines.append(f"and {n_more} smaller changes: --all lists them")
        if any(pair.outcome.endswith("?") for pair in shown):
            lines.append(
                "?: by the intervals of too few runs for a verdict; seven of each settle it"
            )
    if found.software:
        lines += ["", "Versions and settings that differ:"]
        lines += [one_line(f"  {name}: {old} -> {new}") for name, old, new in found.software]
    for side, names in (("before", found.only_before), ("after", found.only_after)):
        lines += [f"Only {side}: {_named(names)}"] * bool(names)
    return "\n".join(lines)


def _most_changed(pairs: Iterable[Pair]) -> list[Pair]:
    """The largest changes of each kind, at most MOST_OF_A_KIND."""
    by_kind: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        if pair.is_changed:
            by_kind[pair.kind].append(pair)

    def change(pair: Pair) -> float:
        return math.inf if pair.ratio is None else abs(math.log(pair.ratio))

    return [
        pair
        for changed in by_kind.values()
        for pair in sorted(changed, key=change, reverse=True)[:MOST_OF_A_KIND]
    ]


def _named(names: Sequence[str]) -> str:
    n_more = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f" and {n_more} more" if n_more > 0 else "")


def _row(pair: Pair) -> list[str]:
    show = KINDS[pair.kind]
    return [
        str(Subject(pair.kind, pair.name)),
        show(pair.before_s),
        cell(pair.after_s, show),
        cell(pair.ratio, ".2f"),
        f"{pair.n_before} and {pair.n_after}",
        one_line(f"{pair.outcome}, {pair.note}") if pair.note else pair.outcome,
    ]


def as_json(found: Comparison) -> str:
    """One object; durations in seconds, those of rates in seconds per FLOP or byte."""
    document = {
        "sentence": sentence(found.pairs),
        "pairs": [asdict(pair) for pair in found.pairs],
        "software": [
            {"name": name, "before": old, "after": new} for name, old, new in found.software
        ],
        "only_before": found.only_before,
        "only_after": found.only_after,
        "skipped": [(str(path), reason) for path, reason in found.problems],
    }
    return json.dumps(document, indent=1)
