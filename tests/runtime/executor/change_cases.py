"""Trainings that change their strategy between steps, and the same training on one device."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from itertools import islice
from random import Random
from typing import Any

import msgspec
import torch
from equivalence_cases import (
    Case,
    any_case,
    any_strategy,
    draw_batch,
    part_of,
    program_case,
    random_case,
    shard_state,
)
from equivalence_models import min_microbatch, small_graph
from equivalence_reference import Trace, accumulate, clip, plain_optimizer
from equivalence_strategies import random_strategy
from torch import Tensor, nn
from torch.optim import Optimizer

from harness.domain.freezing import FreezableLayer, freezable_layers
from harness.domain.schedule import SCHEDULE_NAMES
from harness.domain.strategy import Strategy
from harness.runtime.data.batch import Batch, BatchPlan
from harness.runtime.models.task import Task

N_STEPS = 6
STEPS_PER_EPOCH = 4


class ChangingCase(msgspec.Struct, frozen=True, kw_only=True):
    """A training that changes its strategy.

    Attributes:
        case: with the first strategy.
        changes: (the step before which it changes, the next strategy), ascending.
        frozen: the number of frozen layers from each change on; 0 where it is shorter.
    """

    case: Case
    changes: list[tuple[int, Strategy]]
    frozen: list[int] = []

    def strategy_at(self, step: int) -> Strategy:
        """The strategy that trains a step."""
        return [self.case.strategy, *(s for at, s in self.changes if at <= step)][-1]

    def frozen_at(self, step: int) -> int:
        """The number of layers that a step does not train."""
        steps = [at for at, _ in self.changes]
        return [0, *(n for at, n in zip(steps, self.frozen, strict=False) if at <= step)][-1]

    def data(self, task: Task) -> Batch:
        """All samples of an epoch."""
        return draw_batch(task, STEPS_PER_EPOCH * self.case.strategy.batch, self.case.seed)

    def plan(self, positions: tuple[tuple[int, ...], ...]) -> BatchPlan:
        """The samples of each rank in each step, given the positions that it reads."""
        return BatchPlan(
            n_samples=STEPS_PER_EPOCH * self.case.strategy.batch,
            shares=(self.case.strategy.batch,),
            positions=positions,
            is_shuffled=True,
            seed=self.case.seed,
        )

    def batches(self) -> list[list[int]]:
        """The samples of every global batch, in order."""
        everything = (tuple(range(self.case.strategy.batch)),)
        return list(islice(self.plan(everything).indices(0), self.case.n_steps))


def named_state(state: dict[str, Any]) -> dict[str, Tensor]:
    """The tensors of a whole state by name."""
    found: dict[str, Tensor] = dict(state["model"])
    for index, values in state["optimizer"]["state"].items():
        for key, value in values.items():
            if isinstance(value, Tensor):
                found[f"{key} of parameter {index}"] = value
    return found


def train_alone(changing: ChangingCase, *, offset: float = 0.0) -> Trace:
    """Train on one device in plain PyTorch, by the microbatches of each step's strategy.

    Args:
        offset: relative change of all weights before the first step, to see what rounding does.
    """
    case = changing.case
    task = case.make_task()
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.mul_(1 + offset)
    data = changing.data(task)
    optimizer = plain_optimizer(case, task.model)
    freezing = Freezing(task.model, freezable_layers(small_graph(case.model)))
    losses: list[float] = []
    for step, samples in enumerate(changing.batches()):
        optimizer.zero_grad()
        freezing.freeze(changing.frozen_at(step), optimizer)
        sizes = changing.strategy_at(step).microbatch_sizes()
        losses.append(accumulate(task, part_of(data, samples), sizes, case.precision()))
        clip(case, task.model)
        optimizer.step()
    states = {n: optimizer.state.get(p, {}) for n, p in enumerate(task.model.parameters())}
    state = named_state({"model": task.model.state_dict(), "optimizer": {"state": states}})
    return Trace(losses=losses, gradients=[], state=state)


class Freezing:
    """Stops training layers in plain PyTorch, and trains them again as at the start."""

    def __init__(self, model: nn.Module, layers: Sequence[FreezableLayer]) -> None:
        self._model, self._layers = model, layers
        self._trained = [p for p in model.parameters() if p.requires_grad]
        self._training = [module for module in model.modules() if module.training]
        self._modules = dict(model.named_modules())
        # A graph holds copies of modules that write in place, which do not.
        for path, module in list(self._modules.items()):
            self._modules[f"{path}_copying".replace(".", "_")] = module

    def freeze(self, n_frozen: int, optimizer: Optimizer) -> None:
        """Freeze the first layers alone: no gradient, no optimizer state, evaluation mode."""
        for parameter in self._trained:
            parameter.requires_grad_(True)
        for module in self._training:
            module.training = True
        for layer in self._layers[:n_frozen]:
            for name in layer.parameters:
                parameter = self._model.get_parameter(name).requires_grad_(False)
                optimizer.state.pop(parameter, None)
            for name in layer.modules:
                self._modules[name].eval()


def random_changing_case(
    seed: int, index: int, *, is_freezing: bool = False, is_any: bool = False
) -> ChangingCase:
    """Case `index` of a series: one or two changes at random steps, between strategies on any
    numbers of the ranks, so that some idle under one and work under the next. All ways to shard
    state come in turn.

    Args:
        is_freezing: each change freezes more layers, or in half of the cases the second trains some
            again.
        is_any: draw models and strategies as `any_case` and `program_case` do in turn.
    """
    rng = Random(f"changes {seed}/{index}")
    make = (any_case, program_case)[index % 2] if is_any else random_case
    case = make(seed, index)
    smallest = min_microbatch(case.model)

    n_drawn = itertools.count(index)

    def draw() -> Strategy:
        n_used = case.n_ranks if rng.random() < 0.5 else rng.randint(1, case.n_ranks)
        if is_any:
            return any_strategy(rng, case.model, n_used, case.strategy.batch)
        drawn = random_strategy(
            rng, small_graph(case.model), n_used, case.strategy.batch,
            schedule=rng.choice(SCHEDULE_NAMES), min_microbatch=smallest,
        )  # fmt: skip
        return msgspec.structs.replace(drawn, shard_state=shard_state(next(n_drawn), drawn))

    at = sorted(rng.sample(range(1, N_STEPS), rng.choice((1, 2))))
    changed = msgspec.structs.replace(
        case, name=f"seed {seed} change {index}", n_steps=N_STEPS, strategy=draw(), dtype="float64"
    )
    changing = ChangingCase(case=changed, changes=[(step, draw()) for step in at])
    if not is_freezing:
        return changing
    n_layers = len(freezable_layers(small_graph(case.model)))
    frozen = sorted(rng.randint(min(1, n_layers), n_layers) for _ in at)
    if len(at) == 2 and rng.random() < 0.5:
        frozen[1] = rng.randint(0, max(0, frozen[0] - 1))
    alone = msgspec.structs.replace(changed, dropout="off")
    return msgspec.structs.replace(changing, case=alone, frozen=frozen)
