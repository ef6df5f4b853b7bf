"""Pollux: data-parallel steps on nodes of 4 T4, by placement and local batch.

A placement such as `14` is one GPU on one node and four on another. Rows with one GPU give the time
of computing. One placement on a node gives how much slower its GPUs compute beside each other,
communication among them included, and one over nodes gives the bandwidth between them.
"""

from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from harness.domain.cluster import Cluster
from harness.errors import DataError
from harness.inputs import shorten
from harness.plan.importing.tables import Row, find_tables, has_columns, read_table
from harness.plan.importing.times import LayerTime, PlannedLayer, TimeKey
from harness.plan.layouts.degrees import ParallelLayout
from harness.plan.simulate.simulator import Simulator
from harness.plan.validation import points

_PLACEMENTS = ("placement", "local_bsz", "step_time")
_SCALABILITY = ("num_nodes", "num_replicas", "local_bsz", "step_time")

# Parameters (millions) and FLOPs (relative) of each part of a model, by the set's data set. Their
# sum does not count, because bandwidth is calibrated, but how they spread over the layers does.
_MODELS: dict[str, tuple[str, tuple[tuple[float, float], ...]]] = {
    "cifar10": (
        "ResNet18",
        ((0.002, 0.1), (0.15, 1.0), (0.53, 0.9), (2.1, 0.9), (8.4, 0.9), (0.005, 0.01)),
    ),
    "imagenet": (
        "ResNet50",
        ((0.01, 0.24), (0.22, 1.36), (1.22, 2.08), (7.1, 2.94), (14.96, 1.62), (2.05, 0.01)),
    ),
}
_UNKNOWN = ("model of 100 MB", ((2.5, 1.0),) * 10)
_MOST_NODES = 64  # the bandwidth between them is found by 30 predictions
# Of max(0, ring / B - o t1) fitted to all points: mean of 8.9 % (ResNet18) and 6.6 % (ResNet50).
_TRIVIAL = 0.078

_KIND, _LATENCY_S = "Tesla T4", 20e-6
# Forward takes a third of forward and backward.
_FORWARD = 1 / 3


class _PolluxRun(NamedTuple):
    """One measured step.

    Attributes:
        placement: number of GPUs of each node.
        is_placed: it was measured, not spread evenly here.
    """

    placement: tuple[int, ...]
    local: int
    measured_s: float
    is_placed: bool


class _Job:
    """One model's runs."""

    def __init__(self, name: str, runs: Sequence[_PolluxRun]) -> None:
        model, parts = _MODELS.get(name, _UNKNOWN)
        self.name = f"{model} ({name})"
        self._alone = points.medians(
            (run.local, run.measured_s) for run in runs if run.placement == (1,)
        )
        self._simulator = cache(self._make_simulator)
        self._layers = [
            PlannedLayer(f"part{k}", round(m * 4e6), 4) for k, (m, _) in enumerate(parts)
        ]
        total = sum(flops for _, flops in parts)
        self._shares = [flops / total for _, flops in parts]
        # Nothing but the node slows one placement, and nothing but links between nodes the other.
        self.inside = _most([r for r in runs if len(r.placement) == 1 < sum(r.placement)])
        self.between = _most([r for r in runs if {1} == {*r.placement} and len(r.placement) > 1])
        self._slowdown = points.medians(
            (run.local, max(0.0, run.measured_s / self._alone[run.local] - 1))
            for run in self.inside
            if run.local in self._alone
        )
        self.bandwidth = points.MOST_BYTES_PER_S
        known = [run for run in self.between if run.local in self._alone]
        self.are_links_known = bool(known)
        if known:
            self.bandwidth = points.solve_bandwidth(
                lambda k, rate: self.case(known[k], rate).step_s(),
                [run.measured_s for run in known],
            )

    @property
    def slowdown(self) -> float:
        """Relative; median over the local batches of the calibrating placement."""
        return median(self._slowdown.values()) if self._slowdown else 0.0

    def notes(self) -> list[str]:
        """What was calibrated and assumed."""
        given = ["one GPU's rows give the time of computing"]
        if self._slowdown:
            given += [f"{_gpus(self.inside)} of a node compute {self.slowdown:.0%} slower"]
        if self.are_links_known:
            rate = points.bandwidth_words(self.bandwidth)
            given += [f"{_gpus(self.between)} give {rate} between nodes"]
        return [
            f"{self.name}: {'; '.join(given)}",
            f"{self.name}: assumed: PyTorch's buckets overlap backward, rings",
        ]

    def case(self, run: _PolluxRun, bandwidth: float | None = None) -> points.SimulatedRun:
        """At a bandwidth, or the calibrated one, and the calibrated slowdown."""
        if run.local not in self._alone:
            raise points.NotExpressedError("no row with one GPU has its local batch")
        if max(run.placement) > 1 and not self._slowdown:
            raise points.NotExpressedError("no row with several GPUs of one node gives their times")
        if len(run.placement) > 1 and not self.are_links_known:
            raise points.NotExpressedError("no row with one GPU on each node gives the bandwidth")
        simulator = self._simulator(run.placement, bandwidth or self.bandwidth)
        n = sum(run.placement)
        return points.laid_out(simulator, ParallelLayout(dp=n), n * run.local)

    def _make_simulator(self, placement: tuple[int, ...], bandwidth: float) -> Simulator:
        cluster = _cluster(placement, bandwidth)
        return points.chain_simulator(self.name, self._layers, self._times(max(placement)), cluster)

    def _times(self, n_beside: int) -> dict[TimeKey, list[LayerTime]]:
        """Of the layers where so many GPUs of a node compute; each adds to the slowdown."""
        n_measured = sum(self.inside[0].placement) if self.inside else 2
        part, times = (n_beside - 1) / (n_measured - 1), {}
        for local, alone_s in self._alone.items():
            t = alone_s * (1 + part * self._slowdown.get(local, self.slowdown))
            times[TimeKey(_KIND, local)] = [
                LayerTime(s * t * _FORWARD, s * t * (1 - _FORWARD)) for s in self._shares
            ]
        return times


def _most(runs: Sequence[_PolluxRun]) -> list[_PolluxRun]:
    """The runs on most GPUs; of placed ones, if there are any."""
    placed = [run for run in runs if run.is_placed] or runs
    most = max((run.placement for run in placed), key=sum, default=())
    return [run for run in placed if run.placement == most]


def _cluster(placement: tuple[int, ...], bandwidth: float) -> Cluster:
    n_each = max(placement)
    full = Cluster.uniform(
        len(placement),
        n_each,
        inside_bytes_per_s=points.MOST_BYTES_PER_S,  # what these links cost is in the slowdown
        between_bytes_per_s=bandwidth,
        memory_bytes=2**50,
        kind=_KIND,
        latency_s=_LATENCY_S,
    )
    return full.part(i * n_each + j for i, n in enumerate(placement) for j in range(n))


def _spread(row: Row) -> tuple[int, ...]:
    """GPUs of each node, where a row gives only both numbers: as even as possible."""
    nodes = row.count("num_nodes", 1, _MOST_NODES)
    replicas = row.count("num_replicas", 1, points.MOST_DEVICES)
    if nodes > replicas:
        raise DataError(f"{row.where}: {replicas} replicas cannot use {nodes} nodes: swap them")
    each, more = divmod(replicas, nodes)
    return tuple(each + (k < more) for k in range(nodes))


def _placement(row: Row) -> tuple[int, ...]:
    text = row.text("placement")
    if not text.isascii() or not text.isdigit() or "0" in text:
        raise DataError(f"{row.where}: placement {shorten(text)}: write GPUs of each node, as 14")
    if len(text) > _MOST_NODES:
        raise DataError(f"{row.where}: {len(text)} nodes: {_MOST_NODES} are the most")
    return tuple(map(int, text))


def _runs(folder: Path) -> Iterator[_PolluxRun]:
    for path in _tables(folder):
        is_placed = has_columns(path, _PLACEMENTS[:1])
        columns = _PLACEMENTS if is_placed else _SCALABILITY
        for row in read_table(path, columns):
            if row.text(columns[0]) == columns[0]:
                continue  # a header again, where logs were joined
            placement = _placement(row) if is_placed else _spread(row)
            yield _PolluxRun(placement, row.count("local_bsz"), row.seconds("step_time"), is_placed)


def _tables(folder: Path) -> list[Path]:
    return sorted({*find_tables(folder, _PLACEMENTS), *find_tables(folder, _SCALABILITY)})


def _folders(folder: Path) -> list[Path]:
    return [p for p in (folder, *sorted(folder.glob("*/"))) if _tables(p)]


def read(folder: Path) -> points.Published:
    """All models of a folder, each in a folder of its own."""
    steps: list[points.MeasuredStep] = []
    notes: list[str] = []
    for path in _folders(folder):
        runs = list(_runs(path))
        job = _Job(path.resolve().name, runs)
        steps += [_point(job, run) for run in runs]
        notes += job.notes()
    return points.Published(
        steps,
        notes,
        trivial_median_error=_TRIVIAL if {p.name for p in _folders(folder)} == {*_MODELS} else None,
        lacks="a bandwidth between nodes that depends on their number and on the GPUs of each",
    )


def _point(job: _Job, run: _PolluxRun) -> points.MeasuredStep:
    calibrates = ""
    if run.placement == (1,):
        calibrates = "the time of computing is that of this row"
    elif run.placement in {other.placement for other in job.inside}:
        calibrates = "the slowdown within a node is from this placement"
    elif run.placement in {other.placement for other in job.between}:
        calibrates = "the bandwidth between nodes is from this placement"
    return points.MeasuredStep(
        name=f"{_gpus([run])}, {run.local} samples each",
        cell=f"{job.name}, {run.local} samples each",
        samples=run.local * sum(run.placement),
        measured_s=run.measured_s,
        build=partial(job.case, run),
        calibrates=calibrates,
        part=job.name,
        group=f"on {len(run.placement)} nodes of up to {max(run.placement)} GPUs",
    )


def _gpus(runs: Sequence[_PolluxRun]) -> str:
    """The GPUs of a placement that all runs have, in words."""
    return f"{'+'.join(map(str, runs[0].placement))} GPUs"


READER = points.SetReader(
    "CSVs with placement or num_nodes, local_bsz and step_time", lambda p: bool(_folders(p)), read
)
