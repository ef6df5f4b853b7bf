"""Transports, and communication operations, timed, with results that are checked exactly.

Sizes follow nccl-tests (doc/PERFORMANCE.md): for all_gather, reduce_scatter and all_to_all, the
size S is that of the whole n-rank buffer. Every element is a small integer that depends on rank
and index, so sums are exact in float32 and misplaced blocks are detected.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from harness.domain.cluster import CollectivePoint
from harness.errors import VerificationError
from harness.measure.recorder import Clock, HostClock, timed_s
from harness.measure.statistics import summarize
from harness.runtime.devices.sampling import Budget
from harness.runtime.ranks import gather
from harness.runtime.ranks.gather import maximum_over_ranks, raise_on_all_ranks
from harness.runtime.ranks.messages import start_messages
from harness.runtime.ranks.world import Context, World
from harness.units import format_bytes, format_duration

ELEMENT_BYTES = 4
# Prime, so that a shift by a chunk changes elements; sums over 65000 ranks are exact in float32.
_PERIOD = 251


def post_ring(out: torch.Tensor, data: torch.Tensor) -> list[Any]:
    """Post a send to the next rank and a receive from the previous one."""
    rank, size = dist.get_rank(), dist.get_world_size()
    moves = [
        dist.P2POp(dist.isend, data, (rank + 1) % size),
        dist.P2POp(dist.irecv, out, (rank - 1) % size),
    ]
    return start_messages(moves)


class TorchTransport:
    """torch.distributed's default group: gloo on host memory, NCCL on GPU memory.

    Point-to-point and collective communication of one-dimensional float32 tensors. Calls block,
    except NCCL's, which are queued on the device; `clock` is the matching clock.

    Attributes:
        device: device that buffers must be on.
    """

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self.name: str = dist.get_backend()
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device: torch.device = device
        self.clock = clock

    @classmethod
    def of(cls, world: World, clock: Clock) -> TorchTransport:
        """Make the transport of a run's world; `clock` is that of the world's device."""
        if world.backend == "nccl":
            return cls(world.device, clock)
        return cls(torch.device("cpu"), clock if world.device.type == "cpu" else HostClock())

    def barrier(self) -> None:
        gather.barrier()

    def send(self, data: torch.Tensor, target: int) -> None:
        dist.send(data, target)

    def receive(self, data: torch.Tensor, source: int) -> None:
        dist.recv(data, source)

    def all_reduce(self, data: torch.Tensor) -> None:
        dist.all_reduce(data)

    def all_gather(self, out: torch.Tensor, data: torch.Tensor) -> None:
        # Newer torch warns about the old name.
        (getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor)(out, data)

    def reduce_scatter(self, out: torch.Tensor, data: torch.Tensor) -> None:
        (getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor)(out, data)

    def broadcast(self, data: torch.Tensor) -> None:
        dist.broadcast(data, 0)

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor) -> None:
        dist.all_to_all_single(out, data)

    def send_recv(self, out: torch.Tensor, data: torch.Tensor) -> None:
        for work in post_ring(out, data):
            work.wait()


class MpiTransport:
    """As TorchTransport: COMM_WORLD on host memory, by buffer calls, which neither pickle nor copy.

    The MPI from PyPI has no CUDA support, so times exclude copies from and to a GPU.
    """

    name = "mpi"

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.device: torch.device = torch.device("cpu")
        self.clock: Clock = HostClock()
        from mpi4py import MPI  # its import initialises MPI, which the owner of `comm` has done

        self._in_place = MPI.IN_PLACE

    def barrier(self) -> None:
        self._comm.Barrier()

    def send(self, data: torch.Tensor, target: int) -> None:
        self._comm.Send(data.numpy(), target)

    def receive(self, data: torch.Tensor, source: int) -> None:
        self._comm.Recv(data.numpy(), source)

    def all_reduce(self, data: torch.Tensor) -> None:
        self._comm.Allreduce(self._in_place, data.numpy())

    def all_gather(self, out: torch.Tensor, data: torch.Tensor) -> None:
        self._comm.Allgather(data.numpy(), out.numpy())

    def reduce_scatter(self, out: torch.Tensor, data: torch.Tensor) -> None:
        self._comm.Reduce_scatter_block(data.numpy(), out.numpy())

    def broadcast(self, data: torch.Tensor) -> None:
        self._comm.Bcast(data.numpy(), 0)

    def all_to_all(self, out: torch.Tensor, data: torch.Tensor) -> None:
        self._comm.Alltoall(data.numpy(), out.numpy())

    def send_recv(self, out: torch.Tensor, data: torch.Tensor) -> None:
        self._comm.Sendrecv(
            data.numpy(),
            (self.rank + 1) % self.size,
            recvbuf=out.numpy(),
            source=(self.rank - 1) % self.size,
        )


Transport = TorchTransport | MpiTransport


def pattern(rank: int, n: int, device: torch.device) -> torch.Tensor:
    """A rank's input of a collective: float32, (n,)."""
    return ((torch.arange(n, device=device) + 31 * rank) % _PERIOD).float()


@dataclass
class CollectiveTrial:
    """A collective at one size with its buffers; `reset` (before `run`) and `check` (after) are not
    timed.

    Attributes:
        n_bytes: S, rounded up to whole elements on every rank.
        source: this rank's input.
        out: its output, which an operation in place also reads.
        expected: the correct output.
    """

    name: str
    n_bytes: int
    transport: Transport
    source: torch.Tensor
    out: torch.Tensor
    expected: torch.Tensor
    run: Callable[[], None]

    def reset(self) -> None:
        if OPERATIONS[self.name].is_in_place:
            self.out.copy_(self.source)
        else:
            self.out.fill_(-1.0)

    def check(self) -> None:
        """Compare every element.

        Raises:
            VerificationError: names the first element that is wrong.
        """
        wrong = self.out != self.expected
        if not bool(wrong.any()):
            return
        at = int(wrong.nonzero()[0])
        raise VerificationError(
            f"{self.name} of {format_bytes(self.n_bytes)} over {self.transport.name}: element {at} "
            f"of rank {self.transport.rank} is {self.out[at].item():g} instead of "
            f"{self.expected[at].item():g} ({int(wrong.sum())} of {wrong.numel()} wrong): "
            "the network or the library corrupts data"
        )


def _whole(t: Transport, n: int) -> torch.Tensor:
    return pattern(t.rank, n, t.device)


def _sum(t: Transport, n: int) -> torch.Tensor:
    total = torch.zeros(n, device=t.device)
    for rank in range(t.size):
        total += pattern(rank, n, t.device)
    return total


def _own_part(whole: torch.Tensor, t: Transport) -> torch.Tensor:
    return whole.chunk(t.size)[t.rank].clone()  # so that `whole` is freed


def _joined(t: Transport, part: Callable[[int], torch.Tensor]) -> torch.Tensor:
    return torch.cat([part(rank) for rank in range(t.size)])


Make = Callable[[Transport, int], torch.Tensor]


@dataclass(frozen=True)
class Operation:
    """One row of OPERATIONS, which is also the name of a transport's method.

    Attributes:
        takes, gives: this rank's input and correct output for a size of n elements.
        is_in_place: the method gets one buffer, else the output and the input.
    """

    takes: Make
    gives: Make
    is_in_place: bool = False


# `bus_factor` of measure/derive/links.py has the factor of those that move less than their size.
OPERATIONS: dict[str, Operation] = {
    "all_reduce": Operation(_whole, _sum, is_in_place=True),
    "all_gather": Operation(
        lambda t, n: _whole(t, n // t.size),
        lambda t, n: _joined(t, lambda rank: pattern(rank, n // t.size, t.device)),
    ),
    "reduce_scatter": Operation(_whole, lambda t, n: _own_part(_sum(t, n), t)),
    "broadcast": Operation(
        lambda t, n: _whole(t, n) if t.rank == 0 else torch.full((n,), -1.0, device=t.device),
        lambda t, n: pattern(0, n, t.device),
        is_in_place=True,
    ),
    "all_to_all": Operation(
        _whole, lambda t, n: _joined(t, lambda rank: _own_part(pattern(rank, n, t.device), t))
    ),
    # As in nccl-tests, every rank sends to the next and receives from the previous.
    "send_recv": Operation(_whole, lambda t, n: pattern((t.rank - 1) % t.size, n, t.device)),
}


def whole_sizes(sizes: Iterable[int], n_ranks: int = 1) -> list[int]:
    """Round sizes in bytes up to whole elements on every rank; each is left once, in order."""
    quantum = ELEMENT_BYTES * n_ranks
    return sorted({max(1, -(-n_bytes // quantum)) * quantum for n_bytes in sizes})


def make_trial(operation: str, n_bytes: int, transport: Transport) -> CollectiveTrial:
    """Make an operation with its buffers; S is rounded up to whole elements on every rank."""
    n = whole_sizes([n_bytes], transport.size)[0] // ELEMENT_BYTES
    row, carry_out = OPERATIONS[operation], getattr(transport, operation)
    source, expected = row.takes(transport, n), row.gives(transport, n)
    out = torch.empty_like(expected)
    run = partial(carry_out, out) if row.is_in_place else partial(carry_out, out, source)
    return CollectiveTrial(operation, ELEMENT_BYTES * n, transport, source, out, expected, run)


def time_trial(trial: CollectiveTrial, transport: Transport, n: int) -> list[float]:
    """Time n iterations on this rank, in seconds; all ranks must call it.

    An untimed barrier precedes each iteration, so that iterations do not overlap. An iteration's
    time is the maximum over ranks, which the caller takes.
    """
    durations = []
    for _ in range(n):
        trial.reset()
        transport.barrier()
        transport.clock.settle()
        durations.append(timed_s(transport.clock, trial.run))
    return durations


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits on the duration of a sweep over sizes.

    Attributes:
        budget: budget of each operation at each size.
        longest_s: sizes with longer iterations are left out; infinite if the user gave the sizes.
    """

    budget: Budget
    longest_s: float


def measure_collective(
    operation: str, n_bytes: int, transport: Transport, context: Context, budget: Budget
) -> CollectivePoint:
    """Time, check and record one operation at one size; all ranks must call it.

    Raises:
        VerificationError: a result is wrong on any rank; raised on every rank.
    """
    trial = make_trial(operation, n_bytes, transport)
    n = _count_iterations(trial, transport, context.world, budget)
    raise_on_all_ranks(trial.check, context.world)
    durations = time_trial(trial, transport, n)
    raise_on_all_ranks(trial.check, context.world)
    for step, duration_s in enumerate(durations):
        context.recorder.sample(
            "collective_s", duration_s, step=step,
            operation=operation, transport=transport.name, n_bytes=trial.n_bytes,
        )  # fmt: skip
    context.flush()
    slowest = maximum_over_ranks(durations, context.world)
    return CollectivePoint(
        operation=operation,
        transport=transport.name,
        n_ranks=transport.size,
        n_bytes=trial.n_bytes,
        duration_s=summarize(slowest).median,
    )


def _count_iterations(
    trial: CollectiveTrial, transport: Transport, world: World, budget: Budget
) -> int:
    """Warm up, and count the iterations that fit into the budget; equal on every rank."""
    time_trial(trial, transport, 1)  # opens connections
    start_ns = time.perf_counter_ns()
    time_trial(trial, transport, budget.n_warm_up)
    iteration_s = (time.perf_counter_ns() - start_ns) * 1e-9 / budget.n_warm_up
    return budget.count(maximum_over_ranks([iteration_s], world)[0])


def measure_collectives(
    operations: list[str], sizes: list[int], transport: Transport, context: Context, limits: Limits
) -> tuple[list[CollectivePoint], list[str]]:
    """Measure every operation at every size; all ranks must call it.

    Returns:
        The points, equal on all ranks, and a text for each measurement that was left out.
    """
    if transport.size == 1:
        return [], [f"collectives over {transport.name}: they need at least two ranks"]
    points: list[CollectivePoint] = []
    left_out: list[str] = []
    label = f"collectives over {transport.name}"
    operations, sizes = list(dict.fromkeys(operations)), whole_sizes(sizes, transport.size)
    total = len(operations) * len(sizes)
    for at, operation in enumerate(operations):
        last: CollectivePoint | None = None
        for i, n_bytes in enumerate(sizes):
            note = f"{operation} {format_bytes(n_bytes)}"
            context.progress.update(label, at * len(sizes) + i, total, note)
            predicted_s = last.duration_s * n_bytes / last.n_bytes if last else 0.0
            if last and n_bytes > 1 << 20 and predicted_s > limits.longest_s:
                left_out.append(
                    f"{note} over {transport.name}: about {format_duration(predicted_s)} an "
                    "iteration; --sizes measures it anyway"
                )
                continue
            last = measure_collective(operation, n_bytes, transport, context, limits.budget)
            points.append(last)
    context.progress.update(label, total, total)
    return points, left_out
