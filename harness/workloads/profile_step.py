"""The whole model's step on this rank's device: what the operators should add up to."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from harness.runtime.context import Context
from harness.runtime.models import Task
from harness.runtime.precision import Precision
from harness.runtime.sampling import Budget, shortest_sample_s


def make_inputs(task: Task, samples: int, device: torch.device) -> list[Tensor]:
    """Random inputs of a task, as its data would be."""
    made = []
    for spec in task.inputs:
        shape = (samples, *spec.shape)
        if spec.dtype.is_floating_point:
            made.append(torch.randn(shape, dtype=spec.dtype, device=device))
        else:
            made.append(torch.randint(spec.n_values or 1, shape, dtype=spec.dtype, device=device))
    return made


def make_targets(task: Task, samples: int, device: torch.device) -> Tensor:
    """Random targets of a task."""
    if task.n_classes:
        return torch.randint(task.n_classes, (samples,), device=device)
    return torch.randint(2, (samples,), device=device).float()


def step_seconds(
    task: Task, samples: int, dtype: str, context: Context, budget: Budget
) -> list[float]:
    """Seconds of forward and backward of the whole model with its loss; samples are steady means.

    Written for comparison with the operators' sum: no optimizer, and gradients start empty.
    """
    clock, precision = context.recorder.clock, Precision(dtype, context.world.device)
    inputs = make_inputs(task, samples, context.world.device)
    targets = make_targets(task, samples, context.world.device)

    def step() -> tuple[Any, Any]:
        task.model.zero_grad(set_to_none=True)
        start = clock.mark()
        with precision.autocast():
            loss = task.sum_loss(task.model(*inputs), targets) / samples
        loss.backward()
        return start, clock.mark()

    for _ in range(max(1, budget.n_warm_up)):
        step()
    clock.settle()
    return list(_steady_samples(step, context, budget))


def _steady_samples(
    step: Callable[[], tuple[Any, Any]], context: Context, budget: Budget
) -> Iterator[float]:
    clock = context.recorder.clock

    def seconds(marks: tuple[Any, Any]) -> float:
        clock.settle()
        return clock.seconds_at(marks[1]) - clock.seconds_at(marks[0])

    once_s = seconds(step())
    n_each = max(1, round(shortest_sample_s(context.world.device.type) / max(once_s, 1e-6)))
    for _ in range(budget.count(once_s * n_each)):
        marks = [step() for _ in range(n_each)]
        yield statistics.fmean(seconds(pair) for pair in marks)
