"""torchgpipe: GPipe with checkpointing on 1 to 8 P40, by balance, batch and chunks.

The times of layers are unpublished, but torchgpipe balances stages by them, so stages count as
equal. Each model's smallest pipeline of several devices gives the time of a sample. Every chunk but
the last runs forward again (torchgpipe's `except_last`); a single one does, too (`always`).
"""

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from harness.domain.cluster import Cluster
from harness.errors import DataError
from harness.inputs import find_ints, shorten
from harness.plan.importing.tables import Row, read_tables
from harness.plan.importing.times import LayerTime, PlannedLayer, TimeKey
from harness.plan.layouts.degrees import ParallelLayout
from harness.plan.validation import points

_COLUMNS = ("model", "experiment", "batch", "chunks", "layers_per_partition", "samples_per_s")
_KIND = "Tesla P40"
_BACKWARD = 2.0  # times as long as forward
_PLAIN_BASELINE = "baseline"


class _GPipeRun(NamedTuple):
    """One measured run; a baseline has no stages and recomputes nothing."""

    model: str
    experiment: str
    batch: int
    chunks: int
    n_stages: int
    samples_per_s: float

    @property
    def size(self) -> tuple[int, int, int]:
        """Of the pipeline, by which runs repeat one another."""
        return self.n_stages, self.chunks, self.batch

    @property
    def n_slots(self) -> int:
        """Of the pipeline: chunks, and stages to fill it."""
        return self.chunks + self.n_stages - 1

    @property
    def backward(self) -> float:
        """Mean over the slots of backward and the forward before it, in forwards."""
        if self.experiment == _PLAIN_BASELINE:
            return _BACKWARD
        return _BACKWARD + 1 - (self.chunks > 1) / self.n_slots


class _Model:
    """One model's runs."""

    def __init__(self, runs: Sequence[_GPipeRun]) -> None:
        several = [run for run in runs if run.n_stages > 1]
        size = min((run.size for run in several), default=None)
        self.calibrating = [run for run in several if run.size == size]

    def case(self, run: _GPipeRun) -> points.SimulatedRun:
        """Equal stages at the calibrated time of a sample."""
        if not self.calibrating:
            raise points.NotExpressedError("no pipeline of its model gives the time of a sample")
        given, n = self.calibrating[0], run.n_stages
        rate = median(one.samples_per_s for one in self.calibrating)
        each_s = given.n_stages * given.chunks / given.n_slots / rate
        forward_s = each_s / (1 + given.backward) / n
        layers = [PlannedLayer(f"stage{k}", 4, 4) for k in range(n)]
        row = [LayerTime(forward_s, run.backward * forward_s)] * n
        cluster = Cluster.uniform(1, n, inside_bytes_per_s=1e10, memory_bytes=2**50, kind=_KIND)
        simulator = points.chain_simulator(run.model, layers, {TimeKey(_KIND, 1): row}, cluster)
        layout = ParallelLayout(pp=n, cuts=tuple(range(1, n)))
        return points.laid_out(
            simulator, layout, run.batch, n_microbatches=run.chunks, schedule="gpipe"
        )


def _parse(row: Row) -> _GPipeRun:
    parts = [part for part in row.text("layers_per_partition").split(",") if part.strip()]
    if find_ints(parts, 1) is None:
        raise DataError(
            f"{row.where}: layers_per_partition {shorten(row.text('layers_per_partition'))}: write "
            "the layers of each stage, as 3,4,5"
        )
    run = _GPipeRun(
        model=row.text("model"),
        experiment=row.text("experiment"),
        batch=row.count("batch"),
        chunks=row.count("chunks"),
        n_stages=max(1, len(parts)),
        samples_per_s=row.seconds("samples_per_s"),
    )
    if run.n_stages > points.MOST_DEVICES:
        raise DataError(f"{row.where}: {run.n_stages} stages: {points.MOST_DEVICES} are the most")
    if run.chunks > run.batch:
        raise DataError(f"{row.where}: {run.chunks} chunks of a batch of {run.batch}: swap them")
    return run


def read(folder: Path) -> points.Published:
    groups: dict[str, list[_GPipeRun]] = defaultdict(list)
    for run in map(_parse, read_tables(folder, _COLUMNS)):
        groups[run.model].append(run)
    steps: list[points.MeasuredStep] = []
    notes = []
    for name, runs in groups.items():
        model = _Model(runs)
        steps += [
            points.MeasuredStep(
                name=f"{run.model} {run.experiment}",
                cell=run.model,
                samples=run.batch,
                measured_s=run.batch / run.samples_per_s,
                build=partial(model.case, run),
                calibrates="the time of a sample is from this run"
                if run in model.calibrating
                else "",
                part=run.model,
            )
            for run in runs
        ]
        if model.calibrating:
            notes.append(f"{name}: {model.calibrating[0].experiment} gives the time of a sample")
    notes.append(
        "assumed: stages of equal time, backward twice the forward, and forward again for all "
        "chunks but the last"
    )
    return points.Published(steps, notes, missing=_missing)


def _missing(judged: Sequence[tuple[points.MeasuredStep, float]]) -> list[str]:
    """How far pipelines are from equal stages."""
    late = [
        (predicted / point.measured_s - 1, point.name)
        for point, predicted in judged
        if point.measured_s is not None and predicted < point.measured_s
    ]
    if not late:
        return []
    worst, name = min(late)
    return [
        "imbalance of stages, copies between devices and the size of chunks are missing: "
        f"{len(late)} runs take longer than predicted, at most {-worst:.0%} of their step ({name})"
    ]


READER = points.SetReader.of_tables(
    "a CSV with layers_per_partition and samples_per_s", _COLUMNS, read
)
