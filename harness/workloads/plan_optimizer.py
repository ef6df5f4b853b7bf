"""How long an optimizer's step takes for each byte of parameters, measured on this device."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import nn

from harness.domain.graph import Graph
from harness.runtime.optimizers import OptimizerOptions, make_optimizer

# Enough for a step to come from memory, as that of a model does which is larger than the caches.
_LARGEST_BYTES = 256 << 20
# Long enough for a CPU quota, which lets a process run and pause in turn, to even out.
_MIN_TIME_S = 0.3
_MIN_STEPS = 3


def parameter_sizes(graph: Graph) -> list[int]:
    """Bytes of parameters of each operator that has any, up to a total that is quick to update."""
    sizes, total = [], 0
    for operator in graph.operators:
        if 0 < operator.parameter_bytes <= _LARGEST_BYTES - total:
            sizes.append(operator.parameter_bytes)
            total += operator.parameter_bytes
    return sizes


def optimizer_s_per_byte(
    sizes: Sequence[int], options: OptimizerOptions, device: torch.device
) -> float:
    """Mean seconds of a step over parameters of these sizes in bytes, by their bytes."""
    if not sizes:
        return 0.0
    model = nn.ParameterList(
        nn.Parameter(torch.zeros(max(1, n_bytes // 4), device=device)) for n_bytes in sizes
    )
    for parameter in model:
        parameter.grad = torch.zeros_like(parameter)
    optimizer = make_optimizer(model, options, device)
    _step(optimizer, device)  # makes the state
    n_steps, start_s = 0, time.perf_counter()
    while n_steps < _MIN_STEPS or time.perf_counter() - start_s < _MIN_TIME_S:
        _step(optimizer, device)
        n_steps += 1
    return (time.perf_counter() - start_s) / n_steps / sum(sizes)


def _step(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    optimizer.step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
