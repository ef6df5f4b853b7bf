"""Models that ranks of a test build together; importable by name, for spawned processes."""

import errno
import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn

from harness.runtime.engines.replicas import fingerprint_of
from harness.runtime.models.shared_build import build_on_host
from harness.runtime.models.task import InputSpec, Task
from harness.runtime.ranks.world import Context

_HOSTS = ["together", "together", "apart"]


class Tied(nn.Module):
    """Two names of one weight, a random buffer and an empty one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.register_buffer("phases", torch.rand(8))
        self.register_buffer("nothing", torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.first(x)) + self.phases
        return found


class HoldsLooseTensor(Tied):
    """A random tensor that the module has not registered."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = [torch.rand(8)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.angles[0]


class ReadsWeights(Tied):
    """A number that depends on the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = self.first.weight.sum().item()


_MAKE = {
    "tied": Tied,
    "converted": lambda: Tied().double().to(memory_format=torch.channels_last),
    "reads_weights": ReadsWeights,
    "holds_loose_tensor": HoldsLooseTensor,
    "draws_example": Tied,
}


def _build(name: str) -> Task:
    torch.manual_seed(3)
    model = _MAKE[name]()
    drawn = torch.randint(5, (4, 2)) if name == "draws_example" else None
    inputs = (
        InputSpec(name="x", shape=(8,)),
        InputSpec(name="k", shape=(2,), dtype=torch.int64, n_values=5, rows=drawn),
    )
    return Task(model=model, inputs=inputs, n_classes=8)


def _n_mapped() -> int:
    return Path("/proc/self/maps").read_text().count("/#")


def _bits(model: nn.Module) -> list[Any]:
    tensors = (*model.state_dict().values(), *getattr(model, "angles", ()))
    return [*(fingerprint_of(tensor).tolist() for tensor in tensors), getattr(model, "scale", 0)]


def _see(name: str, context: Context) -> dict[str, Any]:
    world = context.world
    world = replace(world, hostnames=_HOSTS, hostname=_HOSTS[world.rank])
    task = build_on_host(lambda: _build(name), world, share=0.0)
    model, before = task.model, _bits(task.model)
    dist.barrier()
    if world.rank == 1:
        with torch.no_grad():
            model.first.weight.add_(1)
    dist.barrier()
    output = model(torch.ones(2, 8, dtype=model.first.weight.dtype))
    return {
        "state": before,
        "rows": None if task.inputs[1].rows is None else task.inputs[1].rows.tolist(),
        "random": float(torch.rand(())),
        "is_unchanged": before == _bits(model),
        "is_tied": model.first.weight is model.last.weight and bool(output.isfinite().all()),
        "n_mapped": _n_mapped(),
    }


def build_all(names: list[str], context: Context) -> dict[str, Any]:
    """What this rank saw of each model, and of one for which the disk has no space."""
    found = {}
    for name in names:
        found[name] = _see(name, context)
        gc.collect()
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch.object(os, "posix_fallocate", side_effect=full):
        found["full"] = _see("tied", context)
    return found
