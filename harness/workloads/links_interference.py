"""What moving bytes takes from computing: products beside an all-reduce, against products alone.

    alone     |#|#|#|#|#|#|                   one chunk of products after another
    beside    |# |# | # |#  |  all-reduce     fewer in the same time

What is missing, in seconds of the chunks' own pace, over the bytes that the rank sent and received
meanwhile is what a byte costs its device. It is 0 where other cores, or a NIC, move the bytes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch
import torch.distributed as dist

from harness.runtime.agreement import agree_on_maximum, gather_numbers
from harness.runtime.context import Context
from harness.runtime.sampling import shortest_sample_s
from harness.runtime.world import World

_N_SAMPLES = 5
_SAMPLE_S = 0.3
_LONGEST_S = 2.0
# A chunk ends soon after the all-reduce does, and takes far longer than asking whether it has.
_CHUNK_S = 2e-3
_SIDE = {"cpu": 256, "cuda": 2048}
_START_BYTES = 1 << 20
_MOST_BYTES = 1 << 28


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
        if self._is_cuda:
            torch.cuda.synchronize()

    def _timed(self) -> float:
        start_s = time.perf_counter()
        self._run()
        return time.perf_counter() - start_s

    def until(self, is_over: Callable[[], bool]) -> tuple[int, float]:
        """Chunks computed before `is_over`, at least one, and the seconds they took."""
        n, start_s = 0, time.perf_counter()
        while n == 0 or not is_over():
            self._run()
            n += 1
        return n, time.perf_counter() - start_s


def measure_interference(context: Context) -> list[float]:
    """Compute alone and beside an all-reduce, in turn; all ranks must call it.

    Returns:
        Every rank's seconds of computation for each byte sent or received; 0 for a rank alone.
    """
    world = context.world
    if world.size == 1:
        return [0.0]
    chunks = _Chunks(world)
    sample_s = max(_SAMPLE_S, shortest_sample_s(world.device.type))
    message = _message_of(sample_s, world)
    moved = 4 * (world.size - 1) / world.size * message.nbytes  # a ring: sent and received
    costs: list[float] = []
    for step in range(_N_SAMPLES):
        context.progress.update("computing beside an all-reduce", step, _N_SAMPLES)
        alone_s = _alone(chunks, sample_s)
        dist.barrier()
        work = dist.all_reduce(message, async_op=True)
        n_chunks, beside_s = chunks.until(work.is_completed)
        work.wait()
        costs.append(max(0.0, beside_s - n_chunks * alone_s) / moved)
        record = context.recorder.sample
        record("host_s_per_byte", costs[-1], step=step, n_bytes=message.nbytes)
        record("pace_beside_all_reduce", n_chunks * alone_s / beside_s, step=step)
        context.flush()
    context.progress.update("computing beside an all-reduce", _N_SAMPLES, _N_SAMPLES)
    return gather_numbers(median(costs), world)


def _alone(chunks: _Chunks, sample_s: float) -> float:
    """Seconds of a chunk while nobody talks; all ranks compute at the same time."""
    dist.barrier()
    end_s = time.perf_counter() + sample_s
    n_chunks, alone_s = chunks.until(lambda: time.perf_counter() >= end_s)
    dist.barrier()
    return alone_s / n_chunks


def _message_of(sample_s: float, world: World) -> torch.Tensor:
    """A message whose all-reduce takes at least a sample's time, the same on every rank."""
    device = world.device if world.backend == "nccl" else torch.device("cpu")
    n_bytes = _START_BYTES
    while True:
        message = torch.zeros(n_bytes // 4, device=device)
        dist.barrier()
        start_s = time.perf_counter()
        dist.all_reduce(message)
        if world.backend == "nccl":
            torch.cuda.synchronize()
        took_s = agree_on_maximum([time.perf_counter() - start_s], world)[0]
        larger = n_bytes * min(8, max(2, round(1.2 * sample_s / took_s)))
        is_long = took_s >= sample_s or took_s * larger / n_bytes > _LONGEST_S
        if is_long or larger > _MOST_BYTES:
            return message
        n_bytes = larger
