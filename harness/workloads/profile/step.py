"""The whole model's step on this rank's device: what the operators should add up to."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
from torch import Tensor

from harness.errors import first_line
from harness.measure.recorder import Recorder
from harness.runtime.devices.memory import is_out_of_memory
from harness.runtime.devices.precision import Precision
from harness.runtime.devices.sampling import shortest_sample_s
from harness.runtime.models import Task
from harness.runtime.ranks.agreement import gather_bytes
from harness.runtime.ranks.world import World
from harness.workloads.profile.store import StepValues


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


def small_batch(batch: int) -> int:
    """An eighth of a batch, about as many samples as a microbatch of a pipeline has."""
    return max(1, batch // 8)


def gather_steps(mine: Mapping[int, list[float]], kinds: Sequence[str], world: World) -> StepValues:
    """All ranks' values of their steps; all ranks must call it.

    Args:
        mine: by the samples of the step.
        kinds: of all ranks' devices.
    """
    values: StepValues = {}
    for kind, part in zip(kinds, gather_bytes(msgspec.json.encode(mine), world), strict=True):
        for samples, found in msgspec.json.decode(part, type=dict[int, list[float]]).items():
            values.setdefault((kind, samples), []).extend(found)
    return values


@dataclass(frozen=True)
class _Data:
    inputs: list[Tensor]
    targets: Tensor

    @classmethod
    def made(cls, task: Task, samples: int, device: torch.device) -> _Data:
        return cls(make_inputs(task, samples, device), make_targets(task, samples, device))


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Of one step, mean.

    Attributes:
        processor_s: what this process computed for in it, on a CPU only.
        forward_share: of it, on a CPU of `processor_s`: which pass a pause falls in is chance.
    """

    seconds: float
    processor_s: float | None
    forward_share: float


class _Mark(NamedTuple):
    """An instant by the clock, and the processor's seconds so far."""

    at: Any
    processor_s: float | None


class StepSampler:
    """Times forward and backward of the whole model with its loss: no optimizer, no gradients kept.

    Both of the batch and of a small one are taken: a machine that becomes slower need not slow
    what stays in its caches as it slows what does not.

    Steps are taken in between the operators, for about as long as those take together, so that
    both see the same machine: its speed drifts with clocks, heat and neighbours.
    """

    def __init__(
        self, task: Task, batch: int, dtype: str, device: torch.device, recorder: Recorder
    ) -> None:
        self._task = task
        self._recorder = recorder
        self._is_cpu = device.type == "cpu"
        self._precision = Precision(dtype, device)
        self._data = {n: _Data.made(task, n, device) for n in (batch, small_batch(batch))}
        self._shortest_s = shortest_sample_s(device.type)
        self._begin_s = time.monotonic()
        self._spent_s = 0.0
        self.seconds: dict[int, list[float]] = {samples: [] for samples in self._data}
        """Of a step, by its samples."""
        self.forward_shares: dict[int, list[float]] = {samples: [] for samples in self._data}
        """Of a step's computing, by its samples."""

    @property
    def n_taken(self) -> int:
        """Samples of each kind of step."""
        return min(map(len, self.seconds.values()))

    def restart(self) -> None:
        """Forget the samples so far: those of the warm-up."""
        self._recorder.discard()
        for values in (*self.seconds.values(), *self.forward_shares.values()):
            values.clear()
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

    def take(self) -> dict[int, StepTime]:
        """Take one sample of each batch: the mean over as many steps as it needs to be steady.

        Small batches may be impossible (batch normalisation of one value): those are left out.

        Returns:
            By samples.
        """
        found = self.time_once()
        for samples, time_taken in found.items():
            number = len(self.seconds[samples])
            self._recorder.sample("model_step_s", time_taken.seconds, step=number, batch=samples)
            self._recorder.sample(
                "model_step_forward_share", time_taken.forward_share, step=number, batch=samples
            )
            self.seconds[samples].append(time_taken.seconds)
            self.forward_shares[samples].append(time_taken.forward_share)
        return found

    def time_once(self) -> dict[int, StepTime]:
        """The same, kept apart from the others."""
        start_s = time.monotonic()
        largest, found = max(self._data), {}
        for samples in list(self._data):
            try:
                found[samples] = self._time(samples)
            except (RuntimeError, ValueError) as error:
                if samples == largest or is_out_of_memory(error):
                    raise
                reason = first_line(error)
                self._recorder.sample("model_step_skipped", 1, batch=samples, reason=reason)
                del self._data[samples], self.seconds[samples], self.forward_shares[samples]
        self._task.model.zero_grad(set_to_none=True)
        self._recorder.clock.settle()
        self._spent_s += time.monotonic() - start_s
        return found

    def _time(self, samples: int) -> StepTime:
        data = self._data[samples]
        once = self._mean([self._step(data)])  # also brings the model back into the cache
        n_steps = max(1, round(self._shortest_s / max(once.seconds, 1e-6)))
        return self._mean([self._step(data) for _ in range(n_steps)])

    def _step(self, data: _Data) -> list[_Mark]:
        """Marks before and after each pass."""
        self._task.model.zero_grad(set_to_none=True)
        marks = [self._mark()]
        with self._precision.autocast():
            loss = self._task.sum_loss(self._task.model(*data.inputs), data.targets)
            loss = loss / len(data.targets)
        marks.append(self._mark())
        loss.backward()
        return [*marks, self._mark()]

    def _mark(self) -> _Mark:
        return _Mark(self._recorder.clock.mark(), time.process_time() if self._is_cpu else None)

    def _mean(self, steps: list[list[_Mark]]) -> StepTime:
        clock = self._recorder.clock
        clock.settle()
        at_s = np.array([[clock.seconds_at(mark.at) for mark in step] for step in steps])
        passes_s = own_s = np.diff(at_s).mean(axis=0)
        if self._is_cpu:
            own_s = np.diff([[mark.processor_s for mark in step] for step in steps]).mean(axis=0)
        return StepTime(
            seconds=float(passes_s.sum()),
            processor_s=float(own_s.sum()) if self._is_cpu else None,
            forward_share=float(own_s[0] / own_s.sum()),
        )
