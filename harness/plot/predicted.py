"""Training cases beside their predictions, and the cells in which their strategies compete."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median

from harness.domain.prediction import Prediction
from harness.measure.derive import Judged, PredictedRun, predicted_run
from harness.measure.store import Run
from harness.plot.catalog import Catalog, TrainingCase, batch_of


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One run with its prediction; `repeat` is its place among the case's repeats."""

    run: Run
    repeat: int
    prediction: Prediction
    compared: PredictedRun


@dataclass(frozen=True, kw_only=True)
class PlannedCase:
    """A training case and those of its repeats that were predicted: at least one."""

    training: TrainingCase
    repeats: tuple[Planned, ...]

    @property
    def first(self) -> Planned:
        return self.repeats[0]

    @property
    def batch(self) -> float | None:
        return batch_of(self.first.run, self.training.first)

    @property
    def cell(self) -> str:
        """What its strategy competes in, in words; one device alone may join others."""
        first = self.training.first
        batch = "" if self.batch is None else f"batch {self.batch:g}"
        words = [first.model, batch, first.dtype, self.training.case.cluster]
        return " · ".join(word for word in words if word)

    @property
    def predicted_s(self) -> float:
        """Median over the repeats."""
        return median(repeat.prediction.step_s for repeat in self.repeats)

    def judged(self) -> Judged | None:
        """Medians over the repeats that were measured; None when none was."""
        known = [r.compared for r in self.repeats if r.compared.measured is not None]
        if not known:
            return None
        return Judged(
            name=self.training.label,
            predicted_s=median(compared.predicted_s for compared in known),
            measured_s=median(c.measured.median for c in known if c.measured is not None),
        )


def planned_cases(catalog: Catalog) -> list[PlannedCase]:
    """The training cases that were predicted, in the catalog's order."""
    cases = []
    for training in catalog.training:
        repeats = []
        for repeat, run in enumerate(training.case.runs):
            plan = catalog.plans.get(run.path)
            if plan is not None and plan.prediction is not None:
                compared = predicted_run(run, plan.prediction)
                repeats.append(
                    Planned(run=run, repeat=repeat, prediction=plan.prediction, compared=compared)
                )
        if repeats:
            cases.append(PlannedCase(training=training, repeats=tuple(repeats)))
    return cases


def _first_device(case: PlannedCase) -> tuple[object, ...]:
    """What a run on one device shares with runs on more: workload, host and kind of device."""
    summary, ranks = case.training.first, case.training.case.header.ranks
    device = (ranks[0].hostname, ranks[0].device_kind, ranks[0].n_cores) if ranks else ()
    return (summary.model, case.batch, summary.dtype, device)


def cells(cases: Iterable[PlannedCase]) -> dict[str, list[PlannedCase]]:
    """Cases by cell, failed ones included, where any was measured; one device alone joins every
    cell that starts with that device."""
    every = list(cases)
    alone = [case for case in every if case.training.case.n_devices == 1]
    found: dict[str, list[PlannedCase]] = defaultdict(list)
    for case in every:
        if case.training.case.n_devices > 1:
            found[case.cell].append(case)
    for case in alone:
        joined = [own for own in found.values() if _first_device(own[0]) == _first_device(case)]
        for own in joined:
            own.append(case)
        if not joined:
            found[case.cell].append(case)
    return {cell: own for cell, own in found.items() if any(case.judged() for case in own)}
