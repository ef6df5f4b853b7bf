"""Small numbers that ranks exchange between measurements; every rank must make the same calls."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from harness.runtime.world import World


def _tensor(values: Sequence[float], world: World) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64, device=world.wire)


def gather_numbers(value: float, world: World) -> list[float]:
    """Every rank's number, by rank."""
    mine = _tensor([value], world)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyone, mine)
    return [float(number) for number in torch.cat(everyone).tolist()]


def agree_on_maximum(values: Sequence[float], world: World) -> list[float]:
    """The maximum over ranks of each number."""
    numbers = _tensor(values, world)
    dist.all_reduce(numbers, op=dist.ReduceOp.MAX)
    return [float(number) for number in numbers.tolist()]


def gather_bytes(data: bytes, world: World) -> list[bytes]:
    """Every rank's bytes, by rank."""
    sizes = [round(size) for size in gather_numbers(len(data), world)]
    mine = torch.zeros(max(1, *sizes), dtype=torch.uint8, device=world.wire)
    if data:
        mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = [torch.empty_like(mine) for _ in range(world.size)]
    dist.all_gather(everyone, mine)
    return [bytes(part[:n].cpu().numpy()) for part, n in zip(everyone, sizes, strict=True)]
