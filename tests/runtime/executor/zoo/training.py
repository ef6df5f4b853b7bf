"""Train a model of the zoo by one device and, on ranks, by a strategy."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from random import Random

import msgspec
import torch
from equivalence_cases import draw_batch, part_of
from equivalence_reference import Trace, gradients_of, slices
from equivalence_strategies import random_strategy, with_attention_by_positions
from equivalence_training import CAPTURED, keep_gradients
from made_graphs import replicated_pipeline, small_cluster
from torch import Tensor
from torch.nn import Module

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.schedule import SCHEDULE_NAMES
from harness.domain.strategy import Strategy
from harness.errors import HarnessError, PeerError
from harness.measure.recorder import HostClock, Recorder
from harness.plan.builders import ddp, hybrid, single, tensor_parallel
from harness.plan.costs import PlanRequest
from harness.plan.estimates import DeviceRates, roofline_profile
from harness.plan.portfolio import plan
from harness.plan.simulate.simulator import Simulator
from harness.runtime.capture.capture import capture
from harness.runtime.data.batch import Batch
from harness.runtime.devices.random_sources import seed_all
from harness.runtime.engines.engine import EngineOptions, Share
from harness.runtime.engines.optimizers import OptimizerOptions, make_optimizer
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.faithfulness.comparison import hold_alike
from harness.runtime.models.task import Task
from harness.runtime.ranks.world import World
from zoo import ZOO

BATCH = 8
N_STEPS = 4
STRATEGIES = (
    "single", "ddp", "gpipe", "1f1b", "zero_bubble", "interleaved", "tensor", "hybrid", "searched",
)  # fmt: skip
_TIMEOUT_S = 60.0
_BUDGET = 500  # proposals of a search
_RATES = DeviceRates(flops_per_s=1e10, memory_bytes_per_s=5e9)
_SGD = OptimizerOptions(name="sgd", learning_rate=0.1, momentum=0.9)


class ZooCase(msgspec.Struct, frozen=True, kw_only=True):
    """A model of the zoo and how it is trained; `is_held` if its graph was held to it before."""

    model: str
    strategy: Strategy
    seed: int = 0
    is_held: bool = False

    @property
    def key(self) -> object:
        """What a captured model and its weights depend on."""
        return type(self), self.model, self.seed

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


@dataclass(frozen=True)
class Planner:
    """Makes the strategies of a graph on equal devices whose times are those of a roofline."""

    graph: Graph
    n_ranks: int

    @cached_property
    def cluster(self) -> Cluster:
        return small_cluster(self.n_ranks)

    @cached_property
    def profile(self) -> Profile:
        kinds = {device.kind for device in self.cluster.devices}
        return roofline_profile(
            self.graph,
            dict.fromkeys(kinds, _RATES),
            n_parts=range(1, self.n_ranks + 1),
            n_microbatches=(1, 2, 4),
        )

    def predict(self, strategy: Strategy) -> float:
        """Predicted seconds of a step."""
        simulator = Simulator(self.graph, self.profile, self.cluster)
        return simulator.simulate(strategy).step_s

    def make(self, name: str) -> Strategy:
        """A strategy by its name in STRATEGIES.

        Raises:
            HarnessError: there is none for this graph.
        """
        graph, cluster = self.graph, self.cluster
        if name in SCHEDULE_NAMES:
            devices = [[k] for k in range(self.n_ranks)]
            if name == "interleaved":
                return replicated_pipeline(
                    graph, BATCH, devices * 2, schedule=name, n_microbatches=self.n_ranks
                )
            return replicated_pipeline(graph, BATCH, devices, schedule=name)
        if name == "single":
            return single(graph, BATCH)
        if name == "searched":
            request = PlanRequest(
                graph=graph, profile=self.profile, cluster=cluster, batch=BATCH, budget=_BUDGET
            )
            return plan(request).strategy
        return {"ddp": ddp, "tensor": tensor_parallel, "hybrid": hybrid}[name](
            graph, cluster, BATCH
        )


def strategies_of(
    graph: Graph, names: Mapping[int, Sequence[str]], seed: int, n_random: int
) -> Iterator[tuple[str, int, Strategy | Refusal]]:
    """Name, number of ranks and strategy: the named ones, and random ones on 2 to 4 ranks.

    Args:
        names: of strategies, by the number of ranks.
    """
    for n_ranks, chosen in names.items():
        planner = Planner(graph, n_ranks)
        for name in chosen:
            try:
                yield name, n_ranks, planner.make(name)
            except HarnessError as error:
                yield name, n_ranks, Refusal(type(error).__name__, str(error))
    for k in range(n_random):
        rng, n = Random(f"zoo {seed}/{graph.name}/{k}"), 2 + k % 3
        schedule = SCHEDULE_NAMES[k % len(SCHEDULE_NAMES)]
        smallest = 2 if ZOO[graph.name].has_norm else 1
        drawn = random_strategy(rng, graph, n, BATCH, schedule=schedule, min_microbatch=smallest)
        yield f"random {k}", n, with_attention_by_positions(rng, drawn, graph)


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
    optimizer = make_optimizer(task.model.named_parameters(), _SGD, torch.device("cpu"))
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    seed_all(case.seed)
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
    task, captured = CAPTURED.pop(case.key, None) or (case.make_task(), None)
    captured = captured or capture(task, BATCH, "model")
    seed_all(case.seed)
    chosen_plan = ExecutorPlan(strategy=case.strategy, batch_norm="global", timeout_s=_TIMEOUT_S)
    if not case.is_held:
        chosen_plan.check(captured.graph, world.size)
        hold_alike(task, captured, "fp32", world)
    options = EngineOptions(dtype="fp32", optimizer=_SGD, batch=BATCH)
    engine = ExecutorEngine(task, world, Recorder(HostClock()), options, chosen_plan, captured)
    kept = keep_gradients(engine)
    share = Share(n_local=len(engine.samples), n_global=BATCH)
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    durations: list[float] = []
    for step in range(N_STEPS):
        part = part_of(case.batch(task, step), engine.samples)
        start_s = time.perf_counter()
        losses.append(float(engine.step(lambda part=part: part, share)))  # type: ignore[misc]
        durations.append(time.perf_counter() - start_s)
        gradients.append({n: g.detach().clone() for n, g in kept().items()})
    engine.verify()
    state = {n: t.detach().clone() for n, t in engine.model_state().items()}
    step_s = min(durations[1:])
    if world.rank:
        return Trace(losses=losses, gradients=[], state={}, step_s=step_s)
    return Trace(losses=losses, gradients=gradients, state=state, step_s=step_s)
