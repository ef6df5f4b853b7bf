"""The whole model's step on this rank's device: what the operators should add up to."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
from torch import Tensor

from harness.runtime.context import Context
from harness.runtime.memory import is_out_of_memory
from harness.runtime.models import Task
from harness.runtime.precision import Precision
from harness.runtime.sampling import shortest_sample_s


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


class StepSampler:
    """Times forward and backward of the whole model with its loss: no optimizer, no gradients kept.

    Steps are taken in between the operators, for about as long as those take together, so that
    both see the same machine: its speed drifts with clocks, heat and neighbours.
    """

    def __init__(self, task: Task, samples: int, dtype: str, context: Context) -> None:
        device = context.world.device
        self._task = task
        self._samples = samples
        self._context = context
        self._precision = Precision(dtype, device)
        self._inputs = make_inputs(task, samples, device)
        self._targets = make_targets(task, samples, device)
        self._shortest_s = shortest_sample_s(device.type)
        self._begin_s = time.monotonic()
        self._spent_s = 0.0
        self.seconds: list[float] = []

    def restart(self) -> None:
        """Forget the samples so far: those of the warm-up."""
        self._context.recorder.discard()
        self.seconds.clear()
        self._begin_s, self._spent_s = time.monotonic(), 0.0

    def take_when_due(self) -> None:
        """Take a sample if operators have taken longer than steps so far, and memory allows."""
        if 2 * self._spent_s > time.monotonic() - self._begin_s:
            return
        try:
            self.take()
        except Exception as error:  # an operator's inputs lie in memory too
            if not is_out_of_memory(error):
                raise
            self._task.model.zero_grad(set_to_none=True)

    def take(self) -> None:
        """Take one sample: the mean over as many steps as it needs to be steady."""
        clock, start_s = self._context.recorder.clock, time.monotonic()
        once_s = self._settled(self._step())  # also brings the model back into the cache
        n_steps = max(1, round(self._shortest_s / max(once_s, 1e-6)))
        marks = [self._step() for _ in range(n_steps)]
        value = statistics.fmean(self._settled(pair) for pair in marks)
        self._task.model.zero_grad(set_to_none=True)
        self._context.recorder.sample("model_step_s", value, step=len(self.seconds))
        self.seconds.append(value)
        clock.settle()
        self._spent_s += time.monotonic() - start_s

    def _step(self) -> tuple[Any, Any]:
        clock = self._context.recorder.clock
        self._task.model.zero_grad(set_to_none=True)
        start = clock.mark()
        with self._precision.autocast():
            loss = self._task.sum_loss(self._task.model(*self._inputs), self._targets)
            loss = loss / self._samples
        loss.backward()
        return start, clock.mark()

    def _settled(self, marks: tuple[Any, Any]) -> float:
        clock = self._context.recorder.clock
        clock.settle()
        return clock.seconds_at(marks[1]) - clock.seconds_at(marks[0])
