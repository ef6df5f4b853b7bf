"""The steps of a training run, and the samples recorded between them, outside their spans."""

from __future__ import annotations

import math
import time

import torch
import torch.distributed as dist
from torch import Tensor

from harness.errors import VerificationError
from harness.measure.derive.spans import rank_phases
from harness.run import measure_steps
from harness.runtime.data import Batch
from harness.runtime.engines.engine import Share
from harness.runtime.ranks.context import Context
from harness.runtime.ranks.nic import NicCounter
from harness.workloads.train.changes import StrategyChanges
from harness.workloads.train.setup import Training


class TrainLoop:
    """Trains for some steps on this rank; all ranks call the same methods.

    Losses stay on the device until the end, so that no step waits for them.

    Args:
        changes: changes of the strategy; None if it stays.

    Attributes:
        training: replaced when the strategy changes.
    """

    def __init__(
        self,
        training: Training,
        context: Context,
        n_warm_up: int,
        changes: StrategyChanges | None = None,
    ) -> None:
        self.training = training
        self._changes = changes
        self._n_steps = 0
        self._context = context
        self._n_warm_up = n_warm_up
        self._losses: list[Tensor] = []
        self._nic = NicCounter(context.world.interface)
        self._epoch_start_s = 0.0

    def measure(self, n_steps: int) -> None:
        """Warm up, then train `n_steps` recorded steps."""
        self._begin_epoch()
        self._n_steps = n_steps
        measure_steps(
            self._step,
            self._context,
            n_steps=n_steps,
            n_warm_up=self._n_warm_up,
            label="training steps",
            between=self._between,
        )

    def _share(self, index: int) -> Share:
        plan, step = self.training.plan, index + self._n_warm_up
        n_fed = plan.n_fed(self._context.world.rank, step)
        counts = self.training.count_targets(plan.global_indices(step))
        return Share(n_local=n_fed, n_global=sum(plan.sizes(step)), counts=counts)

    def _n_counted(self, index: int) -> int:
        """Number of samples of a step that count for this rank; the sum over ranks is the batch."""
        return self.training.plan.sizes(index + self._n_warm_up)[self._context.world.rank]

    def _step(self, index: int) -> None:
        training = self.training
        loss = training.engine.step(lambda: next(training.batches), self._share(index))
        self._losses.append(loss)
        if index == -1:
            self._begin_epoch()

    def _begin_epoch(self) -> None:
        self._nic.advance()
        self._epoch_start_s = time.perf_counter()

    def _between(self, index: int) -> None:
        recorder = self._context.recorder
        sent, received = self._nic.advance()
        interface = self._context.world.interface
        recorder.sample("nic_sent_bytes", sent, interface=interface)
        recorder.sample("nic_received_bytes", received, interface=interface)
        recorder.sample("n_samples", self._n_counted(index))
        recorder.sample("n_synchronisations", self.training.engine.n_synchronisations)
        epoch, last = divmod(index + 1, self.training.plan.n_steps_per_epoch)
        if last == 0:
            now_s = time.perf_counter()
            recorder.sample("epoch_s", now_s - self._epoch_start_s, step=epoch - 1)
            self._epoch_start_s = now_s
        if self._changes is not None and index + 1 < self._n_steps:
            self.training = self._changes.before_step(index + 1, self.training)

    def record_losses(self) -> list[float]:
        """Sum the losses over all ranks and record the global loss of every measured step.

        Raises:
            VerificationError: a loss is not finite.
        """
        losses = torch.stack(self._losses).float()
        if self._context.world.size > 1:
            dist.all_reduce(losses)
        values = [float(value) for value in losses.tolist()][self._n_warm_up :]
        for step, value in enumerate(values):
            if not math.isfinite(value):
                raise VerificationError(
                    f"the loss is {value} from step {step} on: lower --learning-rate"
                )
            self._context.recorder.sample("loss", value, step=step)
        return values

    def measure_without_communication(self, n_steps: int) -> None:
        """Time the same steps without communication.

        The steps use full batches, so that they are comparable with the measured ones. The model's
        parameters are meaningless afterwards.
        """
        engine, recorder = self.training.engine, self._context.recorder
        if not n_steps or not engine.can_be_muted:
            return
        self._context.flush()
        share = self._share(-self._n_warm_up)
        dist.barrier()
        for recorder.step in range(-1, n_steps):
            with recorder.span("step"):
                engine.step(self._full_batch, share, is_muted=True)
        recorder.step = None
        for step in rank_phases(recorder.collect()):
            if step.step >= 0:  # the first one warms up
                recorder.sample("no_sync_step_s", step.step_s, step=step.step)
                recorder.sample("no_sync_compute_s", step.compute_s, step=step.step)

    def _full_batch(self) -> Batch:
        n_fed = self.training.plan.n_fed(self._context.world.rank)
        while True:
            batch = next(self.training.batches)
            if len(batch.targets) == max(1, n_fed):  # a rank without samples gets a dummy one
                return batch
