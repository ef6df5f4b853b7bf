"""PipeTransformer: images/s of ViT-B/16 by length of the pipelines and chunks, global batch 400.

The rate of one pipeline hardly grows with its length or its chunks, because one process drives
each pipeline and loads its images. So a pipeline counts as one device, whose rate comes from the
shortest pipelines with fewest chunks, with the synchronisation of their gradients.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from harness.domain.cluster import Cluster
from harness.plan.importing.tables import Row, read_tables
from harness.plan.importing.times import LayerTime, PlannedLayer, TimeKey
from harness.plan.layouts.degrees import ParallelLayout
from harness.plan.validation import points

_COLUMNS = ("global_batch", "pipe_length", "chunks_over_pipe_length", "images_per_s")
_KIND = "Quadro RTX 5000"


class _PipelineRun(NamedTuple):
    batch: int
    length: int
    chunks: int
    images_per_s: float

    @property
    def size(self) -> tuple[int, int, int]:
        """By which runs repeat one another."""
        return self.length, self.chunks, self.batch


class _PipelineRates:
    def __init__(self, runs: Sequence[_PipelineRun]) -> None:
        self.n_devices = max(run.length for run in runs)
        size = min(run.size for run in runs)
        self.calibrating = [run for run in runs if run.size == size]
        self.images_per_s = median(run.images_per_s for run in self.calibrating)

    def case(self, run: _PipelineRun) -> points.SimulatedRun:
        """As many replicas as pipelines."""
        n, known = self.n_devices // run.length, self.calibrating[0]
        if run.length * n != self.n_devices or run.batch % n:
            raise points.NotExpressedError(f"pipelines of {run.length} on {self.n_devices} devices")
        each_s = self.n_devices // known.length / self.images_per_s
        row = [LayerTime(each_s / 3, 2 * each_s / 3)]
        cluster = Cluster.uniform(1, n, inside_bytes_per_s=1e10, memory_bytes=2**50, kind=_KIND)
        layers = [PlannedLayer("pipeline", 4, 4)]
        simulator = points.chain_simulator("vit_b_16", layers, {TimeKey(_KIND, 1): row}, cluster)
        return points.laid_out(simulator, ParallelLayout(dp=n), run.batch)


def _parse(row: Row) -> _PipelineRun:
    return _PipelineRun(
        batch=row.count("global_batch"),
        length=row.count("pipe_length", 1, points.MOST_DEVICES),
        chunks=row.count("chunks_over_pipe_length"),
        images_per_s=row.seconds("images_per_s"),
    )


def read(folder: Path) -> points.Published:
    runs = [_parse(row) for row in read_tables(folder, _COLUMNS)]
    given = _PipelineRates(runs)
    steps = [
        points.MeasuredStep(
            name=f"pipelines of {run.length}, {run.chunks} chunks a device",
            cell="ViT-B/16",
            samples=run.batch,
            measured_s=run.batch / run.images_per_s,
            build=partial(given.case, run),
            calibrates="the rate of a pipeline is from it" if run in given.calibrating else "",
        )
        for run in runs
    ]
    known = given.calibrating[0]
    notes = [
        f"calibrated: pipelines of {known.length} with {known.chunks} chunks a device give "
        f"{given.images_per_s * known.length / given.n_devices:.3g} images/s of each pipeline",
        "assumed: the process that drives and feeds a pipeline bounds it, whatever its length",
    ]
    return points.Published(steps, notes, missing=_missing)


def _missing(judged: Sequence[tuple[points.MeasuredStep, float]]) -> list[str]:
    gains = [p / point.measured_s for point, p in judged if point.measured_s is not None]
    if not gains or max(gains) < 1:
        return []
    return [
        "the gain of a longer pipeline is missing, because its stages have no times: at most "
        f"{max(gains) - 1:.0%} of a step"
    ]


READER = points.SetReader.of_tables("a CSV with pipe_length and images_per_s", _COLUMNS, read)
