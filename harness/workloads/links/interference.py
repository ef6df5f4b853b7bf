"""What communication takes from computing: products beside it, against products alone.

    alone     |#|#|#|#|#|#|                     one chunk of products after another
    beside    |# |# | # |#  |  communication    fewer in the same time

What is missing, in seconds of the chunks' own pace, over the bytes that the rank sent and received
meanwhile is what a byte costs its device. It is 0 where other cores, or a NIC, move the bytes.
Communication is send_recv, every rank to the next and from the one before, and all_reduce, which
adds up besides. Small messages instead of a large one tell what a message costs beside its bytes:
posting it, waking up for it. Ranks of a single thread exchange one after each chunk, in lockstep
(`spaced send_recv`), since a message by itself wakes threads that many at once (`small send_recv`)
share; what that costs is told by the processor's time, of which waiting for each other takes none.
Threads that compute together spin while they wait, so ranks of several are told by many at once.

    lockstep  |####|x|#####|x|###|  x|####|x  compute, exchange a small message, and again

How much what a rank computes between two exchanges deviates is its jitter. Who waits for others
waits for the slowest of them, so that jitter costs time though no rank is slower on average. Pauses
(of a quota, of other processes) that fall anywhere make it grow with the root of what is computed:
it is measured at several lengths.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist

from harness.domain.cluster import Jitter
from harness.runtime.devices.sampling import shortest_sample_s
from harness.runtime.ranks.agreement import agree_on_maximum, gather_numbers
from harness.runtime.ranks.context import Context
from harness.runtime.ranks.world import World

_N_SAMPLES = 5
_SAMPLE_S = 0.3
_LONGEST_S = 2.0
# A chunk ends soon after communication does, and takes far longer than asking whether it has.
_CHUNK_S = 2e-3
# Seconds of computing between two exchanges, and how many of those a sample has: a small operator
# split over ranks, a stage's microbatch, a large stage.
_LOCKSTEP = {8e-3: 40, 32e-3: 24, 128e-3: 12}
_N_LOCKSTEPS = 3
# Chunks, with a message after each, of a sample of what a message costs.
_N_SPACED = 100
_SIDE = {"cpu": 256, "cuda": 2048}
_START_BYTES = 1 << 20
_MOST_BYTES = 1 << 28
_SMALL_BYTES = 256
# Messages each way that NCCL gets as one group: it has a limit for those, in the thousands.
_N_GROUP = 64


class _Chunks:
    """Products of a fixed size, a few at a time."""

    def __init__(self, world: World) -> None:
        side = _SIDE[world.device.type]
        self._a = torch.randn(side, side, device=world.device)
        self._out = torch.empty_like(self._a)
        self._is_cuda = world.device.type == "cuda"
        self._n = 1
        self._run()
        self._n = max(1, round(_CHUNK_S / min(self._timed() for _ in range(5))))

    def _run(self) -> None:
        for _ in range(self._n):
            torch.mm(self._a, self._a, out=self._out)
        self.settle()

    def _timed(self) -> float:
        start_s = time.perf_counter()
        self._run()
        return time.perf_counter() - start_s

    def run(self, n_chunks: int) -> float:
        """Compute some chunks; the seconds they took."""
        start_s = time.perf_counter()
        for _ in range(n_chunks):
            self._run()
        return time.perf_counter() - start_s

    def settle(self) -> None:
        """Wait for what this process queued, and not for transfers, which NCCL queues elsewhere."""
        if self._is_cuda:
            torch.cuda.current_stream().synchronize()

    def until(self, is_over: Callable[[], bool]) -> tuple[int, float]:
        """Chunks computed before `is_over`, at least one, and the seconds they took."""
        n, start_s = 0, time.perf_counter()
        while n == 0 or not is_over():
            self._run()
            n += 1
        return n, time.perf_counter() - start_s


@dataclass(frozen=True)
class Interference:
    """What communication takes from a device; fields as those of `Device`."""

    host_s_per_byte: float = 0.0
    reduce_s_per_byte: float = 0.0
    host_s_per_message: float = 0.0
    jitter: list[Jitter] = field(default_factory=list)


def measure_interference(context: Context) -> list[Interference]:
    """Compute alone and beside communication, in turn; all ranks must call it.

    Returns:
        By rank; zeros for a rank alone.
    """
    world = context.world
    if world.size == 1:
        return [Interference()]
    chunks = _Chunks(world)
    send_recv = _SendRecv(world)
    measured = [_measure(kind, chunks, context) for kind in (send_recv, _AllReduce(world))]
    if _are_single_threads(world):
        measured.append(_measure_spaced(send_recv, chunks, context))
    else:
        measured.append(_measure(_Messages(world), chunks, context))
    jitter = _measure_jitter(send_recv, chunks, context)
    costs = zip(*(gather_numbers(cost, world) for cost in measured), strict=True)
    deviations = zip(*(gather_numbers(one, world) for one in jitter.values()), strict=True)
    curves = [
        [Jitter(computing_s=s, deviation_s=d) for s, d in zip(jitter, own, strict=True)]
        for own in deviations
    ]
    return [
        Interference(per_byte, reduced, per_message, curve)
        for (per_byte, reduced, per_message), curve in zip(costs, curves, strict=True)
    ]


class _Kind(Protocol):
    """One kind of communication, and what its cost is counted for.

    Attributes:
        name: of the operation in records and tables.
        metric: of the cost.
        start_bytes: to try first.
    """

    name: str
    metric: str
    start_bytes: int

    def start(self, message: torch.Tensor) -> list[Any]:
        """Post it; returns what can be waited for."""

    def moved(self, n_bytes: int) -> float:
        """Bytes, or messages, that the rank sends and receives for a buffer of n_bytes."""


class _SendRecv:
    """Every rank sends to the next and receives from the one before."""

    name, metric, start_bytes = "send_recv", "host_s_per_byte", _START_BYTES

    def __init__(self, world: World) -> None:
        self._next, self._previous = (world.rank + 1) % world.size, (world.rank - 1) % world.size

    def send(self, message: torch.Tensor) -> Any:
        return dist.isend(message, self._next)

    def receive(self, message: torch.Tensor) -> Any:
        return dist.irecv(torch.empty_like(message), self._previous)

    def start(self, message: torch.Tensor) -> list[Any]:
        return self._exchange([message])

    def _exchange(self, pieces: Sequence[torch.Tensor]) -> list[Any]:
        moves = [
            dist.P2POp(call, tensor, peer)
            for piece in pieces
            for call, tensor, peer in (
                (dist.isend, piece, self._next),
                (dist.irecv, torch.empty_like(piece), self._previous),
            )
        ]
        groups = (moves[at : at + 2 * _N_GROUP] for at in range(0, len(moves), 2 * _N_GROUP))
        return [work for group in groups for work in dist.batch_isend_irecv(group)]

    def moved(self, n_bytes: int) -> float:
        return 2.0 * n_bytes


class _Messages(_SendRecv):
    """The same in many small messages."""

    name, metric = "small send_recv", "host_s_per_message"
    start_bytes = 16 * _SMALL_BYTES

    def start(self, message: torch.Tensor) -> list[Any]:
        return self._exchange(message.split(_SMALL_BYTES // message.element_size()))

    def moved(self, n_bytes: int) -> float:
        return super().moved(n_bytes) / _SMALL_BYTES


class _AllReduce:
    """A ring sends 2 (n - 1) / n of the message and receives as much."""

    name, metric, start_bytes = "all_reduce", "host_s_per_byte", _START_BYTES

    def __init__(self, world: World) -> None:
        self._factor = 4 * (world.size - 1) / world.size

    def start(self, message: torch.Tensor) -> list[Any]:
        return [dist.all_reduce(message, async_op=True)]

    def moved(self, n_bytes: int) -> float:
        return self._factor * n_bytes


def _are_single_threads(world: World) -> bool:
    """Whether every rank computes on one thread of a CPU."""
    n_threads = 1 if world.device.type == "cpu" and world.n_threads == 1 else 2
    return agree_on_maximum([n_threads], world)[0] == 1


def _measure(kind: _Kind, chunks: _Chunks, context: Context) -> float:
    """Median over samples of this rank's cost; recorded with the pace."""
    world = context.world
    sample_s = max(_SAMPLE_S, shortest_sample_s(world.device.type))
    message = _message_of(kind, sample_s, world)

    def sample() -> tuple[float, float]:
        alone_s = _alone(chunks, sample_s)
        dist.barrier()
        n_chunks, beside_s = _beside(chunks, kind, message, world)
        cost_s = max(0.0, beside_s - n_chunks * alone_s) / kind.moved(message.nbytes)
        return cost_s, n_chunks * alone_s / beside_s

    return _median_cost(kind.name, kind.metric, message.nbytes, sample, context)


def _measure_spaced(kind: _SendRecv, chunks: _Chunks, context: Context) -> float:
    """The same for a message after each chunk, by the processor's time."""

    def sample() -> tuple[float, float]:
        dist.barrier()
        start_s = time.perf_counter()
        alone_s = _processor_s(lambda: chunks.run(_N_SPACED))
        passed_s = time.perf_counter() - start_s
        beside_s = _processor_s(lambda: _in_lockstep(kind, chunks, 1, _N_SPACED, context.world))
        cost_s = max(0.0, beside_s - alone_s) * passed_s / alone_s
        return cost_s / (2 * _N_SPACED), alone_s / beside_s

    return _median_cost("spaced send_recv", _Messages.metric, _SMALL_BYTES, sample, context)


def _processor_s(work: Callable[[], object]) -> float:
    """What this process computes, on all of its threads."""
    start_s = time.process_time()
    work()
    return time.process_time() - start_s


def _median_cost(
    name: str,
    metric: str,
    n_bytes: int,
    sample: Callable[[], tuple[float, float]],
    context: Context,
) -> float:
    """Take and record samples of (cost, pace beside communication)."""
    what, costs = f"computing beside {name}", []
    for step in range(_N_SAMPLES):
        context.progress.update(what, step, _N_SAMPLES)
        cost_s, pace = sample()
        costs.append(cost_s)
        for key, value in ((metric, cost_s), ("pace_beside", pace)):
            context.recorder.sample(key, value, step=step, operation=name, n_bytes=n_bytes)
        context.flush()
    context.progress.update(what, _N_SAMPLES, _N_SAMPLES)
    return median(costs)


def _measure_jitter(kind: _SendRecv, chunks: _Chunks, context: Context) -> dict[float, float]:
    """Medians over samples of this rank's standard deviation, by seconds of computing."""
    found: dict[float, list[float]] = {computing_s: [] for computing_s in _LOCKSTEP}
    for step in range(_N_LOCKSTEPS):
        context.progress.update("computing in lockstep", step, _N_LOCKSTEPS)
        alone_s = _alone(chunks, _SAMPLE_S)
        for computing_s, n_rounds in _LOCKSTEP.items():
            n_chunks = max(1, round(computing_s / alone_s))
            took_s = _in_lockstep(kind, chunks, n_chunks, n_rounds, context.world)
            found[computing_s].append(deviation_of(took_s))
            context.recorder.sample(
                "jitter_s", found[computing_s][-1], step=step, computing_s=computing_s
            )
        context.flush()
    context.progress.update("computing in lockstep", _N_LOCKSTEPS, _N_LOCKSTEPS)
    return {computing_s: median(values) for computing_s, values in found.items()}


def _in_lockstep(
    kind: _SendRecv, chunks: _Chunks, n_chunks: int, n_rounds: int, world: World
) -> list[float]:
    """Seconds of computing of each round between exchanges with both neighbours."""
    message = torch.zeros(_SMALL_BYTES // 4, device=world.wire)
    exchange = _together if world.backend == "nccl" else _posted_ahead
    took_s, sends = [], []
    dist.barrier()
    for _ in range(n_rounds):
        duration_s, arriving, sent = exchange(kind, chunks, n_chunks, message)
        took_s.append(duration_s)
        sends += sent
        for work in arriving:
            work.wait()
        chunks.settle()  # a GPU waits in its queue, and would be timed with the next round
    for work in sends:
        work.wait()
    return took_s


def _posted_ahead(
    kind: _SendRecv, chunks: _Chunks, n_chunks: int, message: torch.Tensor
) -> tuple[float, list[Any], list[Any]]:
    """Seconds of computing, what is to arrive, and what leaves; as the executor does."""
    arriving = kind.receive(message)
    duration_s = chunks.run(n_chunks)
    return duration_s, [arriving], [kind.send(message)]


def _together(
    kind: _SendRecv, chunks: _Chunks, n_chunks: int, message: torch.Tensor
) -> tuple[float, list[Any], list[Any]]:
    """The same where both ways to a rank share a queue: a send behind a receive never starts."""
    return chunks.run(n_chunks), kind.start(message), []


def deviation_of(values: Sequence[float]) -> float:
    """Standard deviation by differences of successive values, which leaves a slow drift out.

    J. von Neumann et al., The mean square successive difference (1941): half its mean square.
    """
    return float(np.sqrt(np.square(np.diff(values)).mean() / 2))


def _beside(chunks: _Chunks, kind: _Kind, message: torch.Tensor, world: World) -> tuple[int, float]:
    """Chunks computed, and the seconds, until all work is done; posting takes a GPU no time."""
    start_s = time.perf_counter()
    work = kind.start(message)
    if world.backend == "nccl":
        return chunks.until(work[-1].is_completed)  # in the order in which they were posted
    posting_s = time.perf_counter() - start_s if world.device.type == "cpu" else 0.0
    # gloo's transfers between two ranks do not say that they are done, unless waited for.
    waiting = threading.Thread(target=lambda: [one.wait() for one in work])
    waiting.start()
    n_chunks, chunks_s = chunks.until(lambda: not waiting.is_alive())
    return n_chunks, posting_s + chunks_s


def _alone(chunks: _Chunks, sample_s: float) -> float:
    """Seconds of a chunk while nobody talks; all ranks compute at the same time."""
    dist.barrier()
    end_s = time.perf_counter() + sample_s
    n_chunks, alone_s = chunks.until(lambda: time.perf_counter() >= end_s)
    dist.barrier()
    return alone_s / n_chunks


def _message_of(kind: _Kind, sample_s: float, world: World) -> torch.Tensor:
    """A message that takes at least a sample's time, of the same size on every rank."""
    n_bytes = kind.start_bytes
    _timed_alone(kind, torch.zeros(n_bytes // 4, device=world.wire), world)  # opens connections
    while True:
        message = torch.zeros(n_bytes // 4, device=world.wire)
        took_s = agree_on_maximum([_timed_alone(kind, message, world)], world)[0]
        larger = n_bytes * min(8, max(2, round(1.2 * sample_s / took_s)))
        is_long = took_s >= sample_s or took_s * larger / n_bytes > _LONGEST_S
        if is_long or larger > _MOST_BYTES:
            return message
        n_bytes = larger


def _timed_alone(kind: _Kind, message: torch.Tensor, world: World) -> float:
    """Seconds of this rank's communication while nobody computes."""
    dist.barrier()
    start_s = time.perf_counter()
    for work in kind.start(message):
        work.wait()
    if world.backend == "nccl":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s
