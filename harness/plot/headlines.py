"""The report's first screen: an answer for each comparison of strategies, and all warnings."""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.domain.run import HOST_SETTINGS, RunHeader
from harness.inputs import by_number
from harness.measure.derive.devices import low_peak_warnings, product_noise
from harness.measure.derive.doubts import Doubt, DoubtKind, rank_settings, stolen_warnings
from harness.measure.derive.links import above_link_text, disturbed_text, link_noise, slow_text
from harness.measure.derive.prediction import unpredicted_traffic
from harness.measure.derive.settings import unlike_one_device
from harness.measure.derive.strategies import StrategyRow, strategy_finding, strategy_tables
from harness.plot.catalog import Catalog
from harness.plot.numbers import RunNumbers
from harness.plot.predicted import cells, planned_cases

MAX_SUBJECTS = 3  # runs that are named with one warning


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One sentence, with the rows that it is derived from.

    Attributes:
        cell: model, batch, dtype and cluster; empty where there is nothing to compare.
        rows: cell and numbers of each strategy.
    """

    cell: str
    sentence: str
    rows: tuple[tuple[str, StrategyRow], ...]


def answers(catalog: Catalog) -> list[Answer]:
    """An answer for each comparison of two or more strategies, the largest comparison first; one
    that says so where there is none."""
    named = sorted(cells(catalog.training).items(), key=lambda one: by_number(one[0]))
    tables = [
        (cell, rows)
        for cell, cases in named
        for rows in strategy_tables(
            repeat for case in cases for repeat in zip(case.case.runs, case.summaries, strict=True)
        )
    ]
    compared = [(cell, rows) for cell, rows in tables if len(rows) > 1]
    if not compared and len(tables) != 1:
        every = tuple((cell, row) for cell, rows in tables for row in rows)
        why = "there is no training run in these results"
        if tables:
            why = f"each of {len(tables)} cells was trained by one strategy"
        return [Answer(cell="", sentence=f"No strategies to compare: {why}.", rows=every)]
    return [
        Answer(cell=cell, sentence=strategy_finding(rows), rows=tuple((cell, row) for row in rows))
        for cell, rows in sorted(compared or tables, key=lambda table: -len(table[1]))
    ]


def warnings(catalog: Catalog) -> dict[str, list[str]]:
    """Reasons to doubt the numbers of any workload, by kind; each text once, with its runs."""
    found: dict[DoubtKind, dict[str, list[str]]] = {kind: {} for kind in DoubtKind}
    for subject, doubt in _doubts(catalog):
        found[doubt.kind].setdefault(doubt.text, []).append(subject)
    return {
        kind.value: [_line(subjects, text) for text, subjects in texts.items()]
        for kind, texts in found.items()
        if texts
    }


def _line(subjects: Sequence[str], text: str) -> str:
    named = ", ".join(subject for subject in subjects[:MAX_SUBJECTS] if subject)
    n_more = len(subjects) - MAX_SUBJECTS
    more = f" and {n_more} more" if n_more > 0 else ""
    return f"{named}{more}: {text}" if named else text


def _doubts(catalog: Catalog) -> Iterator[tuple[str, Doubt]]:
    """Each doubt with the name of its run; empty if it concerns several."""
    yield from _doubts_of_training(catalog)
    yield from _doubts_of_products(catalog)
    for run in catalog.runs:
        yield from ((run.header.run_id, doubt) for doubt in _doubts_of_run(run))
    for text in stolen_warnings((run, run.stolen) for run in catalog.runs):
        yield "", Doubt(DoubtKind.STOLEN, text)
    for text in _unlike_software([run.header for run in catalog.runs]):
        yield "", Doubt(DoubtKind.VERSIONS, text)


def _doubts_of_training(catalog: Catalog) -> Iterator[tuple[str, Doubt]]:
    for summary in (summary for case in catalog.training for summary in case.summaries):
        name = f"{summary.model} {summary.strategy} on {summary.n_ranks} ({summary.run_id})"
        texts: dict[DoubtKind, list[str]] = defaultdict(list)
        for doubt in summary.warnings:
            texts[doubt.kind].append(doubt.text)
        yield from ((name, Doubt(kind, "; ".join(of_kind))) for kind, of_kind in texts.items())
    for trained in catalog.training:
        if why := unlike_one_device(trained.case.runs[0]):
            yield trained.whole_label, Doubt(DoubtKind.TRAINING, why)
    for case in planned_cases(catalog):
        if text := unpredicted_traffic(case.first.compared):
            label = str(case.training.identity["label"])
            yield label, Doubt(DoubtKind.TRAFFIC, text)


def _doubts_of_run(run: RunNumbers) -> Iterator[Doubt]:
    if run.header.status != "ok":
        yield Doubt(DoubtKind.FAILED, run.header.ending)
    above = above_link_text(run, run.collectives, run.best_links_bytes_per_s)
    slow = [slow_text(run, matrix) for matrix in run.links]
    for text in filter(None, [*slow, *map(disturbed_text, run.links), above]):
        yield Doubt(DoubtKind.LINKS, text)
    for text in link_noise(run.collectives, run.links):
        yield Doubt(DoubtKind.SPREAD, text)
    for text in run.header.texts("left_out"):
        yield Doubt(DoubtKind.LEFT_OUT, text)


def _doubts_of_products(catalog: Catalog) -> Iterator[tuple[str, Doubt]]:
    from harness.plot.figures.matmul import skipped_products

    for case in catalog.cases("matmul"):
        if not case.is_ok:
            continue
        for row in skipped_products(case):
            yield str(row["label"]), Doubt(DoubtKind.LEFT_OUT, str(row["reason"]))
        for run in case.runs:
            for text in low_peak_warnings(catalog.distributed(run)):
                yield run.header.run_id, Doubt(DoubtKind.PEAK, text)
            for text in product_noise(run.products, run.memory, run.distributed):
                yield run.header.run_id, Doubt(DoubtKind.SPREAD, text)


def _unlike_software(headers: Sequence[RunHeader]) -> list[str]:
    commits = {header.commit for header in headers if header.commit}
    lines = [f"runs of {len(commits)} commits stand side by side"] if len(commits) > 1 else []
    of_hosts = [setting for setting in rank_settings(headers) if setting[0] in HOST_SETTINGS]
    return lines + [
        f"runs disagree on the version of {name}: {found}"
        for name, found, differ in (*library_versions(headers), *of_hosts)
        if differ
    ]


def library_versions(headers: Iterable[RunHeader]) -> list[tuple[str, str, bool]]:
    """Library, its versions over all runs, and whether they disagree."""
    found: dict[str, set[str]] = defaultdict(set)
    for header in headers:
        for library, version in header.versions.items():
            found[library].add(version)
    return [
        (name, ", ".join(sorted(versions)), len(versions) > 1)
        for name, versions in sorted(found.items())
    ]
