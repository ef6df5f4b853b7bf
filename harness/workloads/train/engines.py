"""The ENGINES table: factories of engines with their functions to verify and save."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from harness.measure.recorder import Recorder
from harness.runtime.engines.engine import Engine, EngineOptions
from harness.runtime.engines.replicas import digest, verify_replicas
from harness.runtime.engines.torch_engine import TorchEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.models import Task
from harness.runtime.ranks.world import World
from harness.workloads.train.config import EngineName

if TYPE_CHECKING:
    from harness.runtime.executor.change.elastic import ElasticExecutor
    from harness.runtime.executor.engine import ExecutorEngine


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """An engine with its functions to verify, save and load the trained state.

    Attributes:
        elastic: builds engines of other strategies and moves the state to them; None if the
            strategy stays.
        samples: positions in the global batch that this rank is fed, in order; None if every rank
            gets a share of each batch instead.
        verify: returns a digest of the parameters, equal for equal training by the same strategy;
            all ranks must call it; raises VerificationError if replicas differ.
        save_sharded, load_sharded: write each rank's part of the state into a directory, and load
            it from there; None if the engine does not support it.
    """

    engine: Engine
    samples: tuple[int, ...] | None
    verify: Callable[[], str]
    save_sharded: Callable[[Path], None] | None = None
    load_sharded: Callable[[Path], None] | None = None
    elastic: ElasticExecutor | None = None


def _data_parallel(
    engine: Engine, world: World, whole_model: Callable[[], AbstractContextManager[nn.Module]]
) -> Trainer:
    """Wrap an engine whose ranks each hold the whole model, or gather it."""

    def verify() -> str:
        with whole_model() as model:
            verify_replicas(model, world)
            return digest(model)

    return Trainer(engine=engine, samples=None, verify=verify)


def _torch(
    task: Task, world: World, recorder: Recorder, options: EngineOptions, plan: ExecutorPlan | None
) -> Trainer:
    engine = TorchEngine(task, world, recorder, options)
    return _data_parallel(engine, world, lambda: nullcontext(engine.model))


def _deepspeed(
    task: Task, world: World, recorder: Recorder, options: EngineOptions, plan: ExecutorPlan | None
) -> Trainer:
    from harness.runtime.engines.deepspeed_engine import DeepSpeedEngine  # its import takes a while

    engine = DeepSpeedEngine(task, world, recorder, options)
    return _data_parallel(engine, world, engine.whole_model)


def _executor(
    task: Task, world: World, recorder: Recorder, options: EngineOptions, plan: ExecutorPlan | None
) -> Trainer:
    from harness.runtime.executor.change.elastic import ElasticExecutor
    from harness.runtime.executor.engine import ExecutorEngine

    assert plan is not None
    plan = replace(plan, is_held=True)  # planning has compared the graph with the model
    if not plan.is_elastic:
        return executor_trainer(ExecutorEngine(task, world, recorder, options, plan))
    elastic = ElasticExecutor(task, world, recorder, options, plan)
    return executor_trainer(elastic.engine, elastic)


def executor_trainer(engine: ExecutorEngine, elastic: ElasticExecutor | None = None) -> Trainer:
    """Wrap an engine of the executor."""
    from harness.runtime.executor.state.files import load_sharded

    return Trainer(
        engine=engine,
        samples=tuple(engine.samples),
        verify=engine.verify_replicas,
        save_sharded=engine.save_sharded,
        load_sharded=lambda directory: engine.load_full_state(load_sharded(directory)),
        elastic=elastic,
    )


MakeTrainer = Callable[[Task, World, Recorder, EngineOptions, ExecutorPlan | None], Trainer]

ENGINES: dict[EngineName, MakeTrainer] = {
    "torch": _torch,
    "executor": _executor,
    "deepspeed": _deepspeed,
}
