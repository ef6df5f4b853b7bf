"""Latency and bandwidth of every ordered pair of ranks, and the Cluster file made of them.

    source   |--- message --->          |
    target                 |--- ack --->|     a round trip; the ack is 4 bytes

One pair is measured at a time. The shortest half of a round trip of the smallest message is the
latency. The one-way time of a larger message is its round trip minus the latency, which is the time
of its ack. All times are read on the source's clock.
"""

from bisect import bisect_left
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain, permutations
from pathlib import Path
from statistics import median

import msgspec
import torch

from harness.domain.cluster import Cluster, CollectivePoint, Link, Node
from harness.domain.run import RunHeader, device_names
from harness.errors import VerificationError
from harness.measure.derive.devices import matmul_table
from harness.measure.recorder import timed_s
from harness.measure.store import read_run
from harness.runtime.devices.sampling import Budget
from harness.runtime.ranks.gather import gather_values, raise_on_all_ranks
from harness.runtime.ranks.world import Context
from harness.units import format_bytes, format_duration
from harness.workloads.links.operations import (
    ELEMENT_BYTES,
    Limits,
    Transport,
    pattern,
    whole_sizes,
)
from harness.workloads.planning.files import finished_runs

Pair = tuple[int, int]
# Enough that at least one is undisturbed by other work on either host.
_PINGS = 30


@dataclass(frozen=True)
class PairTimes:
    """Times in seconds from one rank to another.

    Attributes:
        latency_s: of an undisturbed message, so the shortest.
        transfers: median one-way time by size in bytes.
    """

    latency_s: float
    transfers: dict[int, float]


class _PingPong:
    """Round trips between a pair of ranks; both call the same methods in the same order."""

    def __init__(self, transport: Transport, pair: Pair) -> None:
        self._transport = transport
        self.is_source = transport.rank == pair[0]
        self._pair = pair
        self._ack = torch.empty(1, device=transport.device)
        self._peer = pair[1] if self.is_source else pair[0]

    def trips(self, message: torch.Tensor, n: int) -> list[float]:
        """Time n round trips, in seconds; empty on the target."""
        transport = self._transport

        def go() -> None:
            transport.send(message, self._peer)
            transport.receive(self._ack, self._peer)

        if self.is_source:
            return [timed_s(transport.clock, go) for _ in range(n)]
        for _ in range(n):
            transport.receive(message, self._peer)
            transport.send(self._ack, self._peer)
        return []

    def measure(self, n_bytes: int, budget: Budget, longest_s: float) -> tuple[list[float], bool]:
        """Time round trips of one size.

        Returns:
            Their seconds (empty on the target), and whether they are within `longest_s`. If not,
            the seconds are those of the warm-up.

        Raises:
            VerificationError: a message arrived wrong; raised on both ranks.
        """
        n = max(1, -(-n_bytes // ELEMENT_BYTES))
        message = pattern(self._pair[0], n, self._transport.device)
        if not self.is_source:
            message.fill_(-1.0)
        if message.is_cuda:  # NCCL sets channels up for the first message of a size
            self.trips(message, 1)
        warm_up = self.trips(message, max(1, budget.n_warm_up))
        self._check(message)
        is_short = not warm_up or min(warm_up) <= longest_s
        n_trips = budget.count(warm_up[-1]) if warm_up and is_short else 0
        n_trips = self._share(n_trips, is_sender=self.is_source)
        if n_trips == 0:
            return warm_up, False
        durations = self.trips(message, n_trips)
        self._check(message)
        return durations, True

    def _share(self, number: int, *, is_sender: bool) -> int:
        """Send the sender's number to its peer; returns it on both ranks."""
        message = torch.tensor([float(number)], device=self._transport.device)
        if is_sender:
            self._transport.send(message, self._peer)
        else:
            self._transport.receive(message, self._peer)
        return int(message.item())

    def _check(self, message: torch.Tensor) -> None:
        """Raise on both ranks if the target's message is wrong."""
        expected = pattern(self._pair[0], len(message), message.device)
        n_wrong = int((message != expected).sum())
        n_wrong = self._share(n_wrong, is_sender=not self.is_source)
        if n_wrong:
            source, target = self._pair
            raise VerificationError(
                f"{n_wrong} of {len(message)} elements of {format_bytes(message.nbytes)} arrived "
                f"wrong from rank {source} at rank {target} over {self._transport.name}: the "
                "network or the library corrupts data"
            )


def time_pair(
    pair: Pair,
    sizes: list[int],
    transport: Transport,
    budget: Budget,
    longest_s: float = float("inf"),
) -> tuple[list[float], dict[int, list[float]]]:
    """Time messages from pair[0] to pair[1]; only these two ranks must call it.

    Stops after the first size that takes longer than `longest_s` and keeps its warm-up, so that a
    slow link has at least one time.

    Returns:
        Seconds of latencies, and of transfers by size; empty on the target.

    Raises:
        VerificationError: a message arrived wrong; raised on both ranks.
    """
    ping_pong = _PingPong(transport, pair)
    pings = replace(budget, n_min=max(_PINGS, budget.n_min), n_max=max(_PINGS, budget.n_max))
    latencies = [t / 2 for t in ping_pong.measure(ELEMENT_BYTES, pings, float("inf"))[0]]
    ack_s = min(latencies, default=0.0)
    transfers: dict[int, list[float]] = {}
    for n_bytes in sorted(sizes):
        trips, is_short = ping_pong.measure(n_bytes, budget, longest_s)
        transfers[n_bytes] = [trip_s - ack_s for trip_s in trips]
        if not is_short:
            break
    return latencies, transfers


def _measure_pair(
    pair: Pair, sizes: list[int], transport: Transport, context: Context, limits: Limits
) -> PairTimes | None:
    """Time and record one ordered pair; returns its times on the source, None on the target."""
    latencies, transfers = time_pair(pair, sizes, transport, limits.budget, limits.longest_s)
    if transport.rank != pair[0]:
        return None
    record, (source, target), name = context.recorder.sample, pair, transport.name
    for step, time_s in enumerate(latencies):
        record("link_latency_s", time_s, step=step, source=source, target=target, transport=name)
    for n_bytes, times in transfers.items():
        for step, time_s in enumerate(times):
            record("link_transfer_s", time_s, step=step, source=source, target=target,
                   transport=name, n_bytes=n_bytes)  # fmt: skip
    medians = {n: median(times) for n, times in transfers.items()}
    return PairTimes(min(latencies), {n: time_s for n, time_s in medians.items() if time_s > 0})


def measure_pairs(
    sizes: list[int], transport: Transport, context: Context, limits: Limits
) -> tuple[dict[Pair, PairTimes], list[str]]:
    """Measure every ordered pair, one after another; all ranks must call it.

    Ranks outside the pair sleep until it is done.

    Returns:
        All pairs' times, equal on all ranks, and a text for each size that was left out because a
        smaller one took longer than the limit.

    Raises:
        VerificationError: a message arrived wrong; raised on every rank.
    """
    pairs, sizes = list(permutations(range(transport.size), 2)), whole_sizes(sizes)
    measured: dict[Pair, PairTimes] = {}

    def measure(pair: Pair) -> None:
        if transport.rank in pair:
            times = _measure_pair(pair, sizes, transport, context, limits)
            measured.update({} if times is None else {pair: times})

    for done, pair in enumerate(pairs):
        note = f"{pair[0]} to {pair[1]}"
        context.progress.update(f"pairs over {transport.name}", done, len(pairs), note)
        raise_on_all_ranks(partial(measure, pair), context.world)
        context.flush()
    context.progress.update(f"pairs over {transport.name}", len(pairs), len(pairs))
    every = gather_values(list(measured.items()), list[tuple[Pair, PairTimes]], context.world)
    found = dict(sorted(chain.from_iterable(every)))
    return found, _left_out(found, sizes, transport.name, limits.longest_s)


def _left_out(
    found: dict[Pair, PairTimes], sizes: list[int], transport: str, longest_s: float
) -> list[str]:
    """Return a line for each size that was left out on some pairs."""
    lines = []
    for n_bytes in sizes:
        slow = [pair for pair, times in found.items() if n_bytes > max(times.transfers, default=0)]
        if slow:
            source, target = slow[0]
            lines.append(
                f"{format_bytes(n_bytes)} over {transport} on {len(slow)} of {len(found)} links, "
                f"such as rank {source} to rank {target}: a smaller message takes over "
                f"{format_duration(longest_s)}; --pair-sizes measures it anyway"
            )
    return lines


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


def _with_shorter_latency(pairs: dict[Pair, PairTimes]) -> dict[Pair, PairTimes]:
    """Give both directions of a pair the shorter latency: either is half of a way there and back,
    so a longer one is a disturbance, which would also raise the fitted bandwidth."""
    return {
        (a, b): replace(times, latency_s=min(times.latency_s, pairs.get((b, a), times).latency_s))
        for (a, b), times in sorted(pairs.items())
    }


def _links(pairs: dict[Pair, PairTimes], names: list[str]) -> list[Link]:
    measured = _with_shorter_latency(pairs)
    fits = {pair: fit_link(times) for pair, times in measured.items() if times.transfers}
    return [
        Link(source=names[a], target=names[b], latency_s=latency_s, bandwidth_bytes_per_s=rate)
        for (a, b), (latency_s, rate) in fits.items()
    ]


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


def measured_flops(results: Path, header: RunHeader) -> list[dict[str, float]]:
    """Best matmul FLOP/s of each rank by dtype, from the newest matmul run on these devices.

    Empty for every rank if there is no such run.
    """
    devices = [(info.hostname, info.device_kind) for info in header.ranks]
    rates: list[dict[str, float]] = [{} for _ in header.ranks]
    for other, path in finished_runs(results, "matmul"):
        if [(info.hostname, info.device_kind) for info in other.ranks] == devices:
            run, _ = read_run(path, other)
            for row in matmul_table(run):
                best = rates[row.rank]
                best[row.dtype] = max(best.get(row.dtype, 0.0), row.flops_per_s)
            break
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
