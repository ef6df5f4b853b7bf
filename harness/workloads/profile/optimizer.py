"""Measure an optimizer's step on this device, in seconds per byte of parameters."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn

from harness.domain.graph import Graph
from harness.runtime.devices.caches import CacheFlush
from harness.runtime.engines.optimizers import OptimizerOptions, make_optimizer

# Limit on the parameters' total size, so that a step stays short.
_LARGEST_BYTES = 256 << 20
# Many periods of a CPU quota, which lets a process run and pause in turn.
_MIN_TIME_S = 1.0
_MIN_STEPS = 3


@dataclass(frozen=True)
class TimedParameters:
    """Parameters that an optimizer is timed on.

    Attributes:
        sizes: bytes of parameters of each operator that has any, up to _LARGEST_BYTES in total.
        n_between: bytes that a device accesses between two optimizer steps: parameters, gradients,
            and the outputs of its part of the batch.
    """

    sizes: list[int]
    n_between: float

    @classmethod
    def of(cls, graph: Graph, n_devices: int) -> TimedParameters:
        """Collect the parameters of a model that is trained on `n_devices` devices."""
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
    timed: TimedParameters, options: OptimizerOptions, device: torch.device
) -> float:
    """Measure the mean seconds of an optimizer step per byte of parameters.

    Caches are flushed before each step, as training does: with hot caches, a step over ViT's 7 MB
    took a quarter of the time.
    """
    if not timed.sizes:
        return 0.0
    model = nn.ParameterList(
        nn.Parameter(torch.zeros(max(1, n_bytes // 4), device=device)) for n_bytes in timed.sizes
    )
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer, flush = make_optimizer(model, options, device), CacheFlush(device)
    # Under a CPU quota, CPU time excludes pauses; `ratio` then adds the mean share of pauses.
    clock = time.process_time if device.type == "cpu" else time.perf_counter
    optimizer.step()  # allocates the optimizer's state
    n_steps, steps_s, begin_s, start_s = 0, 0.0, clock(), time.perf_counter()
    while n_steps < _MIN_STEPS or time.perf_counter() - start_s < _MIN_TIME_S:
        flush(timed.n_between)
        _settle(device)
        before_s = clock()
        optimizer.step()
        _settle(device)
        steps_s += clock() - before_s
        n_steps += 1
    ratio = (time.perf_counter() - start_s) / (clock() - begin_s)
    return steps_s * ratio / n_steps / sum(timed.sizes)


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
