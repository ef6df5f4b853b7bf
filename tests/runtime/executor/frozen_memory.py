"""Bytes that a rank holds at the peak of a step as layers freeze, measured and predicted."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from equivalence_training import TIMEOUT_S
from made_graphs import replicated_pipeline, small_cluster
from torch import Tensor, nn

from harness.domain.checkpoints import with_recomputation
from harness.domain.freezing import frozen_operators
from harness.domain.graph import Graph
from harness.domain.strategy import Strategy
from harness.measure.recorder import HostClock, Recorder
from harness.plan import builders
from harness.plan.estimates import DeviceRates, roofline_profile
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator
from harness.runtime.capture.capture import capture
from harness.runtime.data.batch import Batch
from harness.runtime.engines.engine import EngineOptions, Share
from harness.runtime.engines.optimizers import OptimizerOptions
from harness.runtime.executor.change.elastic import ElasticExecutor
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.models.task import InputSpec, Task
from harness.runtime.ranks.world import World

WIDTH, BATCH, N_RANKS = 256, 512, 2


class Block(nn.Module):
    """A residual layer, as in a transformer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(WIDTH), nn.GELU()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.act(self.up(self.norm(x))))


def make_task() -> Task:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(6)))
    model.add_module("head", nn.Linear(WIDTH, 10))
    return Task(model=model, inputs=(InputSpec(name="x", shape=(WIDTH,)),), n_classes=10)


def strategy_of(name: str, graph: Graph) -> Strategy:
    if name in ("ddp", "recomputed"):
        strategy = builders.ddp(graph, small_cluster(N_RANKS), BATCH)
        return strategy if name == "ddp" else with_recomputation(strategy, graph, None)
    return replicated_pipeline(graph, BATCH, [[0], [1]], schedule=name)


class PeakBytes(NamedTuple):
    """Of one rank."""

    measured: int
    predicted: float


def peaks_as_layers_freeze(
    frozen: Mapping[str, Sequence[int]], world: World
) -> dict[str, list[PeakBytes]]:
    """Train by named strategies, each with these numbers of frozen layers."""
    graph = capture(make_task(), BATCH, "blocks").graph
    return {name: _peaks(name, numbers, graph, world) for name, numbers in frozen.items()}


def _peaks(name: str, frozen: Sequence[int], graph: Graph, world: World) -> list[PeakBytes]:
    task = make_task()
    strategy = strategy_of(name, graph)
    options = EngineOptions(dtype="fp32", optimizer=OptimizerOptions(name="adamw"), batch=BATCH)
    plan = ExecutorPlan(strategy=strategy, timeout_s=TIMEOUT_S)
    elastic = ElasticExecutor(task, world, Recorder(HostClock()), options, plan)
    found = []
    for n in frozen:
        elastic.change(elastic.build(strategy, n))
        predicted = float(predicted_bytes(graph, strategy, n)[world.rank])
        found.append(PeakBytes(measured_bytes(elastic.engine), predicted))
    elastic.engine.close()
    return found


def predicted_bytes(graph: Graph, strategy: Strategy, n_frozen: int) -> list[float]:
    rates = {"device": DeviceRates(flops_per_s=1e9, memory_bytes_per_s=1e9)}
    profile = roofline_profile(graph, rates, n_parts=(1, 2), n_microbatches=(1, 4))
    options = SimulatorOptions(n_optimizer_states=2, frozen=frozen_operators(graph, n_frozen))
    simulator = Simulator(graph, profile, small_cluster(N_RANKS), options=options)
    predicted: list[float] = simulator.simulate(strategy).outcome.memory_bytes.tolist()
    return predicted


def measured_bytes(engine: ExecutorEngine) -> int:
    """Weights, buckets, optimizer state and a batch, and the most that a step allocates beside."""
    n = len(engine.samples)
    batch = Batch((torch.randn(n, WIDTH),), torch.randint(10, (n,)))
    share = Share(n_local=n, n_global=BATCH, counts=(1,) * BATCH)

    def step() -> None:
        engine.step(lambda: batch, share)

    step()
    weights = sum(tensor.nbytes for tensor in engine.weights.held.values())
    states = [v for values in engine.optimizer.state.values() for v in values.values()]
    buckets = [bucket.flat for queue in engine._sync._queues.values() for bucket in queue]
    held = sum(t.nbytes for t in (*states, *buckets, *batch.inputs))
    return weights + held + _most_allocated(step)


def _most_allocated(step: Callable[[], None]) -> int:
    """Most bytes that a step holds at once of those that it allocates."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profiled:
        step()
    result = profiled.profiler.kineto_results  # type: ignore[union-attr]
    events = [event for event in result.events() if event.name() == "[memory]"]
    held = most = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        most = max(most, held)
    return most
