"""Bandwidth of collectives and of every ordered pair of ranks, from links records.

algbw = S / t, busbw = algbw x k, with S and k of nccl-tests (doc/PERFORMANCE.md). The time of an
iteration is the maximum over ranks; rates use the median time.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median

import numpy as np

from harness.domain.record import SHORTEST_S, Sample
from harness.domain.run import Headed
from harness.measure.derive.devices import info_of
from harness.measure.derive.spans import samples_of
from harness.measure.derive.steps import by_iteration
from harness.measure.statistics import Summary, summarize
from harness.measure.store import Run
from harness.measure.text import noise_texts
from harness.units import format_bandwidth, format_bytes, format_duration

_DISTURBED = 3  # times the latency that its median may be
_SLOW = 0.5  # of the bandwidth that a link's NICs and the best link allow
HALVED = ("all_gather", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, kw_only=True)
class CollectiveRow:
    """One operation at one size; bandwidths in bytes/s."""

    operation: str
    transport: str
    n_ranks: int
    n_bytes: int
    time: Summary
    algbw: float
    busbw: float


@dataclass(frozen=True, kw_only=True)
class LinkMatrix:
    """Ordered pairs of ranks, row = source, column = target; NaN where not measured.

    Attributes:
        names: hostname of each rank, with the rank if a host has several.
        latency_s: shortest half of a round trip of the smallest message, shape (n, n), over both
            directions, because either is half of a way there and back.
        median_latency_s: median half of a round trip of each direction, shape (n, n).
        bandwidth_bytes_per_s: largest message over its median time, shape (n, n).
        transfers: seconds of the largest message, by source and target.
        n_bytes: size of the largest message.
    """

    transport: str
    names: list[str]
    latency_s: np.ndarray
    median_latency_s: np.ndarray
    bandwidth_bytes_per_s: np.ndarray
    transfers: dict[tuple[int, int], Summary]
    n_bytes: int


@dataclass(frozen=True, kw_only=True)
class OverheadRow:
    """Communication overhead of one rank; medians.

    Attributes:
        speed: speed of products during a send_recv of all ranks, relative to that without it.
        taken_s_per_byte: seconds of computation per byte sent or received.
    """

    name: str
    speed: float
    taken_s_per_byte: float


def bus_factor(operation: str, n_ranks: int) -> float:
    """k of busbw = algbw x k; 1 for operations in which each byte crosses one link."""
    if operation == "all_reduce":
        return 2 * (n_ranks - 1) / n_ranks
    return (n_ranks - 1) / n_ranks if operation in HALVED else 1.0


def collective_table(run: Run) -> list[CollectiveRow]:
    """One row per operation, transport and size, in that order."""
    n_ranks = len(run.header.ranks) or len(run.ranks)
    rows = []
    found = by_iteration(run, "collective_s", _collective_of)
    for (operation, transport, n_bytes), iterations in sorted(found.items()):
        slowest = (max(by_rank.values()) for by_rank in iterations.values())
        times = [time_s for time_s in slowest if time_s >= SHORTEST_S]
        if times and n_bytes > 0:
            time = summarize(times)
            rows.append(
                CollectiveRow(
                    operation=operation,
                    transport=transport,
                    n_ranks=n_ranks,
                    n_bytes=n_bytes,
                    time=time,
                    algbw=n_bytes / time.median,
                    busbw=bus_factor(operation, n_ranks) * n_bytes / time.median,
                )
            )
    return rows


def _collective_of(sample: Sample) -> tuple[str, str, int]:
    labels = sample.labels
    return str(labels["operation"]), str(labels["transport"]), int(labels["n_bytes"])


def _rank_names(run: Run, n: int) -> list[str]:
    hosts = [info_of(run, rank).hostname for rank in range(n)]
    return [f"{host}:{rank}" if hosts.count(host) > 1 else host for rank, host in enumerate(hosts)]


def _pair_samples(run: Run, metric: str) -> dict[str, dict[tuple[int, int, int], list[float]]]:
    """Values by transport and (source, target, n_bytes); 0 bytes for latencies."""
    found: dict[str, dict[tuple[int, int, int], list[float]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for records in run.ranks.values():
        for sample in samples_of(records, metric):
            labels = sample.labels
            if sample.value >= SHORTEST_S:
                pair = (int(labels["source"]), int(labels["target"]))
                key = (*pair, int(labels.get("n_bytes", 0)))
                found[str(labels["transport"])][key].append(sample.value)
    return found


def link_matrices(run: Run) -> list[LinkMatrix]:
    """One matrix for each transport that was measured."""
    latencies = _pair_samples(run, "link_latency_s")
    transfers = _pair_samples(run, "link_transfer_s")
    return [
        _link_matrix(run, transport, latencies[transport], transfers[transport])
        for transport in sorted({*latencies, *transfers})
    ]


def _link_matrix(
    run: Run,
    transport: str,
    latencies: dict[tuple[int, int, int], list[float]],
    transfers: dict[tuple[int, int, int], list[float]],
) -> LinkMatrix:
    seen = [rank for key in (*latencies, *transfers) for rank in key[:2]]
    n = max(len(run.header.ranks), *(rank + 1 for rank in seen))
    shortest, middle, bandwidth = (np.full((n, n), np.nan) for _ in range(3))
    for (source, target, _), values in latencies.items():
        shortest[source, target], middle[source, target] = min(values), np.median(values)
    n_bytes = max((key[2] for key in transfers), default=0)
    largest = {
        (source, target): summarize(values)
        for (source, target, size), values in transfers.items()
        if size == n_bytes
    }
    for pair, time in largest.items():
        bandwidth[pair] = n_bytes / time.median
    return LinkMatrix(
        transport=transport,
        names=_rank_names(run, n),
        latency_s=np.where(np.isnan(shortest), np.nan, np.fmin(shortest, shortest.T)),
        median_latency_s=middle,
        bandwidth_bytes_per_s=bandwidth,
        transfers=largest,
        n_bytes=n_bytes,
    )


def disturbed_text(matrix: LinkMatrix) -> str:
    """How far the median half of a round trip is above the latency; empty if not by much."""
    ratios = np.nan_to_num(matrix.median_latency_s / matrix.latency_s)
    n_far = int((ratios > _DISTURBED).sum())
    if not n_far:
        return ""
    a, b = map(int, np.unravel_index(ratios.argmax(), ratios.shape))
    matrices = (matrix.median_latency_s, matrix.latency_s)
    middle, shortest = (format_duration(float(of[a, b])) for of in matrices)
    return (
        f"the median half round trip over {matrix.transport} is over {_DISTURBED} times the "
        f"shortest on {n_far} of {np.count_nonzero(ratios)} links (most: {matrix.names[a]} to "
        f"{matrix.names[b]}, {middle} and {shortest}): other work disturbs the links, measure again"
    )


def slow_text(run: Headed, matrix: LinkMatrix) -> str:
    """How many links between hosts are slow, with the slowest; empty if none is.

    The best link is a measure of what a transport can do; a NIC that is known to be slower bounds
    its own links.
    """
    infos = [info_of(run, rank) for rank in range(len(matrix.names))]
    rates = {
        (a, b): matrix.n_bytes / time.median
        for (a, b), time in matrix.transfers.items()
        if infos[a].hostname != infos[b].hostname
    }
    nics = [info.nic_bytes_per_s or float("inf") for info in infos]
    best = max(rates.values(), default=0.0)
    limits = {(a, b): min(best, nics[a], nics[b]) for a, b in rates}
    slow = [pair for pair, rate in rates.items() if rate < _SLOW * limits[pair]]
    if not slow:
        return ""
    a, b = min(slow, key=lambda pair: rates[pair] / limits[pair])
    rate, limit = (format_bandwidth(of[a, b]) for of in (rates, limits))
    return (
        f"{len(slow)} of {len(rates)} links between hosts over {matrix.transport} have less than "
        f"half of the bandwidth that the best one has and their NICs allow (least: "
        f"{matrix.names[a]} to {matrix.names[b]}, {rate} of {limit}): look for a bad cable, a slow "
        "NIC or port of the switch, or other traffic"
    )


def above_link_text(run: Headed, rows: Iterable[CollectiveRow], best: Mapping[str, float]) -> str:
    """How many collectives exceed the bandwidth of the link, with the highest; empty if none does.

    Args:
        best: of `best_links_bytes_per_s`, where the NICs' rate is not known.
    """
    nic = nic_limit_bytes_per_s(run)
    limits = [(row, nic or best.get(row.transport)) for row in rows]
    shares = [(row.busbw / limit, row) for row, limit in limits if limit]
    above = [one for one in shares if one[0] > 1]
    if not above:
        return ""
    share, most = max(above, key=lambda one: one[0])
    return (
        f"{len(above)} of {len(shares)} collectives are above 100 % of the link (most: "
        f"{most.operation} {most.transport} {format_bytes(most.n_bytes)}, {share:.0%}): the link "
        "was measured too low, or ranks share a host"
    )


def link_noise(collectives: Iterable[CollectiveRow], matrices: Iterable[LinkMatrix]) -> list[str]:
    """A line where the samples of collectives, or of the largest message of pairs, vary."""
    return noise_texts(
        {
            "links": [
                (f"{m.names[a]} to {m.names[b]} over {m.transport}", time)
                for m in matrices
                for (a, b), time in m.transfers.items()
            ],
            "collectives": [
                (f"{row.operation} {row.transport} {format_bytes(row.n_bytes)}", row.time)
                for row in collectives
            ],
        }
    )


def overhead_table(run: Run) -> list[OverheadRow]:
    """Communication overhead by rank; empty if not measured."""
    found: list[OverheadRow] = []
    for rank, name in enumerate(_rank_names(run, len(run.header.ranks))):
        records = run.ranks.get(rank, [])
        speeds, costs = (samples_of(records, m) for m in ("relative_speed", "host_s_per_byte"))
        if speeds and costs:
            speed, cost_s = (median(one.value for one in own) for own in (speeds, costs))
            found.append(OverheadRow(name=name, speed=speed, taken_s_per_byte=cost_s))
    return found


def nic_limit_bytes_per_s(run: Headed) -> float | None:
    """Bandwidth of the slowest NIC, one way, which bounds every ring; None if unknown."""
    known = [node.nic_bytes_per_s for node in run.header.cluster.nodes if node.nic_bytes_per_s]
    return min(known) if known and len(run.header.cluster.nodes) > 1 else None


def best_links_bytes_per_s(run: Run) -> dict[str, float]:
    """The best point-to-point bandwidth between two nodes by transport, at its largest message.

    Smaller messages may fit into a traffic shaper's burst and so appear faster than the link.
    """
    hosts = {info.rank: info.hostname for info in run.header.ranks}
    best: dict[str, tuple[int, float]] = {}
    for transport, pairs in _pair_samples(run, "link_transfer_s").items():
        for (source, target, n_bytes), values in pairs.items():
            is_between = hosts.get(source) != hosts.get(target) or len(set(hosts.values())) < 2
            if n_bytes and is_between:
                sent = (n_bytes, n_bytes / float(np.median(values)))
                best[transport] = max(sent, best.get(transport, sent))
    return {transport: rate for transport, (_, rate) in best.items()}
