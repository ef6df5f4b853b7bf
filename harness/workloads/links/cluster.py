"""Convert measured pairs and collectives to the Cluster file that planning reads."""

import logging
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import msgspec

from harness.domain.cluster import Cluster, CollectivePoint, Link, Node
from harness.domain.run import RunHeader, device_names
from harness.measure.derive.devices import matmul_table
from harness.measure.store import headers_in, read_run, write_atomically
from harness.workloads.links.pairs import Pair, PairTimes

_log = logging.getLogger(__name__)


def fit_link(times: PairTimes) -> tuple[float, float]:
    """Fit latency (s) and bandwidth (bytes/s) of t = latency + n_bytes / bandwidth.

    The latency is the measured one. The seconds per byte are the median of (t - latency) / n_bytes
    weighted by n_bytes, which minimises the absolute deviation from the measured times: large
    messages count most, and an outlier at one size has no effect. For a message that takes less
    than two latencies, t - latency is mostly noise, so t / n_bytes is used instead.

    Raises:
        ValueError: no transfer was measured.
    """
    latency_s = times.latency_s
    slopes = sorted(
        ((time_s - latency_s if time_s > 2 * latency_s else time_s) / n_bytes, n_bytes)
        for n_bytes, time_s in times.transfers.items()
    )
    if not slopes:
        raise ValueError("a link needs the time of at least one message beside its latency")
    passed = list(accumulate(n_bytes for _, n_bytes in slopes))
    middle = bisect_left(passed, passed[-1] / 2)
    return latency_s, 1.0 / slopes[middle][0]


def _links(pairs: dict[Pair, PairTimes], names: list[str]) -> list[Link]:
    links = []
    for (source, target), times in sorted(pairs.items()):
        if times.transfers:
            latency_s, bandwidth = fit_link(times)
            links.append(
                Link(
                    source=names[source],
                    target=names[target],
                    latency_s=latency_s,
                    bandwidth_bytes_per_s=bandwidth,
                )
            )
    return links


def _nic_bytes_per_s(node: Node, links: list[Link]) -> float | None:
    """Bandwidth of the fastest link to or from another node; None if there is no other node.

    Links are measured one pair at a time, so the fastest one has the NIC to itself.
    """
    inside = {device.name for device in node.devices}
    between = [
        link.bandwidth_bytes_per_s
        for link in links
        if (link.source in inside) != (link.target in inside)
    ]
    return max(between, default=None)


def _signatures(header: RunHeader) -> list[tuple[str, str]]:
    return [(info.hostname, info.device_kind) for info in header.ranks]


def measured_flops(results: Path, header: RunHeader) -> list[dict[str, float]]:
    """Best matmul FLOP/s of each rank by dtype, from the newest matmul run on these devices.

    Empty for every rank if there is no such run.
    """
    usable = [
        (path, other)
        for path, other in headers_in(results)
        if other.workload == "matmul" and other.status == "ok"
        if _signatures(other) == _signatures(header)
    ]
    rates: list[dict[str, float]] = [{} for _ in header.ranks]
    if not usable:
        return rates
    run, _ = read_run(*max(usable, key=lambda one: one[1].start_utc))
    for row in matmul_table(run):
        best = rates[row.rank]
        best[row.dtype] = max(best.get(row.dtype, 0.0), row.flops_per_s)
    return rates


def build_cluster(
    header: RunHeader,
    pairs: dict[Pair, PairTimes],
    collectives: list[CollectivePoint],
    flops: list[dict[str, float]],
    host_s_per_byte: list[float],
) -> Cluster:
    """Build the launch's cluster with its measured links, collectives and devices.

    Args:
        flops: FLOP/s by dtype of each rank.
        host_s_per_byte: communication overhead of each rank; empty if it was not measured.
    """
    names = [*device_names(header.ranks).values()]
    costs = host_s_per_byte or [0.0] * len(names)
    measured = {
        name: {"flops_per_s": rates, "host_s_per_byte": cost}
        for name, rates, cost in zip(names, flops, costs, strict=True)
    }
    links = _links(pairs, names)
    nodes = [
        msgspec.structs.replace(
            node,
            devices=[
                msgspec.structs.replace(device, **measured.get(device.name, {}))
                for device in node.devices
            ],
            nic_bytes_per_s=_nic_bytes_per_s(node, links),
        )
        for node in header.cluster.nodes
    ]
    return Cluster(nodes=nodes, links=links, collectives=collectives)


def write_cluster(cluster: Cluster, paths: Sequence[Path]) -> None:
    """Write the cluster to each path; rank 0 only."""
    for path in paths:
        write_atomically(path, cluster.to_json())
        _log.info("wrote %s", path)
