"""The sides of each comparison in benchmarks/executor.py: the executor, and stock PyTorch."""

from __future__ import annotations

import copy
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from executor_models import PROJECTIONS, separate_projections
from torch import Tensor, nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import schedules
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from harness.domain.routes import BUCKET_BYTES
from harness.domain.strategy import Strategy
from harness.measure.recorder import Recorder
from harness.runtime.data.batch import Batch
from harness.runtime.devices.sampling import clock_for
from harness.runtime.engines.engine import Engine, EngineOptions, Share
from harness.runtime.engines.optimizers import OptimizerOptions, make_optimizer
from harness.runtime.engines.torch_engine import TorchEngine, without_buffer_sync
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.models.task import Task
from harness.runtime.ranks.world import World

OPTIMIZER = OptimizerOptions(learning_rate=0.01)
_OPTIONS = EngineOptions(dtype="fp32", optimizer=OPTIMIZER)
_N_BATCHES = 4


class Side(Protocol):
    """Trains step by step; all ranks must call it in the same order."""

    name: str

    def step(self) -> Tensor:
        """Run one optimizer step; returns this rank's part of the global batch's mean loss."""
        ...

    def rest(self) -> None:
        """Called between timed blocks."""


def own_copy(task: Task, world: World) -> Task:
    """A deep copy of a task on this rank's device."""
    own = copy.deepcopy(task)
    return replace(own, model=own.model.to(world.device))


def batches(task: Task, n: int, positions: Sequence[int], world: World) -> Iterator[Batch]:
    """Cycle through a few global batches of `n` samples, restricted to these positions."""
    generator = torch.Generator().manual_seed(0)
    made: list[Batch] = []
    index = torch.tensor(list(positions), dtype=torch.int64)
    for _ in range(_N_BATCHES):
        inputs = [spec.draw(n, generator) for spec in task.inputs]
        targets = task.draw_targets(n, generator=generator)
        batch = Batch(tuple(x[index] for x in inputs), targets[index])
        made.append(batch.to(world.device))
    return itertools.cycle(made)


def share_of(n: int, world: World) -> range:
    """Positions of this rank's samples in data parallelism."""
    each = n // world.size
    return range(world.rank * each, (world.rank + 1) * each)


@dataclass
class EngineSide(Side):
    """An engine of the harness, with its marks."""

    name: str
    engine: Engine
    recorder: Recorder
    batches: Iterator[Batch]
    share: Share

    def step(self) -> Tensor:
        return self.engine.step(self.batches.__next__, self.share)

    def rest(self) -> None:
        self.recorder.discard()


def ours(
    task: Task,
    world: World,
    strategy: Strategy,
    bucket_bytes: int = BUCKET_BYTES,
    name: str = "executor",
) -> EngineSide:
    """The executor under a strategy."""
    own, recorder = own_copy(task, world), Recorder(clock_for(world.device))
    options = replace(_OPTIONS, bucket_bytes=bucket_bytes)
    engine = ExecutorEngine(own, world, recorder, options, ExecutorPlan(strategy=strategy))
    n, samples = strategy.batch, engine.samples
    share = Share(n_local=len(samples), n_global=n, counts=(task.n_targets,) * n)
    return EngineSide(name, engine, recorder, batches(task, n, samples, world), share)


def stock_ddp(task: Task, world: World, batch: int) -> EngineSide:
    """DistributedDataParallel behind the same interface, with the same marks."""
    own, recorder = share_of(batch, world), Recorder(clock_for(world.device))
    engine = TorchEngine(own_copy(task, world), world, recorder, _OPTIONS)
    share = Share(n_local=len(own), n_global=batch)
    return EngineSide("torch engine", engine, recorder, batches(task, batch, own, world), share)


class Loop(Side):
    """A hand-written loop.

    Args:
        task: a copy of this side's own.
        model: its model, wrapped.
        is_replicated: each rank has some samples, and the model averages gradients over ranks; else
            all ranks have all samples, and compute the whole loss.
    """

    def __init__(
        self,
        name: str,
        task: Task,
        model: Any,
        world: World,
        batch: int,
        *,
        is_replicated: bool = True,
    ) -> None:
        self.name, self._task, self._model = name, task, model
        self._optimizer = make_optimizer(task.model.named_parameters(), OPTIMIZER, world.device)
        own = share_of(batch, world) if is_replicated else range(batch)
        self._batches = batches(task, batch, own, world)
        n_averaged = world.size if is_replicated else 1
        self._scale = n_averaged / (batch * task.n_targets)
        self._counted = 1 / n_averaged if is_replicated else float(world.rank == 0)

    def step(self) -> Tensor:
        batch = next(self._batches)
        loss = self._task.sum_loss(self._model(*batch.inputs), batch.targets) * self._scale
        loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return loss.detach() * self._counted


def bare(task: Task, world: World, batch: int) -> Loop:
    """DistributedDataParallel if there are several ranks, else the model itself."""
    own = own_copy(task, world)
    if world.size == 1:
        return Loop("plain PyTorch", own, own.model, world, batch)
    model = DistributedDataParallel(
        own.model, gradient_as_bucket_view=True, **without_buffer_sync()
    )
    return Loop("DistributedDataParallel", own, model, world, batch)


_SCHEDULES: dict[str, Any] = {
    "gpipe": schedules.ScheduleGPipe,
    "1f1b": schedules.Schedule1F1B,
    "interleaved": schedules.ScheduleInterleaved1F1B,
    "zero_bubble": schedules.ScheduleInterleavedZeroBubble,
}


class StockPipeline(Side):
    """torch.distributed.pipelining: stage s, some children of the model, on rank s modulo ranks."""

    def __init__(
        self,
        task: Task,
        world: World,
        children: Sequence[Sequence[int]],
        batch: int,
        n_microbatches: int,
        schedule: str,
    ) -> None:
        made = _SCHEDULES[schedule]
        self.name = made.__name__
        own = own_copy(task, world)
        layers = list(own.model.children())
        mine = range(world.rank, len(children), world.size)
        parts = {stage: nn.Sequential(*(layers[k] for k in children[stage])) for stage in mine}
        stages = [
            pipelining.PipelineStage(part, stage, len(children), world.device)
            for stage, part in parts.items()
        ]
        is_single = issubclass(made, schedules.PipelineScheduleSingle)

        def loss(outputs: Tensor, targets: Tensor) -> Tensor:
            return own.sum_loss(outputs, targets) / (batch * task.n_targets)

        self._schedule = made(
            stages[0] if is_single else stages, n_microbatches, loss_fn=loss, scale_grads=False
        )
        self._is_first, self._is_last = 0 in parts, len(children) - 1 in parts
        self._batches = batches(task, batch, range(batch), world)
        self._optimizer = make_optimizer(
            nn.ModuleList(parts.values()).named_parameters(), OPTIMIZER, world.device
        )
        known = inspect.signature(made.step).parameters
        self._keywords = {"return_outputs": False} if "return_outputs" in known else {}

    def step(self) -> Tensor:
        batch = next(self._batches)
        losses: list[Tensor] = []
        keywords: dict[str, Any] = dict(self._keywords)
        if self._is_last:
            keywords |= {"target": batch.targets, "losses": losses}
        self._schedule.step(*(batch.inputs if self._is_first else ()), **keywords)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return torch.stack(losses).sum().detach() if losses else torch.zeros(())


def tensor_parallel(task: Task, world: World, batch: int) -> Loop:
    """DTensor's parallelize_module: wide layers by columns, narrow ones by rows; an attention's
    inner projections by columns, its last by rows."""
    own = own_copy(task, world)
    separate_projections(own.model)
    plan: dict[str, Any] = {}
    for name, layer in own.model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(layer, nn.Linear) and last != "head":
            is_wide = layer.out_features > layer.in_features or last in PROJECTIONS
            plan[name] = ColwiseParallel() if is_wide else RowwiseParallel()
    mesh = init_device_mesh(world.device.type, (world.size,))
    model = parallelize_module(own.model, mesh, plan)
    return Loop("parallelize_module", own, model, world, batch, is_replicated=False)


MakeSides = Callable[[], list[Side]]
