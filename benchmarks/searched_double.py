"""Compare plans with one device by some steps in float64; started by `searched.py`.

    mpirun -np 3 ... python -m benchmarks.searched_double SINGLE_RUN RUN ...

If rounding in fp32 moves one unit across ReLU's kink, a gradient changes by percents and the losses
of later steps by tenths of a percent, although the algorithm is correct. In float64 two correct
trainings agree to at least twelve digits. Model, samples and strategy are those of the runs. Rank 0
prints `{run, loss_difference, gradient_difference}` for each RUN: the largest difference over all
steps from plain PyTorch on one device, relative to the loss, and to a parameter's largest gradient.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import tyro
from torch import Tensor

from benchmarks.comparison import joined
from benchmarks.double_models import DoubleTask
from benchmarks.searched_steps import leave, read_case
from harness.domain.prediction import STRATEGY_FILE
from harness.domain.strategy import Strategy
from harness.measure.recorder import Recorder
from harness.runtime.data.batch import Batch
from harness.runtime.devices.memory import keep_freed_memory
from harness.runtime.devices.sampling import clock_for
from harness.runtime.engines.engine import EngineOptions, Share
from harness.runtime.engines.optimizers import make_optimizer
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.ranks.gather import gather_numbers
from harness.runtime.ranks.world import World
from harness.workloads.train.config import TrainCase
from harness.workloads.train.setup import make_task, prepare, set_norm_scope

_N_STEPS = 4


@dataclass(frozen=True, kw_only=True)
class Options:
    single: Annotated[Path, tyro.conf.Positional]
    """Directory of the run on one device, which determines the samples."""
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Directories of training runs by the executor."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """Loss of a step, and its gradients by parameter."""

    loss: float
    gradients: dict[str, Tensor]

    def difference(self, other: Step) -> tuple[float, float]:
        """Largest differences of loss and gradients, relative to the other step's."""
        gradients = [
            float((self.gradients[name] - expected).abs().max() / expected.abs().max())
            for name, expected in other.gradients.items()
        ]
        return abs(self.loss - other.loss) / abs(other.loss), float(np.max(gradients))


def widened_task(case: TrainCase, world: World) -> DoubleTask:
    """The run's model and weights in float64."""
    task = make_task(case)
    return DoubleTask(
        model=set_norm_scope(task.model, case.norm_scope, world.device).double().to(world.device),
        inputs=tuple(
            replace(spec, dtype=torch.float64) if spec.n_values is None else spec
            for spec in task.inputs
        ),
        loss=task.loss,
        n_classes=task.n_classes,
    )


def whole_batches(case: TrainCase, world: World) -> list[Batch]:
    """The first global batches of the run on one device, in float64; equal on all ranks."""
    first = replace(world, rank=0, size=1)
    source = iter(prepare(case, first, Recorder(clock_for(world.device))).batches)
    found = [next(source) for _ in range(_N_STEPS)]
    return [
        Batch(tuple(x.double() if x.is_floating_point() else x for x in b.inputs), b.targets).to(
            world.device
        )
        for b in found
    ]


def train_on_one_device(case: TrainCase, batches: list[Batch], world: World) -> Iterator[Step]:
    """Train on one device in plain PyTorch; yields the steps."""
    task = widened_task(case, world)
    optimizer = make_optimizer(
        task.model.named_parameters(), case.optimizer_options(), world.device
    )
    for batch in batches:
        loss = task.sum_loss(task.model(*batch.inputs), batch.targets) / len(batch.targets)
        loss.backward()
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in task.model.named_parameters()
            if parameter.grad is not None
        }
        yield Step(loss=float(loss.detach()), gradients=gradients)
        optimizer.step()
        optimizer.zero_grad()


def train_by_strategy(run_dir: Path, batches: list[Batch], world: World) -> Iterator[Step]:
    """Train by the run's strategy; yields the steps. All ranks must iterate."""
    case, strategy = read_case(run_dir), Strategy.load(run_dir / STRATEGY_FILE)
    # fp32 means no autocast, so parameters stay float64.
    options = EngineOptions(dtype="fp32", optimizer=case.optimizer_options())
    task, plan = widened_task(case, world), ExecutorPlan(strategy=strategy)
    engine = ExecutorEngine(task, world, Recorder(clock_for(world.device)), options, plan)
    kept: dict[WeightSlice, Tensor] = {}

    def keep(*_: object) -> None:
        found = {piece: parameter.grad for piece, parameter in engine.owners.own.items()}
        kept.update({piece: g.clone() for piece, g in found.items() if g is not None})

    engine.optimizer.register_step_pre_hook(keep)
    index = torch.tensor(engine.samples, dtype=torch.int64)
    share = Share(n_local=len(engine.samples), n_global=strategy.batch)
    for whole in batches:
        own = Batch(tuple(x[index] for x in whole.inputs), whole.targets[index])
        part = float(engine.step(iter([own]).__next__, share))
        gradients = engine._gatherer.whole(kept)
        yield Step(loss=sum(gather_numbers(part, world)), gradients=gradients)


def main(options: Options) -> None:
    with joined("double") as meeting:
        world = meeting.world
        keep_freed_memory(world.device)
        case = read_case(options.single)
        batches = whole_batches(case, world)
        expected = list(train_on_one_device(case, batches, world))
        for run_dir in options.runs:
            steps = train_by_strategy(run_dir, batches, world)
            found = [one.difference(other) for one, other in zip(steps, expected, strict=True)]
            loss, gradient = np.max(found, axis=0).tolist()  # NaN if any value is
            if world.is_first:
                differences = {"loss_difference": loss, "gradient_difference": gradient}
                print(json.dumps({"run": run_dir.name, **differences}), flush=True)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
    leave()
