"""The cases of benchmarks/executor.py: a strategy, and the stock engines that train it too."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
import torch
from executor_models import LONG_GROUPS, chain, long_llama, tensor_gpt, tensor_mlp, whole
from executor_sharded import any_cluster, sharded_makers
from executor_sides import (
    MakeSides,
    Side,
    StockPipeline,
    bare,
    ours,
    stock_ddp,
    tensor_parallel,
)
from torch import nn

from harness.domain.graph import Graph, Operator
from harness.domain.key_forms import KEY_FORMS, KeyForm
from harness.domain.partition import REPLICA
from harness.domain.sharding import CONTRACTION, has_tasks
from harness.domain.strategy import OperatorPlan, Strategy
from harness.plan import builders
from harness.plan.bottleneck import balance_in_turn
from harness.runtime.capture.capture import Captured, capture
from harness.runtime.ranks.gather import maximum_over_ranks
from harness.runtime.ranks.world import World

_PER_RANK = {"lenet": 64, "resnet18": 16, "alexnet": 16, "vit_small": 16}
_KEYS: dict[KeyForm, str] = {"input": "gathered input", "gathered": "gathered keys", "ring": "ring"}
_SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble")


@dataclass(frozen=True, kw_only=True)
class Case:
    """One strategy on one model.

    Attributes:
        bar: required ratio of their time over ours.
        sides: the executor first.
        makers: makes each side alone, to compare peaks of memory; None where these do not matter.
    """

    group: str
    name: str
    bar: float
    sides: MakeSides
    makers: Callable[[], list[Callable[[], Side]]] | None = None


def cases(world: World) -> Iterator[Case]:
    """The cases for this number of ranks."""
    if world.size == 1:
        for model in ("vit_small", "resnet18"):
            yield _data_parallel(world, model, "single", 0.98)
        return
    for model in _PER_RANK:
        yield _data_parallel(world, model, "ddp", 0.97)
    for model in ("alexnet", "resnet18", "mlp"):
        for schedule in _SCHEDULES:
            yield _pipeline(world, model, schedule)
    yield _pipeline(world, "gpt", "1f1b")
    for n_blocks in (1, 2):
        yield _tensor(world, n_blocks)
    yield _tensor_gpt(world)
    yield _sharded(world)
    if world.size > LONG_GROUPS:
        yield _keys(world)


def _data_parallel(world: World, model: str, group: str, bar: float) -> Case:
    def sides() -> list[Side]:
        task, batch = whole(model), _PER_RANK[model] * world.size
        graph = capture(task, batch, model).graph
        strategy = builders.ddp(graph, any_cluster(world), batch)
        stock = [stock_ddp(task, world, batch)] if world.size > 1 else []
        return [ours(task, world, strategy), *stock, bare(task, world, batch)]

    return Case(group=group, name=f"{group} {model}", bar=bar, sides=sides)


def _pipeline(world: World, model: str, schedule: str) -> Case:
    def sides() -> list[Side]:
        task = chain(model)
        n_microbatches = max(8, 2 * world.size)
        microbatch = 32 if model == "mlp" else 4
        batch = microbatch * n_microbatches
        n_stages = world.size * (2 if schedule == "interleaved" else 1)
        example = task.inputs[0].draw(microbatch)
        weights = maximum_over_ranks(child_times(task.model, example), world)
        ends = balance_in_turn([weights] * world.size, n_stages).ends
        children = [list(range(a, b)) for a, b in pairwise((0, *ends))]
        captured = capture(task, microbatch, model)
        strategy = builders.pipeline(
            captured.graph, batch, operators_of(captured, children),
            [[stage % world.size] for stage in range(n_stages)],
            n_microbatches=n_microbatches, schedule=schedule,
        )  # fmt: skip
        stock = StockPipeline(task, world, children, batch, n_microbatches, schedule)
        return [ours(task, world, strategy), stock]

    return Case(group="pipeline", name=f"pipeline {model} {schedule}", bar=1.0, sides=sides)


def _tensor(world: World, n_blocks: int) -> Case:
    def sides() -> list[Side]:
        task, batch = tensor_mlp(n_blocks), 64 * world.size
        graph = capture(task, batch, "mlp").graph
        return [
            ours(task, world, tensor_strategy(graph, batch, world.size)),
            tensor_parallel(task, world, batch),
        ]

    return Case(group="tensor", name=f"tensor mlp of {n_blocks}", bar=0.97, sides=sides)


def _tensor_gpt(world: World) -> Case:
    def sides() -> list[Side]:
        task, batch = tensor_gpt(2), 8 * world.size
        graph = capture(task, batch, "gpt").graph
        strategy = builders.tensor_parallel(graph, any_cluster(world), batch)
        return [ours(task, world, strategy), tensor_parallel(task, world, batch)]

    return Case(group="tensor", name="tensor gpt blocks", bar=1.0, sides=sides)


def _keys(world: World) -> Case:
    def maker(keys: KeyForm) -> Callable[[], Side]:
        def make() -> Side:
            task = long_llama()
            graph = capture(task, 1, "llama").graph
            strategy = builders.tensor_parallel(graph, any_cluster(world), 1)
            plans = {
                op.name: msgspec.structs.replace(strategy.operators[op.name], keys=keys)
                for op in graph.operators
                if op.kind == "attention"
            }
            own = msgspec.structs.replace(strategy, operators=strategy.operators | plans)
            return ours(task, world, own, name=_KEYS[keys])

        return make

    makers = [maker(keys) for keys in reversed(KEY_FORMS)]
    return Case(
        group="keys",
        name=f"keys llama on {world.size} ranks",
        bar=0.0,
        sides=lambda: [make() for make in makers],
        makers=lambda: makers,
    )


def _sharded(world: World) -> Case:
    def makers() -> list[Callable[[], Side]]:
        return sharded_makers(chain("wide gpt"), world, 2 * world.size)

    return Case(
        group="sharded",
        name="sharded gpt blocks",
        bar=0.95,
        sides=lambda: [make() for make in makers()],
        makers=makers,
    )


def child_times(model: nn.Module, example: torch.Tensor) -> list[float]:
    """CPU seconds of each child's forward and backward, as the median over children like it."""
    likes: list[str] = []
    times: defaultdict[str, list[float]] = defaultdict(list)
    for child in model.children():
        likes.append(f"{child} on {tuple(example.shape)}")
        for _ in range(5):
            start_s = time.process_time()
            output = child(example)
            output.sum().backward()
            times[likes[-1]].append(time.process_time() - start_s)
        child.zero_grad(set_to_none=True)
        example = output.detach().requires_grad_()
    return [statistics.median(times[like]) for like in likes]


def operators_of(captured: Captured, children: Sequence[Sequence[int]]) -> list[list[str]]:
    """The operators of each stage; one without a module belongs to the previous child."""
    stage_of = {child: stage for stage, own in enumerate(children) for child in own}
    found: list[list[str]] = [[] for _ in children]
    stage = 0
    for operator in captured.graph.operators:
        if not has_tasks(operator):
            continue
        node = captured.nodes.get(operator.name)
        if node is not None and node.op == "call_module":
            stage = stage_of[int(str(node.target).split(".")[0])]
        found[stage].append(operator.name)
    return found


def tensor_strategy(graph: Graph, batch: int, n_ranks: int) -> Strategy:
    """Cut wide layers by features, narrow ones by contraction; replicate operators after those."""
    devices = list(range(n_ranks))
    plans: dict[str, OperatorPlan] = {}
    dim = REPLICA
    for operator in graph.operators:
        if not has_tasks(operator):
            continue
        if operator.kind == "linear":
            dim = "feature" if _is_wide(operator) else CONTRACTION
        elif dim == CONTRACTION or operator.kind == "loss":
            dim = REPLICA
        plans[operator.name] = OperatorPlan({dim: n_ranks}, devices)
    return Strategy(name="tensor parallel", batch=batch, operators=plans)


def _is_wide(operator: Operator) -> bool:
    return operator.shape["feature"] > int(operator.attrs["in_features"])
