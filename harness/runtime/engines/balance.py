"""Measure the training speed of each rank, so that batches can be split in proportion to it."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from harness.runtime.devices.precision import Precision
from harness.runtime.models.task import InputSpec, Task
from harness.runtime.ranks.gather import gather_numbers
from harness.runtime.ranks.world import World

# Many periods of a CPU quota, which lets a process run and pause in turn.
_MIN_TIME_S = 0.5
_MIN_STEPS = 3


def _zeros(spec: InputSpec, n_samples: int, device: torch.device) -> Tensor:
    return torch.zeros((n_samples, *spec.shape), dtype=spec.dtype, device=device)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def samples_per_s(task: Task, n_samples: int, dtype: str, device: torch.device) -> float:
    """Rate of forward and backward over batches of `n_samples`; the model is not changed."""
    inputs = [_zeros(spec, n_samples, device) for spec in task.inputs]
    targets = task.draw_targets(n_samples, device=device)
    precision = Precision(dtype, device)
    state = {name: buffer.clone() for name, buffer in task.model.named_buffers()}

    def step() -> None:
        with precision.autocast():
            loss = task.sum_loss(task.model(*inputs), targets) / targets.numel()
        loss.backward()
        task.model.zero_grad(set_to_none=True)

    step()
    _finish(device)
    n_steps, start_s = 0, time.perf_counter()
    while n_steps < _MIN_STEPS or time.perf_counter() - start_s < _MIN_TIME_S:
        step()
        _finish(device)
        n_steps += 1
    rate = n_steps * n_samples / (time.perf_counter() - start_s)
    with torch.no_grad():
        for name, buffer in task.model.named_buffers():
            buffer.copy_(state[name])
    return rate


def measure_speeds(task: Task, n_samples: int, dtype: str, world: World) -> list[float]:
    """Samples per second of every rank, by rank; all ranks measure at the same time."""
    return gather_numbers(samples_per_s(task, max(1, n_samples), dtype, world.device), world)
