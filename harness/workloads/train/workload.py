"""The train workload: train a model, verify the result and measure the phases of a step."""

from __future__ import annotations

from typing import Any

from harness.measure.store import replacing
from harness.runtime.devices.memory import peak_bytes, reset_peak
from harness.runtime.devices.telemetry import watched_device
from harness.runtime.ranks.context import Context
from harness.workloads.common.contract import Workload
from harness.workloads.train.cases import train_cases
from harness.workloads.train.changes import StrategyChanges
from harness.workloads.train.check import check_files
from harness.workloads.train.config import TrainCase, TrainConfig
from harness.workloads.train.loop import TrainLoop
from harness.workloads.train.plan import Planned, plan_training, train_needs
from harness.workloads.train.setup import Training, prepare
from harness.workloads.train.table import train_text


def _record_constants(training: Training, context: Context) -> None:
    """Record numbers that are the same in every step."""
    if training.gradient_bytes is not None:
        context.recorder.sample("gradient_bytes", training.gradient_bytes)
    if training.flops is not None:
        context.recorder.sample("model_flops", training.flops.total)
        context.recorder.sample("score_flops", training.flops.scores)
    if training.n_tokens:
        context.recorder.sample("tokens_per_sample", training.n_tokens)


def _record_peaks(context: Context) -> None:
    for kind, n_bytes in peak_bytes(context.world.device).items():
        context.recorder.sample("memory_peak_bytes", n_bytes, kind=kind)


def _save_model(training: Training, context: Context) -> None:
    """Write the model on rank 0; all ranks must call it, because engines may gather it."""
    from safetensors.torch import save_file

    state = training.engine.model_state()
    if context.world.is_first:
        # Copy tensors with several names (tied weights): safetensors refuses shared memory.
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
        first = {tensor.data_ptr(): name for name, tensor in reversed(whole.items())}
        for name, tensor in whole.items():
            if first[tensor.data_ptr()] != name:
                whole[name] = tensor.clone()
        with replacing(context.run_dir / "model.safetensors") as temporary:
            save_file(whole, str(temporary))


def _save(case: TrainCase, training: Training, context: Context) -> None:
    if case.save_model:
        _save_model(training, context)
    if case.save_sharded:
        save_sharded = training.trainer.save_sharded
        assert save_sharded is not None, "other engines were refused"
        save_sharded(context.run_dir / "state")


def _prepare(case: TrainCase, context: Context) -> tuple[Training, Planned | None]:
    """Plan and set up; other engines than the executor are planned by their measured shares."""
    world, recorder = context.world, context.recorder
    if case.engine == "executor":
        planned = plan_training(case, context)
        reset_peak(world.device)
        training = prepare(case, world, recorder, planned, context.collective_timeout_s)
        return training, planned
    training = prepare(case, world, recorder)
    return training, plan_training(case, context, training.plan.shares)


def _plan_summary(planned: Planned | None, *, is_elastic: bool) -> dict[str, Any]:
    if planned is None:
        return {}
    strategy = planned.strategy
    # A run that changes its strategy has no single step to compare with a prediction.
    predicted_s = None if is_elastic else planned.predicted_step_s
    return {
        "strategy": strategy.name,
        "schedule": strategy.schedule,
        "n_microbatches": strategy.n_microbatches,
        "n_stages": len(strategy.stages),
        "predicted_step_s": predicted_s,
    }


def _train(case: TrainCase, context: Context) -> dict[str, Any]:
    training, planned = _prepare(case, context)
    if not case.is_elastic:  # because a change alters these numbers
        _record_constants(training, context)
    n_steps = (case.epochs or 0) * training.plan.n_steps_per_epoch or case.steps
    changes: StrategyChanges | None = None
    if case.is_elastic:
        assert planned is not None, "other engines were refused"
        changes = StrategyChanges(case, context, planned, training, n_steps)
    loop = TrainLoop(training, context, case.warm_up, changes)
    loop.measure(n_steps)
    if changes is not None:
        changes.close()
    training = loop.training
    losses = loop.record_losses()
    digest = training.trainer.verify()
    summary = {
        **_plan_summary(planned, is_elastic=case.is_elastic),
        "n_parameters": training.n_parameters,
        "parameters_digest": digest,
        "first_loss": losses[0],
        "last_loss": losses[-1],
        "shares": list(training.plan.shares),
        "steps_per_epoch": training.plan.n_steps_per_epoch,
    }
    _save(case, training, context)
    if changes is None:
        loop.measure_without_communication(case.no_sync_steps)
    return summary


def run_train(case: TrainCase, context: Context) -> dict[str, Any]:
    """Train on all ranks of the run; out-of-memory errors propagate.

    Raises:
        VerificationError: a loss is not finite, or the replicas' parameters differ.
        ConfigError, ModelError, DataError: flags, model and data contradict each other.
        StrategyError, PlanError: there is no strategy, or it does not fit.
        PeerError: another rank died or hangs in a step.
    """
    world = context.world
    reset_peak(world.device)
    try:
        with watched_device(world.device, world.n_cores, context.recorder):
            return _train(case, context)
    finally:
        _record_peaks(context)


def _n_ranks(case: TrainCase, n_started: int) -> int:
    return min(case.n_ranks, n_started)


WORKLOAD = Workload(
    renamed={"--rank-counts": "--n-ranks"},
    config=TrainConfig,
    cases=train_cases,
    body=run_train,
    table=train_text,
    n_ranks=_n_ranks,
    needs=train_needs,
    check=check_files,
)
