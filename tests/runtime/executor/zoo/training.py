"""Train a model of the zoo by one device and, on ranks, by a strategy."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from random import Random

import msgspec
import numpy as np
import torch
from equivalence_cases import draw_batch
from equivalence_reference import Trace, gradients_of, slices
from equivalence_strategies import random_strategy, replicated_pipeline, small_cluster
from torch import Tensor
from torch.nn import Module

from harness.domain.graph import Graph
from harness.domain.schedule import SCHEDULE_NAMES
from harness.domain.strategy import Strategy
from harness.errors import HarnessError, PeerError, StrategyError
from harness.measure.clock import HostClock
from harness.measure.recorder import Recorder
from harness.plan.builders import ddp, hybrid, tensor_parallel
from harness.runtime.data.batch import Batch
from harness.runtime.engines.engine import EngineOptions, Share
from harness.runtime.engines.optimizers import OptimizerOptions, make_optimizer
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.models.task import Task
from harness.runtime.ranks.world import World
from zoo import ZOO

BATCH = 8
N_STEPS = 4
_TIMEOUT_S = 60.0
_SGD = OptimizerOptions(name="sgd", learning_rate=0.1, momentum=0.9)


class ZooCase(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the zoo and how it is trained; without a strategy by one device."""

    model: str
    strategy: Strategy
    seed: int = 0

    def make_task(self) -> Task:
        """The model with its weights; equal in every process."""
        return ZOO[self.model].task(seed=self.seed)

    def batch(self, task: Task, step: int) -> Batch:
        """The global batch of a step; equal in every process."""
        return draw_batch(task, BATCH, self.seed * 1000 + step)


class Refusal(msgspec.Struct, frozen=True):
    """What a rank said when it refused to train."""

    kind: str
    reason: str


def strategies_of(
    graph: Graph, n_ranks: int, seed: int, n_random: int
) -> Iterator[tuple[str, int, Strategy | Refusal]]:
    """Name, number of ranks and strategy: the well-known ones, and random ones on 2 to 4 ranks."""
    cluster = small_cluster(n_ranks)
    devices = [[k] for k in range(n_ranks)]
    makers = {
        "ddp": lambda: ddp(graph, cluster, BATCH),
        "tensor": lambda: tensor_parallel(graph, cluster, BATCH),
        "hybrid": lambda: hybrid(graph, cluster, BATCH),
        "1f1b": lambda: replicated_pipeline(graph, BATCH, devices, schedule="1f1b"),
        "zero_bubble": lambda: replicated_pipeline(graph, BATCH, devices, schedule="zero_bubble"),
        "interleaved": lambda: replicated_pipeline(
            graph, BATCH, devices * 2, schedule="interleaved", n_microbatches=n_ranks
        ),
    }
    for name, make in makers.items():
        try:
            yield name, n_ranks, make()
        except StrategyError as error:
            yield name, n_ranks, Refusal(type(error).__name__, str(error))
    for k in range(n_random):
        rng, n = Random(f"zoo {seed}/{graph.name}/{k}"), 2 + k % 3
        schedule = SCHEDULE_NAMES[k % len(SCHEDULE_NAMES)]
        smallest = 2 if ZOO[graph.name].has_norm else 1
        yield (
            f"random {k}", n,
            random_strategy(rng, graph, n, BATCH, schedule=schedule, min_microbatch=smallest),
        )  # fmt: skip


def _seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def _shift(model: Module, offset: float) -> None:
    """Multiply each weight by 1 plus a random number of about this size."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator, dtype=torch.float64)
            weight.mul_((1 + offset * noise).to(weight.dtype))


def train_single(
    case: ZooCase, sizes: list[int], *, has_construct: bool = True, offset: float = 0.0
) -> Trace:
    """Train by plain torch, batch by batch, or microbatch by microbatch of these sizes.

    Args:
        offset: relative change of all weights before the first step, to see what rounding does.
    """
    task = ZOO[case.model].task(seed=case.seed, has_construct=has_construct)
    if offset:
        _shift(task.model, offset)
    optimizer = make_optimizer(task.model, _SGD, torch.device("cpu"))
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    _seed_all(case.seed)
    for step in range(N_STEPS):
        optimizer.zero_grad()
        batch, mean = case.batch(task, step), 0.0
        for part in slices(sizes):
            outputs = task.model(*(x[part] for x in batch.inputs))
            loss = task.sum_loss(outputs, batch.targets[part]) / sum(sizes)
            loss.backward()
            mean += float(loss.detach())
        losses.append(mean)
        gradients.append(gradients_of(task.model))
        optimizer.step()
    state = {name: tensor.clone() for name, tensor in task.model.state_dict().items()}
    return Trace(losses=losses, gradients=gradients, state=state)


def train_on_ranks(case: ZooCase, world: World) -> Trace | Refusal:
    """Train by the executor; gradients and state are the whole ones, on rank 0 alone."""
    logging.disable(logging.WARNING)
    try:
        return _train(case, world)
    except PeerError:
        raise
    except HarnessError as error:
        return Refusal(type(error).__name__, str(error))


def _train(case: ZooCase, world: World) -> Trace:
    task = case.make_task()
    _seed_all(case.seed)
    plan = ExecutorPlan(strategy=case.strategy, batch_norm="global", timeout_s=_TIMEOUT_S)
    options = EngineOptions(dtype="fp32", optimizer=_SGD, batch=BATCH)
    engine = ExecutorEngine(task, world, Recorder(HostClock()), options, plan)
    engine.keep_gradients = True
    chosen = torch.tensor(engine.samples, dtype=torch.int64)
    share = Share(n_local=len(chosen), n_global=BATCH)
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    for step in range(N_STEPS):
        whole = case.batch(task, step)
        part = Batch(tuple(x[chosen] for x in whole.inputs), whole.targets[chosen])
        losses.append(float(engine.step(lambda part=part: part, share)))  # type: ignore[misc]
        gradients.append({n: g.detach().clone() for n, g in engine.full_gradients().items()})
    engine.verify_replicas()
    state = {n: t.detach().clone() for n, t in engine.full_state()["model"].items()}
    if world.rank:
        return Trace(losses=losses, gradients=[], state={})
    return Trace(losses=losses, gradients=gradients, state=state)
