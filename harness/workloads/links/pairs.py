"""Latency and bandwidth of every ordered pair of ranks, one pair at a time.

    source   |--- message --->          |
    target                 |--- ack --->|     a trip; the ack is 4 bytes

Half a trip of the smallest message is the latency; a trip of a larger message, less the shortest
latency seen for its ack, is its one-way time (less the median, noise could make a link look faster
than it is). All is read on the source's clock.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import permutations
from statistics import median

import torch

from harness.errors import VerificationError
from harness.runtime.devices.sampling import Budget
from harness.runtime.ranks.context import Context
from harness.runtime.ranks.gather import maximum_over_ranks
from harness.units import format_bytes, format_duration
from harness.workloads.links.collectives import Limits, raise_everywhere
from harness.workloads.links.operations import ELEMENT_BYTES, Transport, pattern

Pair = tuple[int, int]
# Enough that one of them meets no other work on either host.
_PINGS = 30


@dataclass(frozen=True)
class PairTimes:
    """One direction between two ranks: median seconds.

    Attributes:
        transfers: one-way time by size in bytes.
    """

    latency_s: float
    transfers: dict[int, float]


class _Line:
    """A pair of ranks at work; both call the same methods in the same order."""

    def __init__(self, transport: Transport, pair: Pair) -> None:
        self._transport = transport
        self.is_source = transport.rank == pair[0]
        self._pair = pair
        self._ack = torch.empty(1, device=transport.device)
        self._peer = pair[1] if self.is_source else pair[0]

    def trips(self, message: torch.Tensor, n: int) -> list[float]:
        """Seconds of n trips; empty on the target."""
        transport, clock = self._transport, self._transport.clock
        durations = []
        for _ in range(n):
            if not self.is_source:
                transport.receive(message, self._peer)
                transport.send(self._ack, self._peer)
                continue
            start = clock.mark()
            transport.send(message, self._peer)
            transport.receive(self._ack, self._peer)
            end = clock.mark()
            clock.settle()
            durations.append(clock.seconds_at(end) - clock.seconds_at(start))
        return durations

    def measure(self, n_bytes: int, budget: Budget, longest_s: float) -> tuple[list[float], bool]:
        """Trips of one size, none on the target; and on both whether they are short enough.

        Of those that are not, there are the warm-up's alone.

        Raises:
            VerificationError: a message arrived wrong, on both.
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
        n_trips = self._tell(n_trips, is_teller=self.is_source)
        if n_trips == 0:
            return warm_up, False
        durations = self.trips(message, n_trips)
        self._check(message)
        return durations, True

    def _tell(self, number: int, *, is_teller: bool) -> int:
        """The teller's number on both."""
        message = torch.tensor([float(number)], device=self._transport.device)
        if is_teller:
            self._transport.send(message, self._peer)
        else:
            self._transport.receive(message, self._peer)
        return int(message.item())

    def _check(self, message: torch.Tensor) -> None:
        """Fail on both when the target's message is wrong: the source would wait for its acks."""
        expected = pattern(self._pair[0], len(message), message.device)
        n_wrong = int((message != expected).sum())
        n_wrong = self._tell(n_wrong, is_teller=not self.is_source)
        if n_wrong:
            source, target = self._pair
            raise VerificationError(
                f"{n_wrong} of {len(message)} elements of {format_bytes(message.nbytes)} arrived "
                f"wrong from rank {source} at rank {target} over {self._transport.name}: the "
                "network or the library corrupts data"
            )


@dataclass(frozen=True)
class PairSamples:
    """One direction's samples in seconds; empty on the target."""

    latencies: list[float]
    transfers: dict[int, list[float]]


def time_pair(
    pair: Pair,
    sizes: list[int],
    transport: Transport,
    budget: Budget,
    longest_s: float = float("inf"),
) -> PairSamples:
    """Time one direction; both ranks of the pair must call it, and no other.

    Stops after the first size that takes longer than `longest_s`, of which it keeps the warm-up: a
    slow link has at least one time.

    Raises:
        VerificationError: a message arrived wrong, on both ranks.
    """
    line = _Line(transport, pair)
    pings = replace(budget, n_min=max(_PINGS, budget.n_min), n_max=max(_PINGS, budget.n_max))
    latencies = [t / 2 for t in line.measure(ELEMENT_BYTES, pings, float("inf"))[0]]
    ack_s = min(latencies, default=0.0)
    transfers: dict[int, list[float]] = {}
    for n_bytes in sorted(sizes):
        trips, is_short = line.measure(n_bytes, budget, longest_s)
        transfers[n_bytes] = [trip_s - ack_s for trip_s in trips]
        if not is_short:
            break
    return PairSamples(latencies, transfers)


def _measure_pair(
    pair: Pair, sizes: list[int], transport: Transport, context: Context, limits: Limits
) -> PairTimes | None:
    """Time and record one direction; its medians on the source, None on the target."""
    samples = time_pair(pair, sizes, transport, limits.budget, limits.longest_s)
    if transport.rank != pair[0]:
        return None
    record, (source, target), name = context.recorder.sample, pair, transport.name
    for step, time_s in enumerate(samples.latencies):
        record("link_latency_s", time_s, step=step, source=source, target=target, transport=name)
    for n_bytes, times in samples.transfers.items():
        for step, time_s in enumerate(times):
            record("link_transfer_s", time_s, step=step, source=source, target=target,
                   transport=name, n_bytes=n_bytes)  # fmt: skip
    transfers = {n_bytes: median(times) for n_bytes, times in samples.transfers.items()}
    return PairTimes(median(samples.latencies), transfers)


def measure_pairs(
    sizes: list[int], transport: Transport, context: Context, limits: Limits
) -> tuple[dict[Pair, PairTimes], list[str]]:
    """Every ordered pair, one after another; all ranks must call it.

    Ranks outside the pair sleep until it is done.

    Returns:
        All pairs' times, equal on all ranks, and what was left out, in words: sizes above one that
        takes longer than the limit.

    Raises:
        VerificationError: a message arrived wrong, on every rank.
    """
    pairs = list(permutations(range(transport.size), 2))
    mine: dict[Pair, PairTimes] = {}
    for done, pair in enumerate(pairs):
        note = f"{pair[0]} to {pair[1]}"
        context.progress.update(f"pairs over {transport.name}", done, len(pairs), note)
        times = _measure_everywhere(pair, sizes, transport, context, limits)
        if times is not None:
            mine[pair] = times
        context.flush()
    context.progress.update(f"pairs over {transport.name}", len(pairs), len(pairs))
    found = _share(mine, pairs, sizes, context)
    return found, _left_out(found, sizes, transport.name, limits.longest_s)


def _measure_everywhere(
    pair: Pair, sizes: list[int], transport: Transport, context: Context, limits: Limits
) -> PairTimes | None:
    """Measure on the pair, and fail on all ranks; all must call it."""
    times: PairTimes | None = None
    failure: VerificationError | None = None
    if transport.rank in pair:
        try:
            times = _measure_pair(pair, sizes, transport, context, limits)
        except VerificationError as error:
            failure = error
    what = f"a message from rank {pair[0]} to rank {pair[1]} over {transport.name}"
    raise_everywhere(failure, what, context.world)
    return times


def _left_out(
    found: dict[Pair, PairTimes], sizes: list[int], transport: str, longest_s: float
) -> list[str]:
    """A line for each size that some pairs did not come to."""
    lines = []
    for n_bytes in sorted(sizes):
        slow = [pair for pair, times in found.items() if n_bytes > max(times.transfers, default=0)]
        if slow:
            source, target = slow[0]
            lines.append(
                f"{format_bytes(n_bytes)} over {transport} on {len(slow)} of {len(found)} links, "
                f"such as rank {source} to rank {target}: a smaller message takes over "
                f"{format_duration(longest_s)} there; ask for it by --pair-sizes"
            )
    return lines


def _share(
    mine: dict[Pair, PairTimes], pairs: list[Pair], sizes: list[int], context: Context
) -> dict[Pair, PairTimes]:
    """All pairs' times on all ranks: each number is known to one rank, and -1 elsewhere."""
    numbers: list[float] = []
    for pair in pairs:
        known = mine.get(pair)
        numbers.append(known.latency_s if known else -1.0)
        numbers += [known.transfers.get(n, -1.0) if known else -1.0 for n in sizes]
    if not numbers:
        return {}
    shared = iter(maximum_over_ranks(numbers, context.world))
    found: dict[Pair, PairTimes] = {}
    for pair in pairs:
        latency_s = next(shared)
        times = {n: next(shared) for n in sizes}
        found[pair] = PairTimes(latency_s, {n: t for n, t in times.items() if t > 0})
    return found
