"""Time whole steps of the model on this rank's device; calibration compares operators with them.

Measure an optimizer's step on this device, in seconds per byte of parameters.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean, median
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from harness.domain.graph import Graph
from harness.errors import first_line
from harness.measure.recorder import Recorder
from harness.runtime.data.batch import Batch
from harness.runtime.data.synthetic import draw_batch
from harness.runtime.devices.compiling import compiled_by_torch
from harness.runtime.devices.memory import CacheFlush, is_out_of_memory
from harness.runtime.devices.precision import Precision
from harness.runtime.devices.sampling import (
    Budget,
    clock_for,
    hold_gpu,
    shortest_sample_s,
    take_samples,
)
from harness.runtime.engines.optimizers import OptimizerOptions, make_optimizer
from harness.runtime.models.task import Task
from harness.runtime.ranks.gather import gather_values
from harness.runtime.ranks.world import World
from harness.workloads.profile.store import StepValues


def small_batch(batch: int) -> int:
    """An eighth of a batch: a typical microbatch of a pipeline."""
    return max(1, batch // 8)


def gather_steps(
    seconds: Mapping[int, list[float]], kinds: Sequence[str], world: World
) -> StepValues:
    """Gather all ranks' step times; all ranks must call it.

    Args:
        seconds: this rank's step times by batch size.
        kinds: device kind of each rank.
    """
    values: StepValues = {}
    every = gather_values(seconds, dict[int, list[float]], world)
    for kind, of_rank in zip(kinds, every, strict=True):
        for samples, found in of_rank.items():
            values.setdefault((kind, samples), []).extend(found)
    return values


# Steps of a sample on a GPU.
_N_QUEUED = 4


class StepSampler:
    """Times forward and backward of the whole model with its loss, without an optimizer, and the
    copy of the batch to a GPU.

    Steps with the batch and with a small batch are timed, because small batches use caches better.
    Step samples are interleaved with operators, with about equal time for both, so that slowdowns
    of the machine affect both.
    """

    def __init__(
        self,
        task: Task,
        batch: int,
        dtype: str,
        device: torch.device,
        recorder: Recorder,
        *,
        is_compiled: bool = False,
    ) -> None:
        self._task = task
        self._model: Callable[..., Any] = task.model
        self._sum_loss: Callable[..., Any] = task.sum_loss
        if is_compiled:
            self._model = compiled_by_torch(task.model, device)
            self._sum_loss = compiled_by_torch(task.sum_loss, device)
        self._recorder = recorder
        self._precision = Precision(dtype, device)
        self._device = device
        self._is_queued = device.type != "cpu"
        self._data = {
            n: draw_batch(task, n, 0, torch.device("cpu")).ready_for(device)
            for n in (batch, small_batch(batch))
        }
        self._shortest_s = shortest_sample_s(device.type)
        self._begin_s = time.monotonic()
        self._spent_s = 0.0
        self.seconds: dict[int, list[float]] = {samples: [] for samples in self._data}
        """Step times by batch size."""

    @property
    def n_taken(self) -> int:
        """Number of samples of each batch size."""
        return min(map(len, self.seconds.values()))

    def restart(self) -> None:
        """Discard the samples so far (the warm-up)."""
        self._recorder.discard()
        for values in self.seconds.values():
            values.clear()
        self._begin_s, self._spent_s = time.monotonic(), 0.0

    def take_when_due(self) -> None:
        """Take a sample if steps have had less time than operators so far, and memory suffices."""
        if 2 * self._spent_s > time.monotonic() - self._begin_s:
            return
        try:
            self.take()
        except Exception as error:  # inputs of operators occupy memory too
            if not is_out_of_memory(error):
                raise
            self._task.model.zero_grad(set_to_none=True)

    def take(self) -> None:
        """Take one sample of each batch size: the mean over a minimum time of steps.

        A small batch that the model does not accept (batch norm of one value) is left out.
        """
        start_s = time.monotonic()
        largest = max(self._data)
        for samples in list(self._data):
            try:
                step_s = self._time(samples)
            except (RuntimeError, ValueError) as error:
                if samples == largest or is_out_of_memory(error):
                    raise
                reason = first_line(error)
                self._recorder.sample("model_step_skipped", 1, batch=samples, reason=reason)
                del self._data[samples], self.seconds[samples]
            else:
                number = len(self.seconds[samples])
                self._recorder.sample("model_step_s", step_s, step=number, batch=samples)
                self.seconds[samples].append(step_s)
        self._task.model.zero_grad(set_to_none=True)
        self._recorder.clock.settle()
        self._spent_s += time.monotonic() - start_s

    def _time(self, samples: int) -> float:
        data = self._data[samples]
        if self._is_queued:
            # As in training, the first step fills the queue while the device works.
            return self._mean_s([self._step(data) for _ in range(1 + _N_QUEUED)][1:])
        once_s = self._mean_s([self._step(data)])  # also loads the model into the cache again
        n_steps = max(1, round(self._shortest_s / max(once_s, 1e-6)))
        return self._mean_s([self._step(data) for _ in range(n_steps)])

    def _step(self, data: Batch) -> tuple[Any, Any]:
        """Run a step; returns the clock marks before and after it."""
        clock = self._recorder.clock
        self._task.model.zero_grad(set_to_none=True)
        start = clock.mark()
        inputs, targets = data.to(self._device)
        with self._precision.autocast():
            loss = self._sum_loss(self._model(*inputs), targets) / targets.numel()
        loss.backward()
        return start, clock.mark()

    def _mean_s(self, steps: Sequence[tuple[Any, Any]]) -> float:
        clock = self._recorder.clock
        clock.settle()
        return fmean(clock.seconds_at(end) - clock.seconds_at(start) for start, end in steps)


# Limit on the parameters' total size, so that a step stays short.
_LARGEST_BYTES = 256 << 20
# Many periods of a CPU quota, which lets a process run and pause in turn.
_MIN_TIME_S = 1.0
_MIN_STEPS = 3
# A host queues the step of an optimizer over hundreds of parameters in less time than these take.
_N_HOLDS = 8


@dataclass(frozen=True)
class TimedParameters:
    """Parameters that an optimizer is timed on.

    Attributes:
        sizes: bytes of trained parameters of each operator that has any, up to _LARGEST_BYTES in
            total.
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
            n_trained = round(operator.parameter_bytes * operator.trained_share)
            if 0 < n_trained <= _LARGEST_BYTES - total:
                sizes.append(n_trained)
                total += n_trained
        n_between = sum(
            (1 + operator.trained_share) * operator.parameter_bytes
            + operator.activation_bytes / n_devices
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
    optimizer, flush = make_optimizer(model.named_parameters(), options, device), CacheFlush(device)
    if device.type == "cuda":
        return _gpu_step_s(optimizer, partial(flush, timed.n_between), device) / sum(timed.sizes)
    # Under a CPU quota, CPU time excludes pauses; `ratio` then adds the mean share of pauses.
    optimizer.step()  # allocates the optimizer's state
    n_steps, steps_s, begin_s, start_s = 0, 0.0, time.process_time(), time.perf_counter()
    while n_steps < _MIN_STEPS or time.perf_counter() - start_s < _MIN_TIME_S:
        flush(timed.n_between)
        before_s = time.process_time()
        optimizer.step()
        steps_s += time.process_time() - before_s
        n_steps += 1
    ratio = (time.perf_counter() - start_s) / (time.process_time() - begin_s)
    return steps_s * ratio / n_steps / sum(timed.sizes)


def _gpu_step_s(optimizer: Optimizer, flush: Callable[[], None], device: torch.device) -> float:
    """Median seconds of an optimizer's step that a GPU finds in its queue, as in training."""
    clock = clock_for(device)

    def sample() -> tuple[Any, Any]:
        for _ in range(_N_HOLDS):
            hold_gpu()
        flush()
        start = clock.mark()
        optimizer.step()
        return start, clock.mark()

    return median(take_samples(sample, clock, Budget(time_s=_MIN_TIME_S, n_min=_MIN_STEPS)))
