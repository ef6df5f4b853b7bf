"""The engines that a run can use, and what each is asked after training: the ENGINES table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from torch import nn

from harness.measure.recorder import Recorder
from harness.runtime.engines.engine import Engine, EngineOptions
from harness.runtime.engines.replicas import digest, verify_replicas
from harness.runtime.engines.torch_engine import TorchEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.models import Task
from harness.runtime.ranks.world import World
from harness.workloads.train.config import EngineName


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """An engine with its ways to verify what it trained.

    Attributes:
        samples: positions in the global batch that this rank is fed, in order; None where ranks
            share a batch out among them.
        verify: a digest of the parameters, equal for equal training by the same strategy; all ranks
            must call it; raises VerificationError where copies differ.
        save_sharded, load_sharded: write each rank's own parts of the whole state into a directory,
            go on from such files; None where the engine has no such form.
    """

    engine: Engine
    samples: tuple[int, ...] | None
    verify: Callable[[], str]
    save_sharded: Callable[[Path], None] | None = None
    load_sharded: Callable[[Path], None] | None = None


def _whole(engine: Engine, world: World) -> Trainer:
    """An engine whose ranks each hold the whole model."""
    model: nn.Module = engine.model

    def verify() -> str:
        verify_replicas(model, world)
        return digest(model)

    return Trainer(engine=engine, samples=None, verify=verify)


def _torch(
    task: Task, world: World, recorder: Recorder, options: EngineOptions, plan: ExecutorPlan | None
) -> Trainer:
    return _whole(TorchEngine(task, world, recorder, options), world)


def _deepspeed(
    task: Task, world: World, recorder: Recorder, options: EngineOptions, plan: ExecutorPlan | None
) -> Trainer:
    from harness.runtime.engines.deepspeed_engine import DeepSpeedEngine  # its import takes a while

    return _whole(DeepSpeedEngine(task, world, recorder, options), world)


def _executor(
    task: Task, world: World, recorder: Recorder, options: EngineOptions, plan: ExecutorPlan | None
) -> Trainer:
    from harness.runtime.executor.engine import ExecutorEngine
    from harness.runtime.executor.state.files import load_sharded

    assert plan is not None
    held = replace(plan, is_held=True)  # where it was planned
    engine = ExecutorEngine(task, world, recorder, options, held)
    return Trainer(
        engine=engine,
        samples=tuple(engine.samples),
        verify=engine.verify_replicas,
        save_sharded=engine.save_sharded,
        load_sharded=lambda directory: engine.load_full_state(load_sharded(directory)),
    )


MakeTrainer = Callable[[Task, World, Recorder, EngineOptions, ExecutorPlan | None], Trainer]

ENGINES: dict[EngineName, MakeTrainer] = {
    "torch": _torch,
    "executor": _executor,
    "deepspeed": _deepspeed,
}
