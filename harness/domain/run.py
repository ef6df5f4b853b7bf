"""The header of a run: one workload, one configuration, one cluster, one repeat."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from harness.domain.cluster import Cluster
from harness.domain.record import MAX_RANK
from harness.errors import ResultsError
from harness.inputs import MOST_NUMBER, shorten

SCHEMA = "harness-run"
SCHEMA_VERSION = 3

Status = Literal["running", "ok", "oom", "timeout", "crash", "interrupted", "skipped", "invalid"]
STATUS_WORDS = {
    "oom": "out of memory",
    "timeout": "timed out",
    "crash": "crashed",
    "interrupted": "interrupted",
    "skipped": "skipped",
    "invalid": "invalid",
    "running": "not finished",
}


# What a process needs beside tensors: a CUDA context, loaded kernels and NCCL's buffers; on a CPU
# the interpreter and its libraries (a rank that trains LeNet holds 431 MiB). And the share of the
# rest that plans may fill: the allocator's blocks are not all used. On a CPU, whose freed memory is
# kept (`keep_freed_memory`), ResNet-18 took 1.4 to 1.95 times its tensors, with the batch.
_GPU_PROCESS_BYTES, _CPU_PROCESS_BYTES = 768 << 20, 512 << 20
_GPU_SHARE, _CPU_SHARE = 0.95, 0.5


# Names in a rank's settings that are no environment variables.
KERNEL, GPU_DRIVER = HOST_SETTINGS = ("kernel", "GPU driver")


class RankInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Host, device and NIC of one rank.

    Attributes:
        device: torch's name, such as `cuda:0` or `cpu`.
        device_kind: hardware model, such as `NVIDIA H200` or the CPU's model name.
        n_cores: cores that the rank may use (after cgroup quota and affinity; may be fractional).
        memory_bytes: whole memory of the device (after cgroup limit for a CPU).
        interface: the NIC that reaches the other ranks.
        nic_bytes_per_s: bandwidth of that NIC, each way; 0 when unknown, and for loopback.
        peak_flops_per_s: published dense peak by dtype; empty when unknown.
        settings: versions of kernel and GPU driver, and environment variables that change its
            speed; empty when unknown.
    """

    rank: Annotated[int, Meta(ge=0, le=MAX_RANK)]
    hostname: str
    device: str
    device_kind: str
    n_cores: Annotated[float, Meta(ge=0, le=1e6)]
    memory_bytes: Annotated[int, Meta(ge=0, le=2**60)]
    interface: str = ""
    nic_bytes_per_s: Annotated[float, Meta(ge=0, le=1e18)] = 0.0
    peak_flops_per_s: dict[str, Annotated[float, Meta(gt=0, le=1e30)]] = {}
    settings: dict[str, str] = {}

    @property
    def training_bytes(self) -> int:
        """Memory that plans may fill with tensors; see `memory for training` in docs/metrics.md."""
        has_gpu = self.device.startswith("cuda")
        rest = self.memory_bytes - (_GPU_PROCESS_BYTES if has_gpu else _CPU_PROCESS_BYTES)
        return max(1, round(rest * (_GPU_SHARE if has_gpu else _CPU_SHARE)))


def device_names(ranks: Iterable[RankInfo]) -> dict[int, str]:
    """Name of each rank's device in the cluster: host and position among the host's ranks."""
    seen: Counter[str] = Counter()
    names = {}
    for info in sorted(ranks, key=lambda info: info.rank):
        names[info.rank] = f"{info.hostname}:{seen[info.hostname]}"
        seen[info.hostname] += 1
    return names


class RunHeader(msgspec.Struct, frozen=True, kw_only=True):
    """`run.json`. `status` stays `running` if the writer dies; `harness.measure.store.read_header`
    then reports a crash once the heartbeat has stopped.

    Attributes:
        run_id: the name of the run's directory.
        key: hash of workload, configuration and cluster; runs with equal keys are repeats.
        repeat: counted from 0.
        config: the workload's configuration as plain JSON.
        versions: library name to version.
        reason: one sentence, if the status is not ok.
        backend: nccl or gloo.
        duration_s: wall seconds from start to status, None while running.
        summary: a few derived numbers, for people and for the launch that goes on with the run:
            figures derive theirs from records.
    """

    run_id: str
    workload: str
    key: str
    repeat: Annotated[int, Meta(ge=0, le=2**53)]
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
    duration_s: Annotated[float, Meta(ge=0, le=1e12)] | None = None
    summary: dict[str, Any] = {}
    schema: str = SCHEMA
    version: int = SCHEMA_VERSION

    def check(self, source: str) -> None:
        """Refuse impossible values."""
        if not is_file_name(self.run_id):
            raise ResultsError(
                f"{source} has run_id {shorten(self.run_id)}: it must be a directory's name"
            )
        twice = [rank for rank, n in Counter(info.rank for info in self.ranks).items() if n > 1]
        if twice:
            raise ResultsError(f"{source} names rank {twice[0]} twice: write each rank once")

    def texts(self, name: str) -> list[str]:
        """A list of texts in the summary; empty if absent."""
        found = self.summary.get(name)
        return [str(text) for text in found] if isinstance(found, list) else []

    def number(self, name: str) -> float | None:
        """A number in the summary; None if absent."""
        found: Any = self.summary.get(name)
        is_number = isinstance(found, int | float) and not isinstance(found, bool)
        return float(found) if is_number and abs(found) <= MOST_NUMBER else None

    @property
    def ending(self) -> str:
        """The status in words, with the reason in one line if there is one."""
        words, why = STATUS_WORDS.get(self.status, self.status), self.reason.partition("\n")[0]
        return f"{words}: {why}" if why else words


class Headed(Protocol):
    """A value with the header of a run."""

    @property
    def header(self) -> RunHeader: ...


def is_file_name(text: str) -> bool:
    """Whether the text is a plain file name, which cannot lead out of a directory."""
    return bool(text.strip(".")) and text.isprintable() and "/" not in text and len(text) <= 200


def telling_flags(workload: str, config: dict[str, Any]) -> dict[str, Any]:
    """The configuration without flags of a training that change none of its steps: `predict`, and
    flags of planning where its strategy is not planned by them."""
    if workload != "train":
        return config
    strategy, idle = config.get("strategy"), {"predict"}
    beside = config.get("drift") or config.get("survive") or config.get("shrink") == "search"
    if strategy != "searched" and not beside:
        idle |= {"search_seconds", "search_budget", "trials"}
        if strategy in ("single", "ddp"):
            idle |= {"memory", "stages"}
    return {name: value for name, value in config.items() if name not in idle}


def run_key(workload: str, config: dict[str, Any], cluster: Cluster) -> str:
    """Hash workload, telling flags and cluster; runs with equal keys are repeats."""
    nodes = [
        [node.name, node.nic_bytes_per_s, [device.kind for device in node.devices]]
        for node in cluster.nodes
    ]
    text = json.dumps([workload, telling_flags(workload, config), nodes], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:12]
