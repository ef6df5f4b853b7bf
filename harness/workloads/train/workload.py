"""The train workload: train a model, verify the result and measure the phases of a step.

Samples are recorded between the steps, outside their spans.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import VerificationError
from harness.measure.derive.settings import STRATEGY_FLAGS
from harness.measure.derive.spans import phase_table
from harness.measure.store import replacing
from harness.run import measure_steps
from harness.runtime.data.batch import Batch
from harness.runtime.devices.memory import record_peaks, reset_peak
from harness.runtime.devices.telemetry import watched_device
from harness.runtime.engines.optimizers import set_rate
from harness.runtime.ranks.gather import barrier
from harness.runtime.ranks.interfaces import NicCounter
from harness.runtime.ranks.world import Context
from harness.workloads.common.contract import UNTIL, Continuing, Workload
from harness.workloads.train import keeper as states
from harness.workloads.train.cases import train_cases
from harness.workloads.train.config import TrainCase, TrainConfig
from harness.workloads.train.evaluation import Evaluation
from harness.workloads.train.losses import LossLog
from harness.workloads.train.plan import Planned, check_inputs, plan_training, train_needs
from harness.workloads.train.setup import Training, prepare
from harness.workloads.train.table import train_text

if TYPE_CHECKING:
    from harness.workloads.train.changes import StrategyChanges

_log = logging.getLogger(__name__)


class TrainLoop:
    """Trains for some steps on this rank; all ranks call the same methods.

    Args:
        changes: changes of the strategy; None if it stays.
        evaluation: of the model between steps; None if it is not evaluated.
        keeper: saves the state; None if nothing does.
        first: the first measured step; above 0 without warm-up.
        noise_steps, noise_every: as the flags.

    Attributes:
        training: replaced when the strategy changes.
    """

    def __init__(
        self,
        training: Training,
        context: Context,
        n_warm_up: int,
        changes: StrategyChanges | None = None,
        evaluation: Evaluation | None = None,
        keeper: states.StateKeeper | None = None,
        first: int = 0,
        noise_steps: int = 0,
        noise_every: int | None = None,
    ) -> None:
        self.training, self._evaluation = training, evaluation
        self._noise_steps, self._noise_every = noise_steps, noise_every
        self._changes, self._keeper = changes, keeper
        self._first, self._n_warm_up = first, n_warm_up
        self._context, self._losses = context, LossLog(context, first)
        self._nic = NicCounter(context.world.interface)
        self._epoch_start_s, self._n_steps = 0.0, training.n_steps

    def measure(self, n_steps: int) -> None:
        """Warm up, then train the recorded steps until `n_steps`."""
        self._n_steps = n_steps
        if self._first:  # the run before may have lost its rank in an evaluation
            self._evaluate(self._first - 1)
        if 0 < self._first < n_steps and self._changes is not None:
            self.training = self._changes.before_step(self._first, self.training)
        if self._first:  # no step warms up, and the first shall not hold another rank's planning
            barrier()
        self._begin_epoch()
        measure_steps(
            self._step,
            self._context,
            n_steps=n_steps,
            n_warm_up=self._n_warm_up,
            first=self._first,
            between=self._between,
        )

    def _step(self, index: int) -> None:
        training = self.training
        if self._keeper is not None:
            self._keeper.begin_step(index, training)
        if self._changes is not None and index >= 0:
            self._changes.begin_step(training.plan.global_indices(index + self._n_warm_up))
        set_rate(training.engine.optimizer, training.rates.at(index))
        share = training.share(index + self._n_warm_up, self._context.world.rank)
        loss = training.engine.step(lambda: next(training.batches), share)
        self._losses.add(index, loss)
        if index == -1:
            self._losses.end_step()
            barrier()  # the first recorded step shall not hold another rank's warm-up
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._nic.advance()
        self._epoch_start_s = time.perf_counter()

    def _between(self, index: int) -> str:
        """Record a step; returns its note for the progress."""
        recorder, interface = self._context.recorder, self._context.world.interface
        sent, received = self._nic.advance()
        recorder.sample("nic_sent_bytes", sent, interface=interface)
        recorder.sample("nic_received_bytes", received, interface=interface)
        recorder.sample(
            "n_samples", self.training.plan.sizes(index + self._n_warm_up)[self._context.world.rank]
        )
        recorder.sample("n_synchronisations", self.training.engine.n_synchronisations)
        if self._keeper is not None and self._keeper.is_due(index):
            self._losses.record()  # a run that goes on from the state has those after it
        else:
            self._losses.end_step()
        n_steps = self.training.plan.n_steps_per_epoch
        epoch, last = divmod(index + 1, n_steps)
        if last == 0 and index + 1 - self._first >= n_steps:
            epoch_s = time.perf_counter() - self._epoch_start_s
            recorder.sample("epoch_s", epoch_s, step=epoch - 1)
        self._evaluate(index)
        done = index + 1
        if self._noise_every and done % self._noise_every == 0 and done < self._n_steps:
            self._stand_still(lambda: self.measure_noise(done))
        if last == 0:
            self._begin_epoch()
        if self._keeper is not None:
            self._keeper.end_step(index, self.training)
        if self._changes is not None and index + 1 < self._n_steps:
            before = self.training
            self.training = self._changes.before_step(index + 1, before)
            if self.training is not before:
                self._nic.advance()  # the bytes of the change are not those of a step
        return self._losses.note

    def _evaluate(self, index: int) -> None:
        """Record the evaluation after a step, if one is due."""
        if self._evaluation is None or (index + 1) % self._evaluation.interval(self.training.plan):
            return
        evaluation, sample = self._evaluation, self._context.recorder.sample

        def evaluate() -> None:
            for metric, value in evaluation.measure(self.training.engine).items():
                sample(metric, value, step=index)

        self._stand_still(evaluate)

    def _stand_still(self, act: Callable[[], None]) -> None:
        """Act between steps; the time and bytes are no epoch's."""
        start_s = time.perf_counter()
        self._context.recorder.step = None
        act()
        self._nic.advance()
        self._epoch_start_s += time.perf_counter() - start_s

    def record_losses(self) -> list[float]:
        """Record the losses that are left; returns those of all measured steps.

        Raises:
            VerificationError: a loss is not finite, or, without a step to train, a weight.
        """
        self._losses.record()
        if not self._losses.values:  # a run that goes on after its last step
            self._check_weights()
        return self._losses.values

    def _check_weights(self) -> None:
        world, model = self._context.world, self.training.executor.model  # others save no state
        found = torch.zeros((), dtype=torch.float64, device=world.device)
        for parameter in model.parameters():
            found += parameter.detach().abs().sum()
        if world.size > 1:
            dist.all_reduce(found)
        if not math.isfinite(float(found)):
            raise VerificationError(
                f"the weights after step {self._first} are {float(found)}: lower --learning-rate, "
                "and begin again without --resume"
            )

    def measure_noise(self, done: int) -> None:
        """Run the steps of --noise-steps after so many measured steps."""
        if self._noise_steps:
            from harness.workloads.train.noise import record_gradients

            record_gradients(self.training, self._noise_steps, self._context, done)

    def trace_kernels(self, n_steps: int) -> None:
        """Train further steps under torch.profiler, of full batches."""
        if not n_steps:
            return
        from harness.workloads.train.kernels import trace_steps

        self._context.flush()
        engine, share = self.training.engine, self.training.share(0, self._context.world.rank)
        barrier()
        trace_steps(lambda: engine.step(self._full_batch, share), n_steps, self._context)

    def measure_without_communication(self, n_steps: int) -> None:
        """Time the same steps without communication.

        The steps use full batches, so that they are comparable with the measured ones. The model's
        parameters are meaningless afterwards.
        """
        engine, recorder = self.training.engine, self._context.recorder
        if not n_steps or not engine.can_be_muted:
            return
        self._context.flush()
        share = self.training.share(0, self._context.world.rank)
        barrier()
        for recorder.step in range(-1, n_steps):
            with recorder.span("step"):
                engine.step(self._full_batch, share, is_muted=True)
        recorder.step = None
        table = phase_table(recorder.collect())
        for metric, seconds in (
            ("no_sync_step_s", table.step_s),
            ("no_sync_compute_s", table.compute_s),
        ):
            for step, step_s in zip(table.steps.tolist(), seconds.tolist(), strict=True):
                if step >= 0:  # the first one warms up
                    recorder.sample(metric, step_s, step=step)

    def _full_batch(self) -> Batch:
        n_fed = self.training.plan.n_fed(self._context.world.rank)
        n_held = max(1, n_fed)  # a rank without samples gets a dummy one
        return next(batch for batch in self.training.batches if len(batch.targets) == n_held)


def _record_constants(training: Training, context: Context) -> None:
    """Record numbers that are the same in every step."""
    if training.gradient_bytes is not None:
        context.recorder.sample("gradient_bytes", training.gradient_bytes)
    if training.flops is not None:
        context.recorder.sample("model_flops", training.flops.total)
        context.recorder.sample("score_flops", training.flops.scores)
    if training.n_tokens:
        context.recorder.sample("tokens_per_sample", training.n_tokens)


def _save_model(training: Training, context: Context, state: dict[str, Tensor], file: str) -> None:
    """Write a state of the whole model on rank 0."""
    from safetensors.torch import save_file

    if context.world.is_first:
        # Copy tensors with several names (tied weights): safetensors refuses shared memory.
        named = {name.removeprefix(training.prefix): value for name, value in state.items()}
        whole = {n: x.detach().cpu().contiguous() for n, x in named.items() if torch.is_tensor(x)}
        if others := sorted(named.keys() - whole.keys()):
            _log.warning(
                "%s.safetensors leaves out %s, because it holds tensors alone: load it by "
                "load_state_dict(..., strict=False)", file, ", ".join(others),
            )  # fmt: skip
        first = {tensor.data_ptr(): name for name, tensor in reversed(whole.items())}
        for name, tensor in whole.items():
            if first[tensor.data_ptr()] != name:
                whole[name] = tensor.clone()
        with replacing(context.run_dir / f"{file}.safetensors") as temporary:
            save_file(whole, str(temporary))


def _save(case: TrainCase, training: Training, context: Context) -> None:
    if case.save_model:
        _save_model(training, context, training.engine.model_state(is_for_first=True), "model")
        if case.ema is not None:
            averaged = training.engine.averaged_state(is_for_first=True)
            _save_model(training, context, averaged, "averaged")
    if case.save_sharded:
        training.executor.shard(context.run_dir.name).write(context.run_dir / "state")


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
    changes: StrategyChanges | None = None
    if case.is_elastic:
        from harness.workloads.train.changes import StrategyChanges

        assert planned is not None, "other engines were refused"
        changes = StrategyChanges(case, context, planned, training)
    evaluation = Evaluation(case, context, training) if case.evaluate else None
    keeper = states.StateKeeper(case, context)
    loop = TrainLoop(
        training, context, case.warm_up, changes, evaluation, keeper, case.first_step,
        case.noise_steps, case.noise_every,
    )  # fmt: skip
    is_last = case.until is None or case.until >= training.n_steps
    with keeper.surviving():
        loop.measure(training.n_steps if is_last else case.until or 0)
        keeper.close()
        if changes is not None:
            changes.close()
        training = loop.training
        losses = loop.record_losses()
        digest = training.engine.verify()
        if is_last:
            _save(case, training, context)
    summary = {
        **_plan_summary(planned, is_elastic=case.is_elastic),
        "n_parameters": training.n_parameters,
        "parameters_digest": digest,
        "shares": list(training.plan.shares),
        "steps_per_epoch": training.plan.n_steps_per_epoch,
        "has_local_loss": training.has_local_loss,
    }
    if losses:
        summary |= {"first_loss": losses[0], "last_loss": losses[-1]}
    if case.continues:
        summary |= {"continues": case.continues, "first_step": case.first_step}
    if not is_last:
        return summary | {UNTIL: case.until}
    if changes is None:
        loop.measure_noise(training.n_steps)
        loop.trace_kernels(case.profiler_steps)
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
        record_peaks(world.device, context.recorder)


WORKLOAD = Workload(
    renamed={
        "--rank-counts": "--n-ranks",
        "--lr": "--learning-rate",
        "--seq-len": "--sequence-length",
    },
    config=TrainConfig,
    cases=train_cases,
    body=run_train,
    table=train_text,
    needs=train_needs,
    continuing=Continuing(
        find=states.find_continuation,
        go_on=states.go_on,
        grace_s=states.grace_s,
        is_saved=lambda case: case.save_every is not None,
        differing=states.differing,
        strategy_flags=STRATEGY_FLAGS | {"code_digest"},
    ),
    check=check_inputs,
)
