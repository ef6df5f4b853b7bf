"""Communication overhead: seconds of computing lost per byte sent or received.

    without   |#|#|#|#|#|#|                     one chunk of products after another
    during    |# |# | # |#  |  communication    fewer in the same time

The overhead is the time of the missing chunks over the bytes sent and received (LogGP's o, taken
per byte). It is 0 if other cores or a NIC move the bytes. Every rank sends to the next and receives
from the previous.
"""

import threading
import time
from collections.abc import Callable
from functools import partial
from statistics import median

import torch

from harness.runtime.devices.sampling import shortest_sample_s
from harness.runtime.ranks.gather import barrier, gather_numbers, maximum_over_ranks
from harness.runtime.ranks.world import Context, World
from harness.workloads.links.operations import post_ring

_N_SAMPLES = 5
_SAMPLE_S = 0.3
_LONGEST_S = 2.0
# Short, so that the last chunk hardly outlasts communication, but far longer than the poll for it.
_CHUNK_S = 2e-3
_SIDE = {"cpu": 256, "cuda": 2048}
_START_BYTES = 1 << 20
_MOST_BYTES = 1 << 28


class _Chunks:
    """Chunks of matrix products of a fixed size."""

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
        if self._is_cuda:  # the current stream only, because NCCL has its own
            torch.cuda.current_stream().synchronize()

    def _timed(self) -> float:
        start_s = time.perf_counter()
        self._run()
        return time.perf_counter() - start_s

    def until(self, is_over: Callable[[], bool]) -> tuple[int, float]:
        """Compute until `is_over`; returns the number of chunks (at least 1) and their seconds."""
        n, start_s = 0, time.perf_counter()
        while n == 0 or not is_over():
            self._run()
            n += 1
        return n, time.perf_counter() - start_s


def measure_overhead(context: Context) -> list[float]:
    """Compute without communication and during it, in turn; all ranks must call it.

    Returns:
        Seconds per byte of each rank; 0 if there is only one rank.
    """
    world = context.world
    if world.size == 1:
        return [0.0]
    return gather_numbers(_measure(_Chunks(world), context), world)


def _measure(chunks: _Chunks, context: Context) -> float:
    """Record samples of this rank's seconds per byte; returns their median."""
    world, progress = context.world, context.progress
    sample_s = max(_SAMPLE_S, shortest_sample_s(world.device.type))
    message = _message_of(sample_s, world)
    label, costs = "computing during send_recv", []
    for step in range(_N_SAMPLES):
        progress.update(label, step, _N_SAMPLES)
        chunk_s = _chunk_s(chunks, sample_s)
        barrier()
        n_chunks, during_s = _during(chunks, message, world)
        costs.append(max(0.0, during_s - n_chunks * chunk_s) / (2 * message.nbytes))
        record = partial(context.recorder.sample, step=step, n_bytes=message.nbytes)
        record("host_s_per_byte", costs[-1])
        record("relative_speed", n_chunks * chunk_s / during_s)
        context.flush()
    progress.update(label, _N_SAMPLES, _N_SAMPLES)
    return median(costs)


def _during(chunks: _Chunks, message: torch.Tensor, world: World) -> tuple[int, float]:
    """Compute until the messages have arrived; returns chunks and seconds (CPU: with posting)."""
    start_s = time.perf_counter()
    work = post_ring(torch.empty_like(message), message)
    if world.backend == "nccl":
        return chunks.until(work[-1].is_completed)  # NCCL completes work in posting order
    posting_s = time.perf_counter() - start_s if world.device.type == "cpu" else 0.0
    # gloo's point-to-point transfers report completion only to a thread that waits for them.
    waiting = threading.Thread(target=lambda: [one.wait() for one in work])
    waiting.start()
    n_chunks, chunks_s = chunks.until(lambda: not waiting.is_alive())
    return n_chunks, posting_s + chunks_s


def _chunk_s(chunks: _Chunks, sample_s: float) -> float:
    """Time a chunk without communication; all ranks compute at the same time."""
    barrier()
    end_s = time.perf_counter() + sample_s
    n_chunks, taken_s = chunks.until(lambda: time.perf_counter() >= end_s)
    barrier()
    return taken_s / n_chunks


def _message_of(sample_s: float, world: World) -> torch.Tensor:
    """Make a message that takes at least `sample_s`; its size is equal on every rank."""
    n_bytes = _START_BYTES
    _idle_s(torch.zeros(n_bytes // 4, device=world.wire), world)  # opens connections
    while True:
        message = torch.zeros(n_bytes // 4, device=world.wire)
        took_s = maximum_over_ranks([_idle_s(message, world)], world)[0]
        larger = n_bytes * min(8, max(2, round(1.2 * sample_s / took_s)))
        is_long = took_s >= sample_s or took_s * larger / n_bytes > _LONGEST_S
        if is_long or larger > _MOST_BYTES:
            return message
        n_bytes = larger


def _idle_s(message: torch.Tensor, world: World) -> float:
    """Time this rank's communication without computing."""
    barrier()
    start_s = time.perf_counter()
    for work in post_ring(torch.empty_like(message), message):
        work.wait()
    if world.backend == "nccl":
        torch.cuda.synchronize()
    return time.perf_counter() - start_s
