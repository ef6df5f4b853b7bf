"""Measured steps of others, as cases for the simulator."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from harness.domain.strategy import Strategy
from harness.errors import DataError
from harness.plan.importing.tables import find_tables
from harness.plan.simulate.simulator import Simulator


class SimulatedRun(NamedTuple):
    """A strategy that was run, and a simulator of its model and cluster."""

    simulator: Simulator
    strategy: Strategy

    def step_s(self) -> float:
        """The predicted step."""
        return self.simulator.simulate(self.strategy).step_s


class NotExpressedError(DataError):
    """A measured step that graph, cluster and strategy cannot hold."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """One measured step.

    Attributes:
        name: of the strategy and what it ran on, for people.
        cell: model and cluster, in which points compete: the fastest is the right choice.
        part: of the set, with scores of its own, such as a model; empty if it has none.
        group: of points that may lack a term (`Published.lacks`), such as those on 2 nodes.
        samples: of the step.
        measured_s: None if the run failed, such as for want of memory.
        build: makes the case; raises NotExpressedError where it cannot be made.
        source_s: the prediction of the source's own predictor.
        trivial_s: the prediction of the trivial model.
        memory_bytes: measured peak of a device.
        calibrates: why it is not judged: a number was taken from it. Empty if it is judged.
    """

    name: str
    cell: str
    samples: float
    measured_s: float | None
    build: Callable[[], SimulatedRun]
    source_s: float | None = None
    trivial_s: float | None = None
    memory_bytes: float | None = None
    calibrates: str = ""
    part: str = ""
    group: str = ""


@dataclass(frozen=True)
class Published:
    """A data set.

    Attributes:
        notes: assumptions and calibrations, a line each.
        source_median_error: of the source's own predictor, as published, where its predictions
            are not.
        trivial_median_error: of the trivial model, as known, where it is not computed here.
        lacks: the term that groups of unlike error point to; empty if groups say nothing.
        missing: other terms that the prediction lacks, and how large each is.
    """

    points: Sequence[MeasuredStep]
    notes: Sequence[str] = ()
    source_median_error: float | None = None
    trivial_median_error: float | None = None
    lacks: str = ""
    missing: Callable[[Sequence[tuple[MeasuredStep, float]]], Sequence[str]] = field(
        default=lambda judged: ()
    )


class SetReader(NamedTuple):
    """Reads one data set.

    Attributes:
        looks_for: files by which it is known, for people.
        matches: whether a directory holds the set.
        read: all its points.
    """

    looks_for: str
    matches: Callable[[Path], bool]
    read: Callable[[Path], Published]

    @classmethod
    def of_tables(
        cls, looks_for: str, columns: Sequence[str], read: Callable[[Path], Published]
    ) -> SetReader:
        """Of CSV files with some columns, in one directory."""
        return cls(looks_for, lambda folder: bool(find_tables(folder, columns)), read)
