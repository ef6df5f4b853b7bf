"""Exchange small values between measurements; every rank must make the same calls in order.

Run a function on rank 0 and broadcast its result; a barrier for work of any length.

The offset of a rank's monotonic clock from rank 0's is estimated as NTP does: the midpoint of the
shortest of several round trips minus rank 0's reading; its uncertainty is half of that round trip.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch
import torch.distributed as dist

from harness import errors
from harness.errors import HarnessError
from harness.measure.recorder import HostClock
from harness.runtime.ranks.failures import blaming_peers
from harness.runtime.ranks.world import World

T = TypeVar("T")


def _tensor(values: Sequence[float], world: World) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device=world.wire)


def _meeting(world: World) -> AbstractContextManager[None]:
    """Name the other ranks in an error of a collective, where no agent names the one that ended."""
    if not world.is_bounded:
        return nullcontext()
    others = [rank for rank in range(world.size) if rank != world.rank]
    return blaming_peers(f"rank {world.rank} waited for ranks {others}", others)


def gather_numbers(value: float, world: World) -> list[float]:
    """Every rank's number, by rank."""
    mine = _tensor([value], world)
    gathered = [torch.empty_like(mine) for _ in range(world.size)]
    with _meeting(world):
        dist.all_gather(gathered, mine)
    return [float(number) for number in torch.cat(gathered).tolist()]


def maximum_over_ranks(values: Sequence[float], world: World) -> list[float]:
    """The maximum over ranks of each number."""
    numbers = _tensor(values, world)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return [float(number) for number in numbers.tolist()]


def raise_on_all_ranks(check: Callable[[], object], world: World) -> None:
    """Run a check on every rank; all ranks must call it.

    Raises:
        HarnessError: on every rank, the error of the lowest rank whose check raised one.
    """
    mine: HarnessError | None = None
    try:
        check()
    except HarnessError as error:
        mine = error
    if world.size > 1:
        message = "" if mine is None else f"{_kind_name(mine)}:{mine}"
        first = next(filter(None, gather_values(message, str, world)), "")
        kind, _, text = first.partition(":")
        mine = error_class(kind)(text) if first else None
    if mine is not None:
        raise mine


def _kind_name(error: HarnessError) -> str:
    """The name of an error's class in harness.errors: itself, or the one that it derives from."""
    return next(kind for kind in type(error).__mro__ if kind.__module__ == errors.__name__).__name__


def error_class(kind: str) -> type[HarnessError]:
    """The error class with a name that another rank sent; HarnessError if unknown."""
    found = getattr(errors, kind, HarnessError)
    return found if isinstance(found, type) and issubclass(found, HarnessError) else HarnessError


def gather_bytes(data: bytes, world: World) -> list[bytes]:
    """Every rank's bytes, by rank."""
    sizes = [round(size) for size in gather_numbers(len(data), world)]
    mine = torch.zeros(max(1, *sizes), dtype=torch.uint8, device=world.wire)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    gathered = [torch.empty_like(mine) for _ in range(world.size)]
    with _meeting(world):
        dist.all_gather(gathered, mine)
    return [bytes(part[:n].cpu().numpy()) for part, n in zip(gathered, sizes, strict=True)]


def gather_values(value: T, type_: Any, world: World) -> list[T]:
    """Every rank's value of a type that is JSON-serializable, by rank."""
    parts = gather_bytes(msgspec.json.encode(value), world)
    return [msgspec.json.decode(part, type=type_) for part in parts]


def gather_objects(world: World, value: Any) -> list[Any]:
    """Every rank's value, by rank; all ranks must call it."""
    if world.size == 1:
        return [value]
    found: list[Any] = [None] * world.size
    with _meeting(world):
        dist.all_gather_object(found, value)
    return found


_BARRIER_TIMEOUT = timedelta(days=1)


class _Result(msgspec.Struct, frozen=True):
    data: bytes = b""
    error: str = ""
    kind: str = ""


def broadcast_result(make: Callable[[], T], type_: Any, world: World) -> T:
    """Run a function on rank 0 and broadcast its result, or its error; all ranks must call it.

    The function may take longer than a collective's timeout; only the run's time limit applies.

    Args:
        make: called on rank 0 only.
        type_: type of its result, which must be JSON-serializable.

    Raises:
        HarnessError: on every rank, if `make` raised one.
    """
    encoded = b""
    if world.is_first:
        try:
            result = _Result(data=msgspec.json.encode(make()))
        except HarnessError as error:
            result = _Result(error=str(error), kind=_kind_name(error))
        encoded = msgspec.msgpack.encode(result)
    wait_for_all(world)
    received = msgspec.msgpack.decode(gather_bytes(encoded, world)[0], type=_Result)
    if received.error:
        raise error_class(received.kind)(received.error)
    decoded: T = msgspec.json.decode(received.data, type=type_)
    return decoded


def run_on_rank_0(act: Callable[[], object], world: World) -> None:
    """Run a function on rank 0; all ranks must call it.

    Raises:
        HarnessError: on every rank, if `act` raised one.
    """

    def run() -> None:
        act()

    broadcast_result(run, None, world)


def barrier() -> None:
    """A barrier of the default group, for timing; all ranks must call it."""
    if dist.get_backend() == "nccl":  # which else guesses the device, with a warning
        dist.barrier(device_ids=[torch.cuda.current_device()])
    else:
        dist.barrier()


def wait_for_all(world: World) -> None:
    """A barrier that waits up to a day, asleep in the kernel, for ranks with much longer work, in a
    bounded world up to the process group's timeout; all ranks must call it."""
    if world.size == 1:
        return
    if world.is_bounded:
        with _meeting(world):
            barrier()
        return
    group = dist.new_group(backend="gloo", timeout=_BARRIER_TIMEOUT)
    dist.barrier(group)
    dist.destroy_process_group(group)


def wait_to_close(world: World, n_steps: int) -> None:
    """A barrier after the last step of a program; all ranks must call it.

    Raises:
        PeerError: another rank ended without it, such as one that waited in a further step.
    """
    others = [rank for rank in range(world.size) if rank != world.rank]
    failure = f"rank {world.rank} has trained {n_steps} steps and waited for others to do so"
    with blaming_peers(failure, others):
        barrier()


_N_ROUND_TRIPS = 12


def estimate_offset(round_trips: list[tuple[float, float, float]]) -> tuple[float, float]:
    """Offset and uncertainty in seconds, from (sent, peer's reading, received) triples."""
    sent_s, peer_s, received_s = min(round_trips, key=lambda trip: trip[2] - trip[0])
    return (sent_s + received_s) / 2 - peer_s, (received_s - sent_s) / 2


def _now_s(clock: HostClock) -> float:
    return clock.seconds_at(time.perf_counter_ns())


def _answer_pings(world: World, clock: HostClock) -> None:
    """On rank 0: answer each peer's pings with this clock's reading."""
    reading = torch.zeros(1, dtype=torch.float64, device=world.wire)
    for peer in range(1, world.size):
        for _ in range(_N_ROUND_TRIPS):
            dist.recv(reading, src=peer)
            if world.wire.type == "cuda":
                torch.cuda.synchronize()
            dist.send(torch.full_like(reading, _now_s(clock)), dst=peer)


def _ping(world: World, clock: HostClock) -> tuple[float, float]:
    reading = torch.zeros(1, dtype=torch.float64, device=world.wire)
    trips = []
    for _ in range(_N_ROUND_TRIPS):
        sent_s = _now_s(clock)
        dist.send(reading, dst=0)
        dist.recv(reading, src=0)
        peer_s = float(reading.item())
        trips.append((sent_s, peer_s, _now_s(clock)))
    return estimate_offset(trips)


def measure_clock_offset(world: World, clock: HostClock) -> tuple[float, float]:
    """Seconds to subtract from this rank's times to get rank 0's, and the uncertainty.

    All ranks must call it, after the process group is initialized; blocks.
    """
    if world.size == 1 or dist.get_world_size() == 1:
        return 0.0, 0.0
    if world.rank == 0:
        _answer_pings(world, clock)
        return 0.0, 0.0
    return _ping(world, clock)
