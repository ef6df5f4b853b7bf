"""ViT-B/16 by DeepSpeed without ZeRO: epochs of each rank, by GPUs and batch.

Gradients are all-reduced after the backward pass, in one piece. Of each cluster and batch, the run
on one GPU gives the time of computing and the smallest run on several the bandwidth.
"""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import NamedTuple

from harness.domain.cluster import Cluster
from harness.errors import DataError
from harness.inputs import find_number
from harness.plan.importing.tables import Row, header_of, read_table
from harness.plan.layers import LayerTime, PlannedLayer, TimeKey, chain_graph, layer_profile
from harness.plan.layouts.degrees import ParallelLayout, profiled_layout
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator
from harness.plan.validation.fitting import solve_all
from harness.plan.validation.points import (
    MeasuredStep,
    NotExpressedError,
    Published,
    SetReader,
    SimulatedRun,
)

_COLUMNS = ("Rank", "Epoch", "Computation_Time", "GPU_ID", "GPU_Name")
_FILE = "metrics.csv"
# p0.5_b16_e10_r1: half of the data, 16 samples on each GPU, 10 epochs.
_NAME = re.compile(r"p(?P<share>[0-9.]+)_b(?P<batch>[0-9]+)_e[0-9]+(_r[0-9]+)?")
_N_GPUS = re.compile(r"(?P<n>[0-9]+)[_-]?GPUs?", re.IGNORECASE)

_N_SAMPLES = 50_000  # CIFAR-10's training set
_N_LAYERS, _PARAMETERS = 12, 86_567_656
_LEAST_BYTES_PER_S, _MOST_BYTES_PER_S = 1e7, 1e12
_FORWARD = 1 / 3


class _DeepSpeedRun(NamedTuple):
    """One directory.

    Attributes:
        setting: path of the cluster's directory, from the set's.
        share: of the data in an epoch.
        local: samples of one GPU in a step.
        step_s: median over epochs of the slowest rank.
    """

    setting: str
    share: float
    local: int
    n_devices: int
    is_one_node: bool
    device_kind: str
    step_s: float


class _Group:
    """Runs of one cluster and batch."""

    def __init__(self, runs: Sequence[_DeepSpeedRun]) -> None:
        self.runs = runs
        alone = [run for run in runs if run.n_devices == 1]
        several = sorted(
            (run for run in runs if run.n_devices > 1), key=lambda run: (run.n_devices, -run.share)
        )
        self.alone = max(alone, key=lambda run: run.share, default=None)
        self.pair = several[0] if several and self.alone else None
        self.bandwidth = _MOST_BYTES_PER_S
        if self.pair is not None:
            pair = self.pair
            self.bandwidth = solve_all(
                lambda _, rate: self._case(pair, rate).step_s(),
                [pair.step_s],
                _LEAST_BYTES_PER_S,
                _MOST_BYTES_PER_S,
            )

    def case(self, run: _DeepSpeedRun) -> SimulatedRun:
        """At the calibrated bandwidth."""
        if self.alone is None:
            raise NotExpressedError("no run on one GPU has its batch on this cluster")
        return self._case(run, self.bandwidth)

    def _case(self, run: _DeepSpeedRun, bandwidth: float) -> SimulatedRun:
        assert self.alone is not None, "a case needs the time of one GPU"
        n = run.n_devices
        cluster = Cluster.uniform(
            1 if run.is_one_node else n,
            n if run.is_one_node else 1,
            inside_bytes_per_s=bandwidth,
            memory_bytes=2**50,
            kind=run.device_kind,
        )
        each = _PARAMETERS * 4 // _N_LAYERS
        graph = chain_graph(
            "vit_b_16", [PlannedLayer(f"layer{k}", each, 4) for k in range(_N_LAYERS)], 1
        )
        layer_s = self.alone.step_s / _N_LAYERS
        time = LayerTime(layer_s * _FORWARD, layer_s * (1 - _FORWARD))
        profile = layer_profile(graph, {TimeKey(run.device_kind, run.local): [time] * _N_LAYERS})
        options = SimulatorOptions(overlap=False, bucket_bytes=2**50)
        simulator = Simulator(graph, profile, cluster, options=options)
        strategy = profiled_layout(ParallelLayout(dp=n), simulator, n * run.local)
        return SimulatedRun(simulator, strategy)


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
        is_one_node=len({row.text("GPU_ID") for row in rows}) > 1,
        device_kind=rows[0].text("GPU_Name") or "GPU",
        step_s=_epoch_s(rows) / n_steps,
    )


def _epoch_s(rows: Sequence[Row]) -> float:
    """Median of the slowest rank's epochs, without the first where there are others."""
    slowest: dict[int, float] = defaultdict(float)
    for row in rows:
        epoch = row.count("Epoch", 0)
        slowest[epoch] = max(slowest[epoch], row.seconds("Computation_Time"))
    epochs = [slowest[epoch] for epoch in sorted(slowest)]
    return median(epochs[1:] or epochs)


def _groups(root: Path) -> Iterator[_Group]:
    found: dict[tuple[str, int], list[_DeepSpeedRun]] = defaultdict(list)
    for path in sorted(root.rglob(_FILE)):
        run = _run(path, root)
        if run is not None:
            found[run.setting, run.local].append(run)
    yield from (_Group(runs) for runs in found.values())


def read(folder: Path) -> Published:
    """All runs below a folder."""
    groups = list(_groups(folder))
    if not groups:
        raise DataError(f"{folder} has no {_FILE} in N_GPUs/pX_bY_eZ: name the directories so")
    points = [_point(group, run) for group in groups for run in group.runs]
    notes = [
        "calibrated on each cluster and batch: the run on one GPU, and the smallest on several",
        "assumed: 346 MB of FP32 gradients in one ring after backward; in mixed precision the "
        "bandwidth below counts twice as many bytes as travel",
        *(
            f"{group.pair.setting}, {group.pair.local} samples each: {group.bandwidth / 1e9:.3g} "
            f"GB/s from {group.pair.n_devices} GPUs"
            for group in groups
            if group.pair is not None
        ),
    ]
    return Published(points, notes)


def _point(group: _Group, run: _DeepSpeedRun) -> MeasuredStep:
    calibrates = ""
    if run is group.alone:
        calibrates = "the time of computing is that of this run"
    elif run is group.pair:
        calibrates = "the bandwidth is from this run"
    return MeasuredStep(
        name=f"{run.n_devices} GPUs, {run.share:g} of the data",
        cell=f"{run.setting}, {run.local} samples each",
        samples=run.local * run.n_devices,
        measured_s=run.step_s,
        build=partial(group.case, run),
        calibrates=calibrates,
    )


def matches(folder: Path) -> bool:
    """Whether a run's directory lies below it."""
    return any(
        _NAME.fullmatch(path.parent.name) and set(_COLUMNS) <= set(header_of(path))
        for path in folder.rglob(_FILE)
    )


READER = SetReader("metrics.csv in N_GPUs/pX_bY_eZ", matches, read)
