"""The header of a run: one workload, one configuration, one cluster, one repeat."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from harness.domain.cluster import Cluster

SCHEMA = "harness-run"
SCHEMA_VERSION = 1

Status = Literal["running", "ok", "oom", "timeout", "crash", "skipped", "invalid"]


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Where one rank ran.

    Attributes:
        device: how torch names it, such as `cuda:0` or `cpu`.
        device_kind: what it is, such as `NVIDIA H200` or the CPU's model name.
        n_cores: cores that the rank may use (after cgroup quota and affinity; may be fractional).
        memory_bytes: memory of the device (after cgroup limit for a CPU).
        interface: the NIC that reaches the other ranks.
        nic_bytes_per_s: what that NIC carries each way; 0 when unknown, and for loopback.
        peak_flops_per_s: published dense peak by dtype; empty when unknown.
    """

    rank: int
    hostname: str
    device: str
    device_kind: str
    n_cores: float
    memory_bytes: int
    interface: str = ""
    nic_bytes_per_s: float = 0.0
    peak_flops_per_s: dict[str, float] = {}


def device_names(ranks: Iterable[RankInfo]) -> dict[int, str]:
    """The cluster's name of each rank's device: its host and its place among the host's ranks."""
    seen: Counter[str] = Counter()
    names = {}
    for info in sorted(ranks, key=lambda info: info.rank):
        names[info.rank] = f"{info.hostname}:{seen[info.hostname]}"
        seen[info.hostname] += 1
    return names


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`. `status` is `running` until the run ends; if its writer dies it stays so,
    and `harness.measure.store.read_header` shows a crash once the heartbeat beside it has stopped.

    Attributes:
        run_id: the name of the run's directory.
        key: hash of workload, configuration and cluster: equal keys are repeats of one another.
        repeat: counted from 0.
        config: the workload's typed configuration as plain JSON.
        versions: library name to version.
        reason: why the status is not ok, in one sentence.
        backend: nccl or gloo.
        duration_s: wall seconds from start to status, None while running.
        summary: a few derived numbers, for reading by eye; figures derive theirs from records.
    """

    run_id: str
    workload: str
    key: str
    repeat: int
    argv: list[str]
    config: dict[str, Any]
    cluster: Cluster
    ranks: list[RankInfo]
    versions: dict[str, str]
    commit: str
    start_utc: str
    status: Status = "running"
    reason: str = ""
    backend: str = ""
    duration_s: float | None = None
    summary: dict[str, Any] = {}
    schema: str = SCHEMA
    version: int = SCHEMA_VERSION

    @property
    def ending(self) -> str:
        """The status, and why in one line where there is a reason."""
        why = self.reason.partition("\n")[0]
        return f"{self.status}: {why}" if why else self.status


def run_key(workload: str, config: dict[str, Any], cluster: Cluster) -> str:
    """Hash what makes two runs repeats of one another: workload, configuration and cluster."""
    nodes = [
        [node.name, node.nic_bytes_per_s, [device.kind for device in node.devices]]
        for node in cluster.nodes
    ]
    text = json.dumps([workload, config, nodes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
