"""Training on one device in plain PyTorch, microbatch by microbatch: what strategies must equal."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from equivalence_cases import Case, target_counts
from equivalence_models import small_graph
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim import Optimizer

from harness.runtime.data.batch import Batch
from harness.runtime.devices.precision import Precision
from harness.runtime.engines.optimizers import average_of, make_optimizer
from harness.runtime.models.task import Task


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Losses, gradients and state of a training.

    Attributes:
        losses: mean over the global batch, of each step.
        gradients: of each step, whole, by parameter.
        state: parameters and buffers after the last step.
        step_s: seconds of the fastest step after the first.
    """

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    state: dict[str, Tensor]
    step_s: float = 0.0


def slices(sizes: list[int]) -> list[slice]:
    """Consecutive slices of the given sizes."""
    ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
    return [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]


def accumulate(task: Task, batch: Batch, sizes: list[int], precision: Precision) -> float:
    """Add the gradients of a global batch, one microbatch at a time; its mean loss."""
    mean = 0.0
    for part in slices(sizes):
        with precision.autocast():
            outputs = task.model(*(x[part] for x in batch.inputs))
            loss = task.sum_loss(outputs, batch.targets[part]) / sum(target_counts(batch))
        loss.backward()
        # Autograd lets gradients of views of several parameters share memory, to which it would add
        # those of each microbatch several times.
        for parameter in task.model.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.clone()
        mean += float(loss.detach())
    return mean


def gradients_of(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def clip(case: Case, model: nn.Module) -> None:
    """Scale a step's gradients down to the norm of the case, if it has one."""
    if (most := case.optimizer_options().max_grad_norm) is not None:
        nn.utils.clip_grad_norm_(model.parameters(), most)


def plain_optimizer(case: Case, model: nn.Module) -> Optimizer:
    return make_optimizer(model.named_parameters(), case.optimizer_options(), torch.device("cpu"))


def final_state(case: Case, model: nn.Module, optimizer: Optimizer) -> dict[str, Tensor]:
    """The model's state, and its averages where the case has them."""
    state = dict(model.state_dict())
    if case.optimizer_options().ema is not None:
        named = model.named_parameters(remove_duplicate=False)
        averages = state | {name: average_of(optimizer, p) for name, p in named}
        state |= {f"average of {name}": tensor for name, tensor in averages.items()}
    return {name: tensor.detach().clone() for name, tensor in state.items()}


def train_alone(case: Case) -> Trace:
    """Train a case on one device."""
    task = case.make_task()
    optimizer = plain_optimizer(case, task.model)
    losses, gradients = [], []
    for step in range(case.n_steps):
        optimizer.zero_grad()
        sizes = case.strategy.microbatch_sizes()
        losses.append(accumulate(task, case.batch(task, step), sizes, case.precision()))
        clip(case, task.model)
        gradients.append(gradients_of(task.model))
        optimizer.step()
    state = final_state(case, task.model, optimizer)
    return Trace(losses=losses, gradients=gradients, state=state)


def stage_of_parameters(case: Case) -> dict[str, int]:
    """The pipeline stage that updates each parameter."""
    return {
        name: case.strategy.operators[op.name].stage
        for op in small_graph(case.model).operators
        for name in op.attrs.get("parameters", [])  # type: ignore[union-attr]
    }


def train_alone_asynchronously(case: Case) -> Trace:
    """What 1F1B without a flush trains, on one device: every microbatch is a minibatch of its own,
    and stage s of S computes with weights that lack the last S - 1 - s updates.

    The gradients are those of each stage's last update in a step, which ends with S - 1 - s
    microbatches in flight.
    """
    task = case.make_task()
    optimizer = plain_optimizer(case, task.model)
    stage_of, n_stages = stage_of_parameters(case), len(case.strategy.stages)
    sizes = case.strategy.microbatch_sizes()
    lags = {name: n_stages - 1 - stage for name, stage in stage_of.items()}
    losses, gradients = [], []
    versions, updates = [_copies(task.model)], []
    for step in range(case.n_steps):
        batch, mean = case.batch(task, step), 0.0
        for microbatch, part in enumerate(slices(sizes)):
            used = {name: versions[max(0, len(updates) - lag)][name] for name, lag in lags.items()}
            outputs = functional_call(task.model, used, tuple(x[part] for x in batch.inputs))
            loss = task.sum_loss(outputs, batch.targets[part]) / sizes[microbatch]
            found = torch.autograd.grad(loss, list(used.values()))
            mean += float(loss.detach()) * sizes[microbatch] / sum(sizes)
            for name, gradient in zip(used, found, strict=True):
                task.model.get_parameter(name).grad = gradient
            updates.append(gradients_of(task.model))
            optimizer.step()
            versions.append(_copies(task.model))
        losses.append(mean)
        gradients.append(
            {name: updates[-1 - lag][name] for name, lag in lags.items() if lag < len(updates)}
        )
    state = final_state(case, task.model, optimizer)
    return Trace(losses=losses, gradients=gradients, state=state)


def _copies(model: nn.Module) -> dict[str, Tensor]:
    return {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
