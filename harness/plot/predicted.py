"""Strategies that compete in a cell (equal model, batch, dtype, cluster and other settings), with
predictions."""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from harness.domain.run import HOST_SETTINGS
from harness.measure.derive.prediction import PredictedRun, RankedStrategy
from harness.measure.derive.settings import rest_of_config, telling_settings
from harness.measure.derive.strategies import workload_key
from harness.plot.catalog import Catalog, TrainingCase
from harness.plot.numbers import RunNumbers


def cell_of(case: TrainingCase) -> str:
    """A case's own cell, in words; a run on one device may join others."""
    batch = "" if case.batch is None else f"batch {case.batch:g}"
    words = [case.first.model, batch, case.first.dtype, case.case.cluster]
    return " · ".join(word for word in words if word)


def _first_device(case: TrainingCase) -> tuple[object, ...]:
    """Properties that a run on one device shares with runs on more: workload, host, device kind,
    environment variables."""
    device: tuple[object, ...] = ()
    for rank in case.case.header.ranks[:1]:
        settings = {n: value for n, value in rank.settings.items() if n not in HOST_SETTINGS}
        device = (rank.hostname, rank.device_kind, rank.n_cores, *sorted(settings.items()))
    return (case.first.model, case.batch, case.first.dtype, device)


def cells(cases: Iterable[TrainingCase]) -> dict[str, list[TrainingCase]]:
    """Cases by cell; a run on one device joins every cell whose first device it used. Cells of
    equal words differ in settings, which are named."""
    every = list(cases)
    found: dict[str, list[TrainingCase]] = defaultdict(list)
    for case in every:
        if case.case.n_devices > 1:
            found[cell_of(case)].append(case)
    by_device: dict[tuple[object, ...], list[list[TrainingCase]]] = defaultdict(list)
    for own in found.values():
        by_device[_first_device(own[0])].append(own)
    for case in every:
        if case.case.n_devices > 1:
            continue
        for own in by_device.get(_first_device(case)) or [found[cell_of(case)]]:
            own.append(case)
    return {name: own for cell, like in found.items() for name, own in _by_settings(cell, like)}


def _by_settings(cell: str, cases: Iterable[TrainingCase]) -> list[tuple[str, list[TrainingCase]]]:
    groups: dict[str, list[TrainingCase]] = defaultdict(list)
    for case in cases:
        groups[workload_key(case.case.runs[0])].append(case)
    firsts = [own[0].case for own in groups.values()]
    told = telling_settings([rest_of_config(first.runs[0]) for first in firsts])
    names = [" · ".join(filter(None, (cell, words))) for words in told]
    unique = [
        name if names.count(name) == 1 else f"{name} · {first.header.run_id}"
        for name, first in zip(names, firsts, strict=True)
    ]
    return list(zip(unique, groups.values(), strict=True))


@dataclass(frozen=True, kw_only=True)
class PlannedRepeat:
    """One run with its prediction; `repeat` is its place among the case's repeats."""

    run: RunNumbers
    repeat: int
    compared: PredictedRun


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """A training case and those of its repeats that were predicted: at least one."""

    training: TrainingCase
    repeats: tuple[PlannedRepeat, ...]

    @property
    def first(self) -> PlannedRepeat:
        return self.repeats[0]

    @property
    def predicted_s(self) -> float:
        """Median over the repeats."""
        return median(repeat.compared.predicted_s for repeat in self.repeats)

    def judged(self) -> RankedStrategy | None:
        """Medians over the repeats that were measured; None when none was."""
        known = [r.compared for r in self.repeats if r.compared.measured is not None]
        if not known:
            return None
        return RankedStrategy(
            name=self.training.label,
            predicted_s=median(compared.predicted_s for compared in known),
            measured_s=median(c.measured.median for c in known if c.measured is not None),
        )


def planned_cases(catalog: Catalog) -> list[PlannedCase]:
    """The training cases that were predicted, in the catalog's order."""
    cases = []
    for training in catalog.training:
        repeats = tuple(
            PlannedRepeat(run=run, repeat=repeat, compared=run.predicted)
            for repeat, run in enumerate(training.case.runs)
            if run.predicted is not None
        )
        if repeats:
            cases.append(PlannedCase(training=training, repeats=repeats))
    return cases


def competing(cases: Iterable[PlannedCase]) -> dict[str, list[PlannedCase]]:
    """Cases by cell, failed ones included, where any was measured."""
    by_training = {id(case.training): case for case in cases}
    found = {
        cell: [by_training[id(training)] for training in own]
        for cell, own in cells(case.training for case in by_training.values()).items()
    }
    return {cell: own for cell, own in found.items() if any(case.judged() for case in own)}
