"""A case: one strategy of one small model on a number of ranks, and how it is trained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Literal

import msgspec
import torch
from equivalence_attentions import ATTENTIONS
from equivalence_models import (
    OTHER_MODELS,
    SMALL_MODELS,
    has_dropout,
    min_microbatch,
    small_graph,
    small_task,
)
from equivalence_programs import draw_program
from equivalence_strategies import random_strategy, with_attention_by_positions, with_copies

from harness.domain.schedule import SCHEDULE_NAMES
from harness.domain.shard_state import SHARD_STATES, ShardState, shards_parameters
from harness.domain.strategy import Strategy
from harness.runtime.data.batch import Batch
from harness.runtime.devices.precision import Precision
from harness.runtime.engines.optimizers import OptimizerOptions
from harness.runtime.models.task import IGNORED, InputSpec, Task

# Of the weights, and what they are trained in.
DTYPES = {
    "float64": (torch.float64, "fp32"),
    "float32": (torch.float32, "fp32"),
    "bfloat16": (torch.float32, "bf16"),
}
# By optimizers that decay weights, or by most strategies.
_REFUSED = ("sparse_rows", "shared_norm", "spectral_norm", "fixed_batch")
_COMPLEX = ("complex_layers", "conjugates")  # which autocast does not know
_ATTENTIVE = ("vit", "gpt2", "llama", "bert_span", "t5", *ATTENTIONS)
_OPTIMIZERS = {
    "sgd": OptimizerOptions(name="sgd", learning_rate=0.01, momentum=0.9, weight_decay=1e-3),
    # For the real depths, which steps of the usual length drive into chaos.
    "slow sgd": OptimizerOptions(name="sgd", learning_rate=1e-6, momentum=0.9),
    "adamw": OptimizerOptions(name="adamw", learning_rate=0.003, weight_decay=0.01),
}


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """What is trained; a value that can be written to a file and run again.

    Attributes:
        seed: of the weights and the data.
        dropout: `off` sets every probability to 0; `exact` keeps the model's.
        backend: of torch.compile, for the segments; empty: they are not compiled.
    """

    name: str
    model: str
    n_ranks: int
    strategy: Strategy
    seed: int = 0
    optimizer: str = "sgd"
    batch_norm: Literal["local", "global"] = "global"
    dropout: Literal["off", "exact"] = "off"
    dtype: str = "float64"
    n_steps: int = 3
    is_asynchronous: bool = False
    backend: str = ""

    def make_task(self) -> Task:
        """The model with its weights, by every second sixteen seeds with channels last; equal in
        every process."""
        (dtype, _), has_dropout = DTYPES[self.dtype], self.dropout == "exact"
        task = small_task(self.model, seed=self.seed, dtype=dtype, has_dropout=has_dropout)
        is_flat = all(parameter.dim() < 5 for parameter in task.model.parameters())
        is_channels_last = is_flat and self.seed // 16 % 2 == 1
        order = torch.channels_last if is_channels_last else torch.preserve_format
        return replace(task, model=task.model.to(memory_format=order))

    def precision(self) -> Precision:
        """What forward and loss are computed in."""
        return Precision(DTYPES[self.dtype][1], torch.device("cpu"))

    def optimizer_options(self) -> OptimizerOptions:
        """By every third seed with clipped gradients, but for asynchronous training; by every two
        of three with weights that do not decay; by every second three with averages."""
        is_clipped = self.seed % 3 == 1 and not self.is_asynchronous
        return replace(
            _OPTIMIZERS[self.optimizer],
            no_decay=((), ("1d",), ("*weight",))[self.seed // 2 % 3],
            max_grad_norm=0.5 if is_clipped else None,
            ema=0.7 if self.seed // 3 % 2 else None,
        )

    def batch(self, task: Task, step: int) -> Batch:
        """The global batch of a step; equal in every process."""
        return draw_batch(task, self.strategy.batch, self.seed * 1000 + step)


def _draw(spec: InputSpec, n: int, generator: torch.Generator) -> torch.Tensor:
    if spec.n_values is not None:
        return spec.draw(n, generator)
    # Drawn in float64 for every dtype, so that float32 trains the same samples, rounded.
    draw = torch.rand if spec.is_fraction else torch.randn
    return draw(n, *spec.shape, dtype=torch.float64, generator=generator).to(spec.dtype)


def draw_batch(task: Task, n: int, seed: int) -> Batch:
    """Random samples for a task."""
    generator = torch.Generator().manual_seed(seed)
    inputs = tuple(_draw(spec, n, generator) for spec in task.inputs)
    targets = task.draw_targets(n, generator=generator)
    if len(task.target_shape) == 1:  # sequences of unlike lengths
        ends = torch.randint(1, targets.shape[1] + 1, (n, 1), generator=generator)
        targets[torch.arange(targets.shape[1]) >= ends] = IGNORED
    return Batch(inputs, targets)


def part_of(whole: Batch, samples: Sequence[int]) -> Batch:
    """Some samples of a batch."""
    chosen = torch.tensor(samples, dtype=torch.int64)
    return Batch(tuple(x[chosen] for x in whole.inputs), whole.targets[chosen])


def target_counts(batch: Batch) -> tuple[int, ...]:
    """Targets of each sample that count."""
    return tuple((batch.targets.reshape(len(batch.targets), -1) != IGNORED).sum(1).tolist())


def shard_state(index: int, strategy: Strategy) -> ShardState:
    """The part of the state that case `index` of a series shards."""
    found = SHARD_STATES[index % len(SHARD_STATES)]
    is_deferred = strategy.schedule == "zero_bubble"
    return "gradients" if shards_parameters(found) and is_deferred else found


def random_case(seed: int, index: int) -> Case:
    """Case `index` of a series: the rest is drawn, but models, ranks and schedules come in turn.

    Since 4 schedules and 5 numbers of ranks have no common divisor, 20 rounds of all models meet
    every combination.

    All ways to shard state come in turn. Of the models that have dropout, half keep it.
    Without batch normalisation, one case in four trains by AdamW and one in eight in float32. With
    it, parameters before a normalisation have no gradient but rounding, which AdamW makes as large
    as any.
    """
    rng = Random(f"{seed}/{index}")
    names = list(SMALL_MODELS)
    which, at = divmod(index, len(names))
    model, at = names[at], which + at
    n_ranks, schedule = (2, 3, 4, 5, 1)[at % 5], SCHEDULE_NAMES[at % 4]
    smallest = min_microbatch(model)
    batch = rng.randint(max(4, 2 * smallest), 9)
    strategy = random_strategy(
        rng, small_graph(model), n_ranks, batch, schedule=schedule, min_microbatch=smallest
    )
    strategy = msgspec.structs.replace(strategy, shard_state=shard_state(index, strategy))
    has_dropout = SMALL_MODELS[model].has_dropout and rng.random() < 0.5
    kind = rng.random() if smallest == 1 else 1.0
    return Case(
        name=f"seed {seed} case {index}",
        model=model,
        n_ranks=n_ranks,
        strategy=strategy,
        seed=index,
        optimizer="adamw" if kind < 0.25 else "sgd",
        dropout="exact" if has_dropout else "off",
        dtype="float32" if 0.25 < kind < 0.375 else "float64",
    )


def attention_case(seed: int, index: int) -> Case:
    """Case `index` of a series of models with attention, most of which is cut by positions."""
    rng = Random(f"attention {seed}/{index}")
    which, at = divmod(index, len(_ATTENTIVE))
    model, at = _ATTENTIVE[at], which + at
    n_ranks, schedule = (2, 3, 4)[at % 3], SCHEDULE_NAMES[at % 4]
    graph = small_graph(model)
    strategy = random_strategy(rng, graph, n_ranks, rng.randint(4, 7), schedule=schedule)
    strategy = with_attention_by_positions(rng, strategy, graph)
    return Case(
        name=f"attention, seed {seed} case {index}",
        model=model,
        n_ranks=n_ranks,
        strategy=strategy,
        seed=index,
        optimizer="adamw" if rng.random() < 0.25 else "sgd",
    )


def copied_case(seed: int, index: int) -> Case:
    """The same case with copies of some operators."""
    case = random_case(seed, index)
    strategy = with_copies(Random(f"copies {seed}/{index}"), case.strategy, small_graph(case.model))
    return msgspec.structs.replace(case, name=f"{case.name} with copies", strategy=strategy)


def any_strategy(rng: Random, model: str, n_ranks: int, batch: int) -> Strategy:
    """A strategy of any kind, with copies and attentions that are cut by positions."""
    graph, schedule = small_graph(model), rng.choice(SCHEDULE_NAMES)
    strategy = random_strategy(
        rng, graph, n_ranks, batch, schedule=schedule, min_microbatch=min_microbatch(model)
    )
    if rng.random() < 0.3:
        strategy = with_copies(rng, strategy, graph)
    if rng.random() < 0.5:
        strategy = with_attention_by_positions(rng, strategy, graph)
    return msgspec.structs.replace(
        strategy, shard_state=shard_state(rng.randrange(len(SHARD_STATES)), strategy)
    )


def any_case(seed: int, index: int) -> Case:
    """Case `index` of a series of all models, but the deep ones, in turn, with everything else that
    a case may have drawn freely, on up to 6 ranks."""
    rng = Random(f"any {seed}/{index}")
    names = [name for name in (*SMALL_MODELS, *OTHER_MODELS) if name not in _REFUSED]
    model = names[index % len(names)]
    n_ranks, is_steady = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6)), min_microbatch(model) == 1
    kind = rng.random() if is_steady and model not in _COMPLEX else 1.0
    return Case(
        name=f"any, seed {seed} case {index}",
        model=model,
        n_ranks=n_ranks,
        strategy=any_strategy(rng, model, n_ranks, rng.randint(4, 9)),
        seed=rng.randrange(1 << 16),
        optimizer="adamw" if kind < 0.25 else "sgd",
        dropout="exact" if has_dropout(model) and rng.random() < 0.4 else "off",
        dtype="bfloat16" if 0.25 < kind < 0.33 else "float64",
    )


def program_case(seed: int, index: int) -> Case:
    """Case `index` of a series of models that are drawn too."""
    rng = Random(f"programs {seed}/{index}")
    model = draw_program(f"{seed}/{index}")
    n_ranks = rng.choice((1, 2, 2, 3, 3, 4, 4, 5, 6))
    return Case(
        name=f"programs, seed {seed} case {index}",
        model=model,
        n_ranks=n_ranks,
        strategy=any_strategy(rng, model, n_ranks, rng.randint(4, 9)),
        seed=rng.randrange(1 << 16),
        optimizer="adamw" if min_microbatch(model) == 1 and rng.random() < 0.25 else "sgd",
        dropout="exact" if has_dropout(model) and rng.random() < 0.6 else "off",
    )
