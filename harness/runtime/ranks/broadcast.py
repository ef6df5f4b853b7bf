"""Run a function on rank 0 and broadcast its result; a barrier for work of any length."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
import torch.distributed as dist

from harness.errors import HarnessError
from harness.runtime.ranks.gather import error_class, gather_bytes
from harness.runtime.ranks.world import World

_BARRIER_TIMEOUT = timedelta(days=1)

T = TypeVar("T")


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
            result = _Result(error=str(error), kind=type(error).__name__)
        encoded = msgspec.msgpack.encode(result)
    wait_for_all(world)
    received = msgspec.msgpack.decode(gather_bytes(encoded, world)[0], type=_Result)
    if received.error:
        raise error_class(received.kind)(received.error)
    decoded: T = msgspec.json.decode(received.data, type=type_)
    return decoded


def run_on_rank_0(make: Callable[[], T], world: World) -> T | None:
    """Run a function on rank 0; all ranks must call it.

    Returns:
        The result on rank 0, None on the other ranks.

    Raises:
        HarnessError: on every rank, if `make` raised one.
    """
    results: list[T] = []
    broadcast_result(lambda: results.append(make()), None, world)
    return results[0] if results else None


def wait_for_all(world: World) -> None:
    """A barrier that waits up to a day, asleep in the kernel, for ranks with much longer work; all
    ranks must call it."""
    if world.size == 1:
        return
    group = dist.new_group(backend="gloo", timeout=_BARRIER_TIMEOUT)
    dist.barrier(group)
    dist.destroy_process_group(group)
