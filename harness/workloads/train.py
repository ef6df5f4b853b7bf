"""The train workload: train a model, verify what was trained, and say where the time goes."""

from __future__ import annotations

from typing import Any

from harness.runtime.context import Context
from harness.runtime.memory import peak_bytes, reset_peak
from harness.runtime.replicas import digest, verify_replicas
from harness.runtime.telemetry import watched_device
from harness.workloads.contract import Workload
from harness.workloads.train_config import TrainCase, TrainConfig, train_cases
from harness.workloads.train_loop import TrainLoop
from harness.workloads.train_setup import Training, prepare
from harness.workloads.train_table import train_text


def _record_constants(training: Training, context: Context) -> int:
    """What is the same in every step; returns the number of parameters."""
    parameters = [p for p in training.engine.model.parameters() if p.requires_grad]
    n_bytes = sum(p.numel() * p.element_size() for p in parameters)
    context.recorder.sample("gradient_bytes", n_bytes)
    if training.flops is not None:
        context.recorder.sample("model_flops", training.flops)
    return sum(p.numel() for p in parameters)


def _record_peaks(context: Context) -> None:
    for kind, n_bytes in peak_bytes(context.world.device).items():
        context.recorder.sample("memory_peak_bytes", n_bytes, kind=kind)


def _save_model(training: Training, context: Context) -> None:
    """Rank 0 writes the model; all ranks must call it, since an engine may have to gather it."""
    from safetensors.torch import save_file

    state = training.engine.full_state()["model"]
    if context.world.is_first:
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        save_file(whole, str(context.run_dir / "model.safetensors"))


def _train(case: TrainCase, context: Context) -> dict[str, Any]:
    world = context.world
    training = prepare(case, world, context.recorder)
    n_parameters = _record_constants(training, context)
    n_steps = case.epochs * training.plan.n_steps_per_epoch or case.steps
    loop = TrainLoop(training, context, case.warm_up)
    loop.measure(n_steps)
    losses = loop.record_losses()
    verify_replicas(training.engine.model, world)
    summary = {
        "n_parameters": n_parameters,
        "parameters_digest": digest(training.engine.model),
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "shares": list(training.plan.shares),
        "steps_per_epoch": training.plan.n_steps_per_epoch,
    }
    if case.save_model:
        _save_model(training, context)
    loop.measure_without_synchronisation(case.no_sync_steps)
    return summary


def run_train(case: TrainCase, context: Context) -> dict[str, Any]:
    """Train on all ranks of the run; raises out-of-memory errors as they come.

    Raises:
        VerificationError: a loss is not finite, or the replicas' parameters differ.
        ConfigError, ModelError, DataError: flags, model and data do not go together.
    """
    reset_peak(context.world.device)
    try:
        with watched_device(context.world.device, context.recorder):
            return _train(case, context)
    finally:
        _record_peaks(context)


def _n_ranks(case: TrainCase, n_started: int) -> int:
    return min(case.n_ranks, n_started)


TRAIN = Workload(
    summary="train a model by single, ddp or ZeRO: throughput, phases, communication, MFU",
    config=TrainConfig,
    cases=train_cases,
    body=run_train,
    table=train_text,
    n_ranks=_n_ranks,
)
