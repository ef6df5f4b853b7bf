"""Set up a training run before its first step: model, data, samples of each rank, engine."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from harness.domain.graph import LOSS
from harness.domain.shard_state import shards_parameters
from harness.domain.strategy import Strategy, samples_per_device
from harness.errors import ConfigError, ModelError
from harness.inputs import shorten
from harness.measure.recorder import Recorder
from harness.runtime.capture.capture import capture
from harness.runtime.capture.meta_run import StepFlops, step_flops
from harness.runtime.data import count_targets, entry_for, load_batches, open_data
from harness.runtime.data.agreement import check_same
from harness.runtime.data.batch import Batch, BatchPlan, split_by_weight
from harness.runtime.data.synthetic import draw_batch
from harness.runtime.devices.memory import move_model
from harness.runtime.devices.precision import Precision, sent_bytes, set_tensor_cores
from harness.runtime.devices.sampling import settle
from harness.runtime.engines.engine import Engine, EngineOptions, Share
from harness.runtime.engines.optimizers import LearningRates, OptimizerOptions, is_matched
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.faithfulness.loss import hold_own_loss
from harness.runtime.faithfulness.state import preserved
from harness.runtime.models import build_task
from harness.runtime.models.own_loss import BatchLossTask
from harness.runtime.models.shared_build import build_on_host
from harness.runtime.models.task import Task
from harness.runtime.ranks.gather import (
    gather_numbers,
    gather_values,
    raise_on_all_ranks,
    wait_for_all,
)
from harness.runtime.ranks.world import World
from harness.workloads.train.config import ZERO_STAGES, EngineName, TrainCase
from harness.workloads.train.files import data_options, fitted_options
from harness.workloads.train.noise import warn_of_masks
from harness.workloads.train.plan import Planned

if TYPE_CHECKING:
    from harness.runtime.executor.change.elastic import ElasticExecutor
    from harness.runtime.executor.engine import ExecutorEngine

# Module and class of each engine, imported when it trains; the executor also takes its plan.
ENGINES: dict[EngineName, tuple[str, str]] = {
    "torch": ("harness.runtime.engines.torch_engine", "TorchEngine"),
    "executor": ("harness.runtime.executor.engine", "ExecutorEngine"),
    "deepspeed": ("harness.runtime.engines.deepspeed_engine", "DeepSpeedEngine"),
}

# Many periods of a CPU quota, which lets a process run and pause in turn.
_MIN_TIME_S = 0.5
_MIN_STEPS = 3

_log = logging.getLogger(__name__)


def samples_per_s(task: Task, n_samples: int, dtype: str, device: torch.device) -> float:
    """Rate of forward and backward over batches of `n_samples`; the model is not changed."""
    inputs, targets = draw_batch(task, n_samples, 0, device)
    precision = Precision(dtype, device)

    def step() -> None:
        with precision.autocast():
            loss = task.sum_loss(task.model(*inputs), targets) / targets.numel()
        loss.backward()
        task.model.zero_grad(set_to_none=True)

    with preserved(task.model):
        step()
        settle(device)
        n_steps, start_s = 0, time.perf_counter()
        while n_steps < _MIN_STEPS or time.perf_counter() - start_s < _MIN_TIME_S:
            step()
            settle(device)
            n_steps += 1
        return n_steps * n_samples / (time.perf_counter() - start_s)


def reduces_all(case: TrainCase) -> bool:
    """Whether every rank holds every parameter, and all gradients are summed over all ranks."""
    is_data_parallel = case.strategy in ("single", "ddp", "zero1", "zero2")
    return is_data_parallel and not shards_parameters(case.sharded_state)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training run that is ready for its first step.

    Attributes:
        elastic: builds engines of other strategies and moves the state to them; None if the
            strategy stays.
        plan: the samples of each rank in each step.
        n_steps: measured steps of the run.
        rates: the learning rate of each of them.
        batches: this rank's batches, step by step, without end.
        count_targets: targets that count of each of some samples, by their indices in an epoch.
        n_tokens: tokens of a sample; 0 if it has none.
        prefix: what stands before the names of the user's own parameters.
        flops: FLOPs of this rank in a step; None when they cannot be counted.
        n_parameters: number of trained parameters of the whole model.
        gradient_bytes: bytes that data parallelism all-reduces in a step, on average; None for
            other strategies.
        has_local_loss: ranks compute a loss of their own samples that may be no mean over samples.
    """

    engine: Engine
    elastic: ElasticExecutor | None
    data: Any
    plan: BatchPlan
    n_steps: int
    rates: LearningRates
    batches: Iterator[Batch]
    count_targets: Callable[[Sequence[int]], tuple[int, ...]]
    n_tokens: int
    prefix: str
    flops: StepFlops | None
    n_parameters: int
    gradient_bytes: int | None
    has_local_loss: bool

    def share(self, step: int, rank: int) -> Share:
        """A rank's share of a step's batch, counted from the first warm-up step."""
        plan, sizes = self.plan, self.plan.sizes(step)
        return Share(
            n_local=plan.n_fed(rank, step),
            n_global=sum(sizes),
            counts=self.count_targets(plan.global_indices(step, has_epochs=True)),
            n_replica=sum(sizes[rank] for rank in self.engine.replica),
        )

    @property
    def executor(self) -> ExecutorEngine:
        """The engine, where only the executor does what the flags ask for."""
        return cast("ExecutorEngine", self.engine)


def set_norm_scope(model: nn.Module, scope: str, device: torch.device) -> nn.Module:
    """Convert batch norm to SyncBatchNorm if `scope` is `global`; `local` keeps the model.

    Raises:
        ConfigError: the device is a CPU, for which PyTorch has no SyncBatchNorm.
    """
    if scope == "global":
        if device.type != "cuda":
            raise ConfigError(
                "--batch-norm global needs GPUs: PyTorch's SyncBatchNorm has no CPU version; add "
                "--engine executor (instead of zero1 to zero3: --strategy ddp --shard-state), or "
                "use local (each rank's own statistics) or frozen (running statistics)"
            )
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    return model


def make_task(case: TrainCase) -> Task:
    """Build the model of a run on the current default device; equal on every rank."""
    return build_task(case.model, fitted_options(case), case.seed)


def _place(case: TrainCase, task: Task, device: torch.device) -> Task:
    model = task.model
    # The executor reads the scope from its plan.
    if case.engine != "executor":
        model = set_norm_scope(model, case.norm_scope, device)
    # The executor moves the slices that a device keeps: the whole model may not fit there.
    place = torch.device("cpu") if case.engine == "executor" else device
    return replace(task, model=move_model(model, place, is_channels_last=case.channels_last))


def _shares(case: TrainCase, task: Task, world: World) -> tuple[int, ...]:
    """Samples of each rank in a full batch; every rank gets at least one."""
    equal = split_by_weight(case.batch, [1.0] * world.size)
    if case.balance == "equal" or world.size == 1:
        return tuple(equal)
    speeds = gather_numbers(
        samples_per_s(task, max(1, equal[world.rank]), case.dtype, world.device), world
    )
    return tuple(1 + n for n in split_by_weight(case.batch - world.size, speeds))


def _counted(strategy: Strategy, n_ranks: int) -> tuple[int, ...]:
    """Number of samples whose loss each rank computes; the sum over ranks is the batch."""
    by_device = samples_per_device(strategy, LOSS)
    return tuple(by_device.get(rank, 0) for rank in range(n_ranks))


def _positions(engine: Engine, world: World) -> tuple[tuple[int, ...], ...] | None:
    """Positions of the samples that every rank is fed, by rank."""
    if engine.samples is None:
        return None
    return tuple(gather_values(tuple(engine.samples), tuple[int, ...], world))


def executor_plan(case: TrainCase, strategy: Strategy, timeout_s: float = 300.0) -> ExecutorPlan:
    """Make the executor's options for a run."""
    return ExecutorPlan(
        strategy=strategy,
        batch_norm=case.norm_scope,
        dropout="exact" if case.exact_dropout else "local",
        is_asynchronous=case.is_asynchronous,
        is_compiled=case.compile,
        seed=case.seed,
        timeout_s=timeout_s,
    )


def _optimizer_options(case: TrainCase, task: Task) -> OptimizerOptions:
    """The optimizer of a run, with the model's own names of parameters.

    Raises:
        ConfigError: --no-decay matches no parameter, or leaves none that decays.
    """
    options, prefix = case.optimizer_options(), task.prefix
    trained = {n: p.dim() for n, p in task.model.named_parameters() if p.requires_grad}
    patterns = tuple(text if text == "1d" else f"{prefix}{text}" for text in case.no_decay)
    for given, pattern in zip(case.no_decay, patterns, strict=True):
        if not any(is_matched(name, n_dims, pattern) for name, n_dims in trained.items()):
            known = shorten([name.removeprefix(prefix) for name in trained])
            raise ConfigError(
                f"--no-decay {given} matches no trained parameter of {case.model}, which has "
                f"{known}: correct the pattern"
            )
    options = replace(options, no_decay=patterns)
    if trained and all(options.group_of(*one) for one in trained.items()):
        raise ConfigError(
            f"--no-decay {' '.join(case.no_decay)} leaves none of {len(trained)} parameters that "
            "decays: drop --weight-decay instead"
        )
    return options


def _make_engine(
    case: TrainCase,
    task: Task,
    world: World,
    recorder: Recorder,
    plan: ExecutorPlan | None,
    n_local: int,
) -> tuple[Engine, ElasticExecutor | None]:
    # Ranks need different dropout masks, because their samples are independent.
    torch.manual_seed(case.seed * world.size + world.rank)
    unread: tuple[str, ...] = ()
    if case.engine == "torch" and ":" in case.model and world.size > 1:
        from harness.runtime.engines.torch_engine import unread_parameters

        unread = unread_parameters(task)
    options = EngineOptions(
        dtype=case.dtype,
        optimizer=_optimizer_options(case, task),
        bucket_bytes=round(case.bucket_mib * (1 << 20)),
        reduce_dtype=case.reduce_dtype,
        zero_stage=ZERO_STAGES.get(case.strategy, 0),
        batch=n_local,
        unread=unread,
        is_compiled=case.compile,
        outer=case.outer_options(),
    )
    if plan is None or not case.is_elastic:
        module, name = ENGINES[case.engine]
        make: Callable[..., Engine] = getattr(import_module(module), name)
        return make(task, world, recorder, options, *(() if plan is None else (plan,))), None
    from harness.runtime.executor.change.elastic import ElasticExecutor

    elastic = ElasticExecutor(task, world, recorder, options, plan)
    return elastic.engine, elastic


def _batch_plan(
    case: TrainCase, data: Any, shares: tuple[int, ...], engine: Engine, world: World
) -> BatchPlan:
    if engine.samples is not None:
        wait_for_all(world)  # because ranks take different times to build their shards
    readers = () if engine.samples is None else cast("ExecutorEngine", engine).readers
    check_same(f"--data {case.data}", data, world, readers)
    plan = BatchPlan(
        n_samples=len(data),
        shares=shares,
        positions=_positions(engine, world),
        is_shuffled=entry_for(case.data, case.model).is_shuffled,
        seed=case.seed,
    )
    if plan.n_dropped and world.is_first:
        _log.warning(
            "whole batches only: the last %d of %d samples of each epoch are dropped",
            plan.n_dropped, plan.n_samples,
        )  # fmt: skip
    return plan


def _has_local_loss(case: TrainCase, task: Task, world: World) -> bool:
    """See `Training`; False but on rank 0."""
    if world.size == 1 or not world.is_first or not isinstance(task, BatchLossTask):
        return False
    try:
        graph = capture(task, case.batch, case.model).graph
    except ModelError:  # which says nothing about the loss
        return True
    return graph.mixing_operator() is not None


def prepare(
    case: TrainCase,
    world: World,
    recorder: Recorder,
    planned: Planned | None = None,
    timeout_s: float = 300.0,
) -> Training:
    """Build model, data and engine of a run; all ranks must call it.

    Args:
        planned: the plan for the executor; other engines have none.
        timeout_s: how long the executor waits for another rank.

    Raises:
        ConfigError, ModelError, DataError, StrategyError: flags, model, data and strategy
            contradict each other.
    """
    set_tensor_cores(case.dtype, world.device)
    task = _place(case, build_on_host(lambda: make_task(case), world), world.device)
    if case.noise_steps and world.is_first:
        warn_of_masks(task.model)
    trained = [p for p in task.model.parameters() if p.requires_grad]
    n_parameters = sum(p.numel() for p in trained)  # before the executor frees other ranks'
    gradient_bytes = sum(sent_bytes(p, case.reduce_dtype) for p in trained) // case.sync_every
    options: ExecutorPlan | None = None
    flops: StepFlops | None
    has_local_loss = planned is None and _has_local_loss(case, task, world)
    if planned is None:
        raise_on_all_ranks(lambda: hold_own_loss(task, case.model), world)
        shares = _shares(case, task, world)
        flops = step_flops(task, shares[world.rank])
    else:
        options = executor_plan(case, planned.strategy, timeout_s)
        shares = _counted(planned.strategy, world.size)
        flops = planned.flops[world.rank]
    data: Any = open_data(case.data, data_options(case), task, case.batch)
    engine, elastic = _make_engine(case, task, world, recorder, options, shares[world.rank])
    if case.load_state is not None:
        from harness.runtime.executor.state.files import open_sharded

        open_state = partial(open_sharded, case.load_state)
        cast("ExecutorEngine", engine).load_full_state(open_state)
    plan = _batch_plan(case, data, shares, engine, world)
    n_steps = case.epochs * plan.n_steps_per_epoch if case.epochs else case.steps
    case.check_averages(n_steps)
    rates = LearningRates(
        case.learning_rate, case.lr_schedule,
        case.lr_step_size or max(1, n_steps - case.lr_warm_up), case.lr_gamma, case.lr_warm_up,
    )  # fmt: skip
    batches = load_batches(
        data, plan, world.rank, n_workers=case.n_workers, device=world.device,
        first_step=case.first_step + case.warm_up if case.first_step else 0,
    )  # fmt: skip
    return Training(
        engine=engine,
        elastic=elastic,
        data=data,
        plan=plan,
        n_steps=n_steps,
        rates=rates,
        batches=batches,
        count_targets=partial(count_targets, data, task),
        n_tokens=task.n_tokens,
        prefix=task.prefix,
        flops=flops,
        n_parameters=n_parameters,
        gradient_bytes=gradient_bytes if reduces_all(case) else None,
        has_local_loss=has_local_loss,
    )


def continue_by(
    training: Training, case: TrainCase, world: World, engine: Engine, planned: Planned, step: int
) -> Training:
    """The training of the same data from a step on by another strategy; all ranks must call it.

    Args:
        step: counted from the first warm-up step.
    """
    shares = _counted(planned.strategy, world.size)
    plan = replace(training.plan, shares=shares, positions=_positions(engine, world))
    batches = load_batches(
        training.data, plan, world.rank,
        n_workers=case.n_workers, device=world.device, first_step=step,
    )  # fmt: skip
    flops = planned.flops[world.rank]
    return replace(training, engine=engine, plan=plan, batches=batches, flops=flops)
