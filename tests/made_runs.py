"""Headers, runs and worlds that tests of several packages begin with."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.domain.cluster import Cluster, Device, Node
from harness.domain.record import Record
from harness.domain.run import RankInfo, RunHeader
from harness.measure.store import Problem, Run, find_runs, read_run

if TYPE_CHECKING:
    from harness.runtime.ranks.world import World
    from harness.workloads.common.contract import Workload

GIB = 1 << 30


def cluster_of(
    hosts: Sequence[str],
    *,
    kind: str = "GPU",
    memory_bytes: int = 8 * GIB,
    nic_bytes_per_s: float | None = None,
) -> Cluster:
    """A device for each name; equal names are one node."""
    return Cluster(
        nodes=[
            Node(
                name=host,
                devices=[
                    Device(name=f"{host}:{i}", kind=kind, memory_bytes=memory_bytes)
                    for i in range(hosts.count(host))
                ],
                nic_bytes_per_s=nic_bytes_per_s,
            )
            for host in dict.fromkeys(hosts)
        ]
    )


def header_of(
    hosts: Sequence[str] = ("node0",),
    *,
    cluster: Cluster | None = None,
    info: Mapping[str, Any] | None = None,
    **changes: Any,
) -> RunHeader:
    """The header of a run with one rank for each name.

    Args:
        cluster: of other devices than `cluster_of` makes.
        info: fields of each rank that differ from the defaults.
    """
    cluster = cluster or cluster_of(hosts)
    ranks = []
    for rank, host in enumerate(hosts):
        device = cluster.devices[rank % cluster.n_devices]
        fields: dict[str, Any] = {
            "device": "cuda:0", "device_kind": device.kind, "n_cores": 4,
            "memory_bytes": device.memory_bytes, **(info or {}),
        }  # fmt: skip
        ranks.append(RankInfo(rank=rank, hostname=host, **fields))
    values: dict[str, Any] = {
        "run_id": "run", "workload": "train", "key": "key", "repeat": 0, "argv": [], "config": {},
        "cluster": cluster, "ranks": ranks, "versions": {}, "commit": "",
        "start_utc": "2026-01-01T00:00:00+00:00",
    }  # fmt: skip
    return RunHeader(**(values | changes))


def local_header(hosts: Sequence[str], **changes: Any) -> RunHeader:
    """The header of a finished run on processors of this machine."""
    cluster = cluster_of(hosts, kind="test device", memory_bytes=4 * GIB)
    values = {"workload": "test", "status": "ok", "backend": "gloo"} | changes
    return header_of(hosts, cluster=cluster, info={"device": "cpu", "n_cores": 1}, **values)


def run_of(*ranks: Sequence[Record], **named: Any) -> Run:
    """A finished run with the records of each rank, on hosts node0, node1, ...; the rest as
    `header_of`."""
    hosts = named.pop("hosts", None) or [f"node{rank}" for rank in range(len(ranks))]
    header = header_of(hosts, **{"status": "ok", **named})
    return Run(path=Path(header.run_id), header=header, ranks=dict(enumerate(map(list, ranks))))


def world_of(rank: int = 0, size: int = 1, *, hosts: Sequence[str] = ()) -> World:
    """A rank's world over gloo; the hosts are node0, node1, ... unless named."""
    import torch

    from harness.runtime.ranks.world import World

    hostnames = list(hosts) or [f"node{i}" for i in range(size)]
    return World(
        rank=rank, size=size, hostname=hostnames[rank],
        hostnames=hostnames, device=torch.device("cpu"), device_kind="test device",
        backend="gloo", backend_reason="a test", interface="lo", n_cores=1, n_threads=1,
        memory_bytes=4 * GIB,
    )  # fmt: skip


def workload_of(config: type, body: Callable[..., Any] = lambda *_: {}, **changes: Any) -> Workload:
    """A workload of one case without a table."""
    from harness.workloads.common.contract import Workload

    return Workload(
        config=config, cases=lambda case, n: [case], body=body, table=lambda runs: "", **changes
    )


class Results(NamedTuple):
    """All runs of a directory, and the skipped files."""

    runs: list[Run]
    skipped: list[Problem]


def read_results(root: Path) -> Results:
    """Read every run that `find_runs` finds."""
    found, skipped = find_runs(root)
    read = [read_run(run_dir, header) for run_dir, header in found]
    return Results([run for run, _ in read], sum((problems for _, problems in read), skipped))
