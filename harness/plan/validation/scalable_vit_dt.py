"""ViT-B/16 by DeepSpeed without ZeRO: epochs of each rank, by GPUs and batch.

Gradients are all-reduced after the backward pass, in one piece. Of each cluster and batch, the run
on one GPU gives the time of computing and the smallest run on several the bandwidth. Other runs on
as many of the same GPUs, with another share of the data, repeat that step, so they are not judged.
"""

import math
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from msgspec.structs import replace

from harness.domain.cluster import Cluster
from harness.errors import DataError
from harness.inputs import find_number
from harness.plan.importing.tables import Row, has_columns, read_table
from harness.plan.importing.times import LayerTime, PlannedLayer, TimeKey
from harness.plan.layouts.degrees import ParallelLayout
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.validation import points

_COLUMNS = ("Rank", "Epoch", "Computation_Time", "GPU_ID", "GPU_Name")
_FILE = "metrics.csv"
# p0.5_b16_e10_r1: half of the data, 16 samples on each GPU, 10 epochs.
_NAME = re.compile(r"p(?P<share>[0-9.]+)_b(?P<batch>[0-9]+)_e[0-9]+(_r[0-9]+)?")
_N_GPUS = re.compile(r"(?P<n>[0-9]+)[_-]?GPUs?", re.IGNORECASE)

_N_SAMPLES = 50_000  # CIFAR-10's training set
_N_LAYERS, _PARAMETERS = 12, 86_567_656
_FORWARD = 1 / 3


class _DeepSpeedRun(NamedTuple):
    """One directory.

    Attributes:
        setting: path of the cluster's directory, from the set's.
        share: of the data in an epoch.
        local: samples of one GPU in a step.
        n_each: GPUs of each node.
        kinds: of the GPUs, by rank.
        step_s: median over epochs of the slowest rank.
    """

    setting: str
    share: float
    local: int
    n_devices: int
    n_each: int
    kinds: tuple[str, ...]
    step_s: float

    @property
    def size(self) -> tuple[int, float, tuple[str, ...]]:
        """By which runs repeat one another; the smallest one calibrates."""
        return self.n_devices, -self.share, self.kinds


class _Group:
    """Runs of one cluster and batch."""

    def __init__(self, runs: Sequence[_DeepSpeedRun]) -> None:
        self.runs = runs
        alone = points.medians(
            ((run.kinds[0], run.share), run.step_s) for run in runs if run.n_devices == 1
        )
        # Of each kind of GPU, with the largest share of the data.
        self._alone_s = {kind: alone[kind, share] for kind, share in sorted(alone)}
        several = [run for run in runs if run.n_devices > 1 and not self._why_not(run)]
        size = min((run.size for run in several), default=None)
        self.calibrating = pairs = [run for run in several if run.size == size]
        self.bandwidth = points.MOST_BYTES_PER_S
        if pairs:
            self.bandwidth = points.solve_bandwidth(
                lambda k, rate: self.case(pairs[k], rate).step_s(), [run.step_s for run in pairs]
            )

    def _why_not(self, run: _DeepSpeedRun) -> str:
        """Why a run cannot be predicted, or nothing."""
        for kind in run.kinds:
            if kind not in self._alone_s:
                return f"no run on one {kind} has its batch on this cluster"
        if run.n_each not in (1, run.n_devices):
            return "no run tells the links within its nodes from those between them"
        return ""

    def case(self, run: _DeepSpeedRun, bandwidth: float | None = None) -> points.SimulatedRun:
        """At a bandwidth, or the calibrated one."""
        why_not, n = self._why_not(run), run.n_devices
        if why_not:
            raise points.NotExpressedError(why_not)
        each = _PARAMETERS * 4 // _N_LAYERS
        layers = [PlannedLayer(f"layer{k}", each, 4) for k in range(_N_LAYERS)]
        layer_s = {kind: self._alone_s[kind] / _N_LAYERS for kind in run.kinds}
        times = {
            TimeKey(kind, run.local): [LayerTime(s * _FORWARD, s * (1 - _FORWARD))] * _N_LAYERS
            for kind, s in layer_s.items()
        }
        options = SimulatorOptions(overlap=False, bucket_bytes=2**50)
        cluster = _cluster(run, bandwidth or self.bandwidth)
        simulator = points.chain_simulator("vit_b_16", layers, times, cluster, options)
        return points.laid_out(simulator, ParallelLayout(dp=n), n * run.local)


def _cluster(run: _DeepSpeedRun, bandwidth: float) -> Cluster:
    uniform = Cluster.uniform(
        run.n_devices // run.n_each, run.n_each, inside_bytes_per_s=bandwidth, memory_bytes=2**50
    )
    devices = zip(uniform.devices, run.kinds, strict=True)
    return uniform.with_devices(replace(device, kind=kind) for device, kind in devices)


def _run(path: Path, root: Path) -> _DeepSpeedRun | None:
    """A directory's run; None if its name, or its parent's, says something else."""
    name, gpus = _NAME.fullmatch(path.parent.name), _N_GPUS.fullmatch(path.parent.parent.name)
    share = None if name is None else find_number(name["share"])
    if name is None or gpus is None or not share:
        return None
    rows = read_table(path, _COLUMNS)
    n, local = max(1, int(gpus["n"][:6])), max(1, int(name["batch"][:9]))
    n_steps = math.ceil(_N_SAMPLES * share / (local * n))
    return _DeepSpeedRun(
        setting=os.path.relpath(path.parent.parent.parent, root),
        share=share,
        local=local,
        n_devices=n,
        n_each=len({row.text("GPU_ID") for row in rows}),
        kinds=_kinds(rows, n, path),
        step_s=_epoch_s(rows) / n_steps,
    )


def _kinds(rows: Sequence[Row], n: int, path: Path) -> tuple[str, ...]:
    """The kind of each rank's GPU."""
    kinds = {row.count("Rank", 0): row.text("GPU_Name") or "GPU" for row in rows}
    if len(kinds) != n:
        raise DataError(f"{path} has rows of {len(kinds)} ranks, its directory is of {n} GPUs")
    return tuple(kinds[rank] for rank in sorted(kinds))


def _epoch_s(rows: Sequence[Row]) -> float:
    """Median of the slowest rank's epochs, without the first where there are others."""
    slowest: dict[int, float] = defaultdict(float)
    for row in rows:
        epoch = row.count("Epoch", 0)
        slowest[epoch] = max(slowest[epoch], row.seconds("Computation_Time"))
    epochs = [slowest[epoch] for epoch in sorted(slowest)]
    return median(epochs[1:] or epochs)


def read(folder: Path) -> points.Published:
    """All runs below a folder."""
    found: dict[tuple[str, int], list[_DeepSpeedRun]] = defaultdict(list)
    others: list[Path] = []
    for path in sorted(folder.rglob(_FILE)):
        run = _run(path, folder)
        if run is None:
            others.append(path)
        else:
            found[run.setting, run.local].append(run)
    if not found:
        raise DataError(f"{folder} has no {_FILE} in N_GPUs/pX_bY_eZ: name the directories so")
    groups = [_Group(runs) for runs in found.values()]
    steps = [_point(group, run) for group in groups for run in group.runs]
    notes = [
        "calibrated on each cluster and batch: the run on one GPU, and the smallest on several",
        "assumed: 346 MB of FP32 gradients in one ring after backward; in mixed precision the "
        "bandwidth below counts twice as many bytes as travel",
        *(
            f"{pair.setting}, {pair.local} samples each: "
            f"{points.bandwidth_words(group.bandwidth)} from {pair.n_devices} GPUs"
            for group in groups
            for pair in group.calibrating[:1]
        ),
        *(
            f"left out: {len(others)} {_FILE} whose directories are not named N_GPUs/pX_bY_eZ, "
            f"such as {path}"
            for path in others[:1]
        ),
    ]
    return points.Published(steps, notes)


def _point(group: _Group, run: _DeepSpeedRun) -> points.MeasuredStep:
    calibrates = ""
    if run.n_devices == 1:
        calibrates = "the time of computing is that of this GPU"
    elif run.kinds in {pair.kinds for pair in group.calibrating}:
        calibrates = "the bandwidth is from a run on as many of these GPUs"
    return points.MeasuredStep(
        name=f"{run.n_devices} GPUs, {run.share:g} of the data",
        cell=f"{run.setting}, {run.local} samples each",
        samples=run.local * run.n_devices,
        measured_s=run.step_s,
        build=partial(group.case, run),
        calibrates=calibrates,
        part=run.setting,
    )


def matches(folder: Path) -> bool:
    """Whether a run's directory lies below it."""
    return any(
        _NAME.fullmatch(path.parent.name) and has_columns(path, _COLUMNS)
        for path in folder.rglob(_FILE)
    )


READER = points.SetReader("metrics.csv in N_GPUs/pX_bY_eZ", matches, read)
