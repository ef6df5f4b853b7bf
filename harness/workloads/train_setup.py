"""Everything that stands before the first step: model, data, shares of the ranks, engine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import nn

from harness.errors import ConfigError
from harness.measure.recorder import Recorder
from harness.runtime.balance import measure_speeds
from harness.runtime.data import (
    Batch,
    BatchPlan,
    DataOptions,
    entry_for,
    load_batches,
    open_data,
    split_by_weight,
)
from harness.runtime.engine import Engine, EngineOptions, MakeEngine
from harness.runtime.engine_torch import TorchEngine
from harness.runtime.flops import step_flops
from harness.runtime.models import Task, build_task, fit_options
from harness.runtime.precision import set_tensor_cores
from harness.runtime.world import World
from harness.workloads.train_config import TrainCase


def _deepspeed(task: Task, world: World, recorder: Recorder, options: EngineOptions) -> Engine:
    from harness.runtime.engine_deepspeed import DeepSpeedEngine  # its import takes a while

    return DeepSpeedEngine(task, world, recorder, options)


ENGINES: dict[str, MakeEngine] = {"torch": TorchEngine, "deepspeed": _deepspeed}


@dataclass(frozen=True, kw_only=True)
class Training:
    """What the steps need.

    Attributes:
        plan: which samples each rank takes in each step.
        batches: this rank's, step by step, without end.
        flops: of this rank's whole share; None when they cannot be counted.
    """

    engine: Engine
    plan: BatchPlan
    batches: Iterator[Batch]
    flops: float | None


def set_batch_norm(model: nn.Module, mode: str, device: torch.device) -> nn.Module:
    """Return the model with batch normalisation as asked.

    Raises:
        ConfigError: normalising over all ranks on a CPU, which PyTorch does not offer.
    """
    if mode == "frozen":
        return _freeze_statistics(model)
    if mode == "global":
        if device.type != "cuda":
            raise ConfigError(
                "--batch-norm global needs GPUs: PyTorch's SyncBatchNorm has no CPU version; use "
                "local (each rank's own statistics) or frozen (running statistics)"
            )
        converted: nn.Module = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        return converted
    return model


def _freeze_statistics(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def make_task(case: TrainCase) -> Task:
    """Build the model of a run on the current default device; equal on every rank."""
    entry = entry_for(case.data, case.model)
    options = case.model_options()
    if not options.n_classes:
        options = replace(options, n_classes=entry.n_classes(case.data_dir))
    fitted = fit_options(case.model, options, entry.image_size, entry.n_channels)
    return build_task(case.model, fitted, case.seed)


def _place(case: TrainCase, task: Task, device: torch.device) -> Task:
    order = torch.channels_last if case.channels_last else torch.preserve_format
    model = set_batch_norm(task.model, case.batch_norm, device)
    return replace(task, model=model.to(device, memory_format=order))  # type: ignore[call-overload]


def _shares(case: TrainCase, task: Task, world: World) -> tuple[int, ...]:
    """Samples of each rank in a whole batch; every rank gets at least one."""
    equal = split_by_weight(case.batch, [1.0] * world.size)
    if case.balance == "equal" or world.size == 1:
        return tuple(equal)
    speeds = measure_speeds(task, equal[world.rank], case.dtype, world)
    extra = split_by_weight(case.batch - world.size, speeds)
    return tuple(1 + n for n in extra)


def prepare(case: TrainCase, world: World, recorder: Recorder) -> Training:
    """Build all that a run needs; all ranks must call it.

    Raises:
        ConfigError, ModelError, DataError: flags, model and data do not go together.
    """
    set_tensor_cores(case.dtype)
    task = _place(case, make_task(case), world.device)
    shares = _shares(case, task, world)
    data_options = DataOptions(
        data_dir=case.data_dir, n_samples=case.n_samples, seed=case.seed, dlrm=case.dlrm_options()
    )
    data = open_data(case.data, data_options, task, case.batch)
    plan = BatchPlan(
        n_samples=len(data),
        shares=shares,
        is_shuffled=entry_for(case.data, case.model).is_shuffled,
        seed=case.seed,
    )
    n_local = shares[world.rank]
    flops = step_flops(task, lambda: make_task(case), n_local)
    # Each rank draws dropout masks of its own, as independent samples need.
    torch.manual_seed(case.seed * world.size + world.rank)
    options = EngineOptions(
        dtype=case.dtype,
        optimizer=case.optimizer_options(),
        bucket_bytes=round(case.bucket_mib * (1 << 20)),
        zero_stage=case.zero_stage,
        batch=n_local,
    )
    engine = ENGINES[case.engine](task, world, recorder, options)
    batches = load_batches(data, plan, world.rank, n_workers=case.n_workers, device=world.device)
    return Training(engine=engine, plan=plan, batches=batches, flops=flops)
