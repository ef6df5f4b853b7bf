"""Predict data-parallel epochs on a cluster from epochs on one GPU of each kind.

A step is the slowest GPU's step (from its single-GPU epochs) plus an all-reduce of all parameters,
which the simulator predicts for the cluster's links and NICs. An epoch is the sum of its steps.
With `balanced`, each GPU gets samples in proportion to its speed.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.domain.cluster import Cluster, Device, Link, Node
from harness.domain.graph import Graph, Operator
from harness.domain.profile import Measurement, Profile
from harness.domain.strategy import Strategy
from harness.errors import PlanError
from harness.plan import builders
from harness.plan.search.space import proportional_shares
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.report import device_seconds
from harness.plan.simulate.simulator import Simulator
from harness.plot.imports.deepspeed_log import parse_deepspeed_log
from harness.plot.imports.epoch_csv import parse_epoch_csv

_ONE_BUCKET = 2**62
_MEMORY_BYTES, _LATENCY_S = 8 * 2**30, 50e-6


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training setup.

    Attributes:
        parameter_bytes: of all gradients that are all-reduced in each step.
        batch_per_device: samples per GPU and step.
        sample_s: seconds per sample on a single GPU, all phases, by kind of device.
    """

    parameter_bytes: int
    batch_per_device: int
    sample_s: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class EpochPrediction:
    """Seconds of an epoch, and of one of its steps by part (on the slowest GPU)."""

    epoch_s: float
    step_s: float
    compute_s: float
    exposed_s: float
    n_steps: int


def predict_epoch(
    cluster: Cluster, training: Training, *, samples: int, balanced: bool = False
) -> EpochPrediction:
    """Predict an epoch on all devices of a cluster.

    Raises:
        PlanError: a kind of device has no measured single-GPU time.
        ClusterError: two devices have no link.
    """
    batch = training.batch_per_device * cluster.n_devices
    graph = Graph(
        name="model",
        batch=batch,
        operators=[
            Operator(
                name="model",
                kind="other",
                shape={"sample": batch},
                parameter_bytes=training.parameter_bytes,
            )
        ],
    )
    simulator = Simulator(
        graph,
        _profile(cluster, training, batch),
        cluster,
        # DeepSpeed's ZeRO-0 synchronises after the backward pass.
        options=SimulatorOptions(overlap=False, bucket_bytes=_ONE_BUCKET),
    )
    simulation = simulator.simulate(_strategy(cluster, training, graph, batch, balanced=balanced))
    parts = [device_seconds(simulation, d) for d in range(cluster.n_devices)]
    compute_s = max(p["forward"] + p["backward"] for p in parts)
    n_steps = math.ceil(samples / batch)
    return EpochPrediction(
        epoch_s=n_steps * simulation.step_s,
        step_s=simulation.step_s,
        compute_s=compute_s,
        exposed_s=simulation.step_s - compute_s,
        n_steps=n_steps,
    )


def _profile(cluster: Cluster, training: Training, batch: int) -> Profile:
    points = []
    for kind in dict.fromkeys(device.kind for device in cluster.devices):
        if kind not in training.sample_s:
            raise PlanError(
                f"there is no single-GPU time of {kind!r}, only of {', '.join(training.sample_s)}: "
                "measure one, or give the device a measured kind and its speed relative to that"
            )
        # The measured sum is split into a third forward and two thirds backward.
        seconds = training.sample_s[kind] * batch
        points.append(
            Measurement(
                device_kind=kind,
                operator="model",
                shape={"sample": batch},
                forward_s=seconds / 3,
                backward_s=2 * seconds / 3,
            )
        )
    return Profile(model="model", measurements=points)


def _strategy(
    cluster: Cluster, training: Training, graph: Graph, batch: int, *, balanced: bool
) -> Strategy:
    if cluster.n_devices == 1:
        return builders.single(graph, batch)
    shares = None
    if balanced:
        seconds = [training.sample_s[d.kind] / d.speed for d in cluster.devices]
        shares = proportional_shares(seconds, batch)
    return builders.ddp(graph, cluster, batch, shares=shares)


def ethernet_cluster(
    kinds: Sequence[str],
    *,
    nic_bytes_per_s: float | Sequence[float],
    speeds: Sequence[float] | None = None,
) -> Cluster:
    """A cluster with one GPU per node and links at the speed of the slower NIC.

    Args:
        nic_bytes_per_s: of all nodes, or a sequence with one per node.
    """
    n = len(kinds)
    rates = (
        [float(nic_bytes_per_s)] * n
        if isinstance(nic_bytes_per_s, (int, float))
        else list(nic_bytes_per_s)
    )
    nodes = [
        Node(
            name=f"node{i}",
            devices=[
                Device(
                    name=f"node{i}:0",
                    kind=kind,
                    memory_bytes=_MEMORY_BYTES,
                    speed=1.0 if speeds is None else speeds[i],
                )
            ],
            nic_bytes_per_s=rates[i],
        )
        for i, kind in enumerate(kinds)
    ]
    links = [
        Link(
            source=f"node{a}:0",
            target=f"node{b}:0",
            latency_s=_LATENCY_S,
            bandwidth_bytes_per_s=min(rates[a], rates[b]),
        )
        for a in range(n)
        for b in range(n)
        if a != b
    ]
    return Cluster(nodes=nodes, links=links)


def implied_bandwidth(
    prediction: EpochPrediction, measured_epoch_s: float, wire_bytes: float
) -> float:
    """Bytes/s per direction at which the all-reduce explains a measured epoch; inf if none does."""
    exposed = measured_epoch_s / prediction.n_steps - prediction.compute_s
    return wire_bytes / exposed if exposed > 0 else math.inf


def ring_bytes(parameter_bytes: int, n: int) -> float:
    """Bytes that each of n ranks sends in a ring all-reduce: 2 (n - 1) / n of the buffer."""
    return 2 * (n - 1) / n * parameter_bytes


@dataclass(frozen=True, kw_only=True)
class EpochLog:
    """Measured epochs of one configuration.

    Attributes:
        epoch_s: median over epochs of the slowest rank's seconds.
        spread: largest relative difference of an epoch from the median.
        kinds: kind of GPU of each rank.
    """

    epoch_s: float
    spread: float
    kinds: tuple[str, ...]


def read_epoch_log(path: Path) -> EpochLog:
    """Read a per-epoch CSV; if an epoch lacks a rank's line, the other ranks determine it.

    Raises:
        ResultsError: not such a file.
    """
    rows, _ = parse_epoch_csv(path.read_text(), path)
    slowest: dict[tuple[int, int], float] = {}
    for row in rows:
        epoch = row.occurrence, row.epoch
        slowest[epoch] = max(slowest.get(epoch, 0.0), row.duration_s)
    kinds = {row.rank: row.device_kind for row in rows}
    epoch_s = statistics.median(slowest.values())
    return EpochLog(
        epoch_s=epoch_s,
        spread=max(abs(seconds / epoch_s - 1) for seconds in slowest.values()),
        kinds=tuple(kinds[rank] for rank in sorted(kinds)),
    )


def read_all_reduce_s(path: Path) -> float:
    """Median seconds of a step's all-reduce in DeepSpeed's log.

    Raises:
        ResultsError: the log has no step line.
    """
    steps, _ = parse_deepspeed_log(path.read_text(), path)
    return statistics.median(step.allreduce_s for step in steps if step.allreduce_s is not None)
