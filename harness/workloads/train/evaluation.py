"""Loss and accuracy on held-out samples, measured after some steps of a training."""

from __future__ import annotations

import dataclasses
import gc
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from harness.domain.graph import LOSS
from harness.errors import ConfigError
from harness.runtime.capture.capture import capture
from harness.runtime.data import open_held_out
from harness.runtime.data.batch import Batch, BatchPlan
from harness.runtime.devices.precision import Precision
from harness.runtime.engines.engine import Engine
from harness.runtime.executor.run.evaluation import evaluate_held_out
from harness.runtime.faithfulness.comparison import evaluates_alike
from harness.runtime.models.own_loss import BatchLossTask
from harness.runtime.models.shared_build import build_on_host
from harness.runtime.models.task import Task, logits_of
from harness.runtime.ranks.gather import broadcast_result, gather_numbers
from harness.runtime.ranks.world import Context
from harness.workloads.train.config import TrainCase
from harness.workloads.train.files import data_options
from harness.workloads.train.setup import Training, make_task

if TYPE_CHECKING:
    from harness.runtime.executor.engine import ExecutorEngine


class Evaluation:
    """Measures one run; all ranks construct it.

    The executor evaluates under its strategy where this computes the same; else each rank has a
    copy of the whole model.

    Raises:
        ConfigError: the training ends before the first evaluation.
        DataError: the held-out samples are missing or do not fit.
    """

    def __init__(self, case: TrainCase, context: Context, training: Training) -> None:
        self._world, self._every = context.world, case.evaluate_every
        if training.n_steps < (first := self.interval(training.plan)):
            raise ConfigError(
                f"the first evaluation is after {first} steps, and the run has {training.n_steps}: "
                "raise --steps or --epochs, or lower --evaluate-every"
            )
        state = torch.get_rng_state()  # which building a model advances
        task = build_on_host(lambda: make_task(case), self._world)
        self._has_slices = case.engine == "executor" and broadcast_result(
            lambda: has_equal_slices(case, task), bool, self._world
        )
        torch.set_rng_state(state)
        self._is_averaging = case.ema is not None
        if self._has_slices:
            task = dataclasses.replace(task, model=nn.Identity())
            gc.collect()  # the graph of the model refers to itself
        self._task = task
        self._model = task.model.to(self._world.device).eval()
        self._precision = Precision(case.dtype, self._world.device)
        self._data = open_held_out(case.data, data_options(case), task, case.batch)
        self._parts = self._own_parts(case.batch)

    def interval(self, plan: BatchPlan) -> int:
        """Steps between two evaluations: an epoch, unless a flag tells them."""
        return self._every or plan.n_steps_per_epoch

    def _own_parts(self, batch: int) -> list[list[int]]:
        """The samples that this rank evaluates together."""
        samples, rank, size = range(len(self._data)), self._world.rank, self._world.size
        if isinstance(self._task, BatchLossTask):  # its parts may not depend on the ranks
            starts = samples[::batch][rank::size]
            return [list(samples[at : at + batch]) for at in starts]
        own = samples[rank::size]
        return [list(own[at : at + batch]) for at in range(0, len(own), batch)]

    def measure(self, engine: Engine) -> dict[str, float]:
        """The mean loss of held-out samples and, where a sample has one class, the share of those
        whose class is found, by metric: by the trained parameters and, with --ema, by their
        averages. All ranks must call it."""
        if self._has_slices:
            return self._under_strategy(cast("ExecutorEngine", engine))
        found = self._measured(engine.model_state())
        if self._is_averaging:
            averaged = self._measured(engine.averaged_state())
            found |= {f"averaged_{metric}": value for metric, value in averaged.items()}
        return found

    def _under_strategy(self, engine: ExecutorEngine) -> dict[str, float]:
        metrics = {"accuracy": count_right} if self._task.has_classes else {}
        found = evaluate_held_out(engine, self._task, self._data, metrics, self._world)
        return {"validation_loss": found.pop(LOSS), **found}

    @torch.no_grad()
    def _measured(self, state: dict[str, Tensor]) -> dict[str, float]:
        self._model.load_state_dict(state)
        rows = list(map(self._sums, self._parts))
        own = [sum(column) for column in zip(*rows, strict=True)] or [0.0, 0.0, 0.0]
        loss, n_counted, n_right = (
            sum(gather_numbers(number, self._world)) if self._world.size > 1 else number
            for number in own
        )
        found = {"validation_loss": loss / max(1.0, n_counted)}
        is_counted = self._task.has_classes
        return found | ({"accuracy": n_right / max(1.0, n_counted)} if is_counted else {})

    def _sums(self, indices: list[int]) -> tuple[float, float, float]:
        """Of some samples: the sum of their losses, its targets, and the classes that are found."""
        batch: Batch = self._data.__getitems__(indices).to(self._world.device)
        with self._precision.autocast():
            outputs = self._model(*batch.inputs)
            loss = self._task.sum_loss(outputs, batch.targets)
        n_right = 0.0
        if self._task.has_classes:
            n_right = float(count_right(logits_of(outputs), batch.targets))
        return float(loss), self._task.count_targets(batch.targets), n_right


def count_right(logits: Tensor, classes: Tensor) -> Tensor:
    """Number of samples whose class has the largest logit."""
    return (logits.argmax(dim=-1) == classes).sum()


def has_equal_slices(case: TrainCase, task: Task) -> bool:
    """Whether the executor's slices compute in evaluation mode what the whole model does.

    They do not if samples are mixed or outputs of layers are cached. No slices are of averages.
    """
    if case.is_asynchronous or case.cache != "off" or case.ema is not None:
        return False
    captured = capture(task, case.batch, case.model)
    return captured.graph.mixing_operator() is None and evaluates_alike(task, captured)
