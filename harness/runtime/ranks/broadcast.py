"""One rank's answer for all: what rank 0 makes, every rank gets; what it refuses, all refuse."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta

import msgspec
import torch.distributed as dist

from harness.errors import HarnessError
from harness.runtime.ranks.agreement import error_named, gather_bytes
from harness.runtime.ranks.world import World

_PATIENCE = timedelta(days=1)


class _Answer(msgspec.Struct, frozen=True):
    data: bytes = b""
    error: str = ""
    kind: str = ""


def _answer(make: Callable[[], bytes]) -> _Answer:
    try:
        return _Answer(data=make())
    except HarnessError as error:
        return _Answer(error=str(error), kind=type(error).__name__)


def from_first(make: Callable[[], bytes], world: World) -> bytes:
    """Rank 0's bytes, on every rank; all ranks must call it. Only rank 0 calls `make`, which may
    take longer than a collective: the run's own limit ends it.

    Raises:
        HarnessError: what rank 0 raised, on every rank, so that none waits for the others.
    """
    encoded = msgspec.msgpack.encode(_answer(make)) if world.is_first else b""
    wait_for_all(world)
    answer = msgspec.msgpack.decode(gather_bytes(encoded, world)[0], type=_Answer)
    if answer.error:
        raise error_named(answer.kind)(answer.error)
    return answer.data


def wait_for_all(world: World) -> None:
    """A barrier without the timeout of collectives, after work of very unlike length; all ranks
    must call it, and sleep in the kernel."""
    if world.size == 1:
        return
    patient = dist.new_group(backend="gloo", timeout=_PATIENCE)
    dist.barrier(patient)
    dist.destroy_process_group(patient)
