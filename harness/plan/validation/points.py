"""Measured steps of others, as cases for the simulator, and the fit of a few amounts to them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple, TypeVar

import numpy as np
from scipy import optimize

from harness.domain.cluster import Cluster
from harness.domain.files import decode
from harness.domain.schedule import ScheduleName
from harness.domain.strategy import Strategy
from harness.errors import DataError
from harness.inputs import read_file
from harness.plan.importing.tables import find_tables
from harness.plan.importing.times import (
    LayerTime,
    PlannedLayer,
    TimeKey,
    chain_graph,
    layer_profile,
    without_collectives,
)
from harness.plan.layouts.degrees import ParallelLayout, profiled_layout
from harness.plan.simulate.network import Network
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator

T = TypeVar("T")
K = TypeVar("K")

# Of one measured step: the simulator takes seconds for more.
MOST_DEVICES, MOST_LAYERS = 1024, 1000


def load_json(path: Path, type_: type[T]) -> T:
    """A file of a set; raises DataError if it is missing or malformed."""
    data = read_file(path, "file of the set", DataError)
    return decode(data, type_, source=str(path), error=DataError)


def medians(values: Iterable[tuple[K, float]]) -> dict[K, float]:
    """Median of the values of each key, such as of the runs of one configuration."""
    found: dict[K, list[float]] = defaultdict(list)
    for key, value in values:
        found[key].append(value)
    return {key: median(own) for key, own in found.items()}


def fit_amounts(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients >= 0 whose sums of terms, a row for each value, come nearest to the values, all
    above 0 and relative to each."""
    terms = np.asarray(rows, dtype=np.float64) / np.asarray(values, dtype=np.float64)[:, None]
    return [float(one) for one in optimize.nnls(terms, np.ones(len(values)))[0]]


_N_HALVINGS = 30


def solve_all(
    predict: Callable[[int, float], float], measured: Sequence[float], low: float, high: float
) -> float:
    """The amount whose median error over several measurements is least in magnitude, at which the
    median of predicted / measured is 1; by bisection of its logarithm. The nearer bound if none is.

    Args:
        predict: of measurement k at an amount; falls as the amount grows.
    """
    a, b = math.log(low), math.log(high)
    for _ in range(_N_HALVINGS):
        amount = math.exp((a + b) / 2)
        ratio = median(predict(k, amount) / value for k, value in enumerate(measured))
        a, b = (math.log(amount), b) if ratio > 1 else (a, math.log(amount))
    return math.exp((a + b) / 2)


LEAST_BYTES_PER_S, MOST_BYTES_PER_S = 1e7, 1e12


def solve_bandwidth(predict: Callable[[int, float], float], measured: Sequence[float]) -> float:
    """The bandwidth that explains several measurements (`solve_all`)."""
    return solve_all(predict, measured, LEAST_BYTES_PER_S, MOST_BYTES_PER_S)


def bandwidth_words(rate: float) -> str:
    """A solved bandwidth, for people; at a bound it explains no measurement."""
    near = {LEAST_BYTES_PER_S: " or less", MOST_BYTES_PER_S: " or more"}
    bound = "".join(words for at, words in near.items() if math.isclose(rate, at, rel_tol=1e-3))
    return f"{rate / 1e9:.3g} GB/s{bound}"


class SimulatedRun(NamedTuple):
    """A strategy that was run, and a simulator of its model and cluster."""

    simulator: Simulator
    strategy: Strategy

    def step_s(self) -> float:
        """The predicted step."""
        return self.simulator.simulate(self.strategy).step_s


def chain_simulator(
    name: str,
    layers: Sequence[PlannedLayer],
    times: Mapping[TimeKey, Sequence[LayerTime]],
    cluster: Cluster,
    options: SimulatorOptions | None = None,
    *,
    n_parts: int = 1,
    takes_off: bool = False,
    recomputes: bool = False,
) -> Simulator:
    """Of a model whose layers follow one another (`chain_graph`), by their times, from which
    all-reduces of tensor parallelism are taken off if they are in them (`without_collectives`)."""
    graph = chain_graph(name, layers, 1, n_parts)
    if takes_off:
        network = Network(cluster)
        times = {
            key: without_collectives(graph, network, key, row, recomputes=recomputes)
            for key, row in times.items()
        }
    return Simulator(graph, layer_profile(graph, times), cluster, options=options)


def laid_out(
    simulator: Simulator,
    layout: ParallelLayout,
    batch: int,
    *,
    n_microbatches: int = 1,
    schedule: ScheduleName = "1f1b",
) -> SimulatedRun:
    strategy = profiled_layout(
        layout, simulator, batch, n_microbatches=n_microbatches, schedule=schedule
    )
    return SimulatedRun(simulator, strategy)


class NotExpressedError(DataError):
    """A measured step that graph, cluster and strategy cannot hold."""


def check_whole_microbatches(batch: int, microbatch: int, n_replicas: int) -> None:
    """Refuse a batch that is no multiple of the microbatches of all replicas."""
    if batch % (microbatch * n_replicas):
        raise NotExpressedError("its batch is no multiple of its microbatches")


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
        memory_bytes: measured peak of a device.
        calibrates: why it is not judged: a number was taken from it. Empty if it is judged.
    """

    name: str
    cell: str
    samples: float
    measured_s: float | None
    build: Callable[[], SimulatedRun]
    source_s: float | None = None
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
    missing: Callable[[Sequence[tuple[MeasuredStep, float]]], Sequence[str]] = lambda judged: ()


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
