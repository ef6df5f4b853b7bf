"""Exchange small values between measurements; every rank must make the same calls in order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from harness import errors
from harness.errors import HarnessError
from harness.runtime.ranks.world import World


def _tensor(values: Sequence[float], world: World) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device=world.wire)


def gather_numbers(value: float, world: World) -> list[float]:
    """Every rank's number, by rank."""
    mine = _tensor([value], world)
    gathered = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(gathered, mine)
    return [float(number) for number in torch.cat(gathered).tolist()]


def maximum_over_ranks(values: Sequence[float], world: World) -> list[float]:
    """The maximum over ranks of each number."""
    numbers = _tensor(values, world)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return [float(number) for number in numbers.tolist()]


def raise_on_all_ranks(check: Callable[[], None], world: World) -> None:
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
        message = "" if mine is None else f"{type(mine).__name__}:{mine}"
        first = next(filter(None, gather_bytes(message.encode(), world)), b"").decode()
        kind, _, text = first.partition(":")
        mine = error_class(kind)(text) if first else None
    if mine is not None:
        raise mine


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
    dist.all_gather(gathered, mine)
    return [bytes(part[:n].cpu().numpy()) for part, n in zip(gathered, sizes, strict=True)]
