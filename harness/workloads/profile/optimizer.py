"""How long an optimizer's step takes for each byte of parameters, measured on this device."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from harness.domain.graph import Graph
from harness.runtime.devices.caches import CacheFlush
from harness.runtime.engines.optimizers import OptimizerOptions, make_optimizer

# What is quick to update.
_LARGEST_BYTES = 256 << 20
# Long enough for a CPU quota, which lets a process run and pause in turn, to even out.
_MIN_TIME_S = 1.0
_MIN_STEPS = 3


@dataclass(frozen=True)
class Updated:
    """Parameters that an optimizer is timed on.

    Attributes:
        sizes: bytes of the parameters of each operator that has any, up to a total.
        n_between: bytes that a device goes through from one step to the next, as far as a cache
            holds them: parameters, their gradients, and outputs of its part of the batch.
    """

    sizes: list[int]
    n_between: float

    @classmethod
    def of(cls, graph: Graph, n_devices: int) -> Updated:
        """The parameters of a model that is trained on so many devices."""
        sizes, total = [], 0
        for operator in graph.operators:
            if 0 < operator.parameter_bytes <= _LARGEST_BYTES - total:
                sizes.append(operator.parameter_bytes)
                total += operator.parameter_bytes
        n_between = sum(
            2 * operator.parameter_bytes + operator.activation_bytes / n_devices
            for operator in graph.operators
        )
        return cls(sizes, n_between)


def optimizer_s_per_byte(
    updated: Updated, options: OptimizerOptions, device: torch.device
) -> float:
    """Mean seconds of a step per byte of parameters.

    The caches are flushed as training flushes them: with hot caches, a step over ViT's 7 MB took a
    quarter of the time.
    """
    if not updated.sizes:
        return 0.0
    model = nn.ParameterList(
        nn.Parameter(torch.zeros(max(1, n_bytes // 4), device=device)) for n_bytes in updated.sizes
    )
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer, flush = make_optimizer(model, options, device), CacheFlush(device)
    # Under a quota the processor's time tells what a pause falls on.
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    optimizer.step()  # makes the state
    n_steps, own_s, begin_s, start_s = 0, 0.0, clock(), time.perf_counter()
    while n_steps < _MIN_STEPS or time.perf_counter() - start_s < _MIN_TIME_S:
        flush(updated.n_between)
        _settle(device)
        before_s = clock()
        optimizer.step()
        _settle(device)
        own_s += clock() - before_s
        n_steps += 1
    ratio = (time.perf_counter() - start_s) / (clock() - begin_s)
    return own_s * ratio / n_steps / sum(updated.sizes)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
