"""Replicas that are averaged, by the ranks of a strategy, and one by one in plain PyTorch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from equivalence_cases import Case, part_of, target_counts
from equivalence_reference import clip, plain_optimizer
from equivalence_training import give_other_weights, options_of, plan_of, task_of
from torch import Tensor

from harness.domain.strategy import samples_per_device
from harness.measure.recorder import HostClock, Recorder
from harness.runtime.engines.engine import Share
from harness.runtime.engines.local_sgd import ReplicaAverage
from harness.runtime.engines.optimizers import OuterOptions
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.state.files import open_sharded
from harness.runtime.executor.state.survivor import Survivor
from harness.runtime.ranks.gather import gather_objects
from harness.runtime.ranks.world import World


@dataclass(frozen=True, kw_only=True)
class Averaged:
    """A training of replicas.

    Attributes:
        hosts: of the ranks; empty: one.
        directory: of a state; it is written after `n_before` steps, or read before them.
    """

    case: Case
    outer: OuterOptions
    hosts: str = ""
    directory: str = ""
    n_before: int = 0


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A rank's part of the losses, and what it holds after the last step.

    Attributes:
        replica: number of the first of its replica's ranks.
        samples: positions in the global batch that its replica reads.
        own: whole parameters, by the slices of its replica's ranks.
        agreed: those that all replicas agree on.
    """

    losses: list[float]
    replica: int = 0
    samples: tuple[int, ...] = ()
    own: Mapping[str, Tensor]
    agreed: Mapping[str, Tensor]
    warnings: Sequence[str] = ()


def _engine(training: Averaged, world: World) -> ExecutorEngine:
    hosts = list(training.hosts) or [world.hostname] * world.size
    placed = replace(world, hostnames=hosts, hostname=hosts[world.rank])
    options = replace(options_of(training.case), outer=training.outer)
    task, captured = task_of(training.case)
    plan = plan_of(training.case)
    return ExecutorEngine(task, placed, Recorder(HostClock()), options, plan, captured)


def _steps(engine: ExecutorEngine, case: Case, steps: range) -> list[float]:
    counts = samples_per_device(case.strategy, "loss")
    n_replica = sum(counts.get(rank, 0) for rank in engine.replica)
    losses = []
    for step in steps:
        whole = case.batch(engine._task, step)
        part = part_of(whole, engine.samples)
        share = Share(
            n_local=len(engine.samples), n_global=case.strategy.batch,
            counts=target_counts(whole), n_replica=n_replica,
        )  # fmt: skip
        losses.append(float(engine.step(lambda part=part: part, share)))  # type: ignore[misc]
    return losses


def _trained(engine: ExecutorEngine, losses: list[float], world: World) -> Trained:
    samples = gather_objects(world, list(engine.samples))
    own = gather_objects(world, engine._gatherer._model_parts(is_of_replica=True))
    whole = engine.model_state()
    unused = engine._gatherer._unused
    parts = {name: unused.get(name, torch.full_like(t, -1)) for name, t in whole.items()}
    for rank in engine.replica:
        for piece, tensor in own[rank].items():
            piece.take(parts[engine._gatherer._model_name(piece)]).copy_(tensor)
    engine.verify()
    return Trained(
        losses=losses,
        replica=engine.replica[0],
        samples=tuple(sorted({at for rank in engine.replica for at in samples[rank]})),
        own={name: parts[first] for name, first in engine._gatherer.names.items()},
        agreed=whole,
    )


def train_replicas(training: Averaged, world: World) -> Trained:
    """Train all steps."""
    engine = _engine(training, world)
    return _trained(engine, _steps(engine, training.case, range(training.case.n_steps)), world)


def train_and_write(training: Averaged, world: World) -> Trained:
    """Train the first steps and write the state."""
    engine = _engine(training, world)
    losses = _steps(engine, training.case, range(training.n_before))
    engine.shard().write(Path(training.directory))
    return _trained(engine, losses, world)


def train_and_survive(training: Averaged, world: World) -> Trained:
    """Train the first steps; the last replica writes what is left without the others."""
    engine = _engine(training, world)
    survivor = Survivor(engine, world)
    losses = _steps(engine, training.case, range(training.n_before))
    if world.size - 1 in engine.replica:
        survivor.save(Path(training.directory), "")
    return _trained(engine, losses, world)


def read_and_train(training: Averaged, world: World) -> Trained:
    """Read the state and train the other steps; the weights before are others."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("harness").addHandler(handler)
    logging.getLogger("harness").setLevel(logging.WARNING)
    give_other_weights(training.case)
    engine = _engine(training, world)
    engine.load_full_state(lambda: open_sharded(Path(training.directory)))
    losses = _steps(engine, training.case, range(training.n_before, training.case.n_steps))
    return replace(_trained(engine, losses, world), warnings=messages)


class ReplicaSum:
    """A sum over replicas in one process, which is there when all have begun."""

    def __init__(self) -> None:
        self._begun: dict[str, list[Tensor]] = {}

    def all_reduce(self, tensor: Tensor, name: str, reduce_dtype: str) -> Any:
        parts = self._begun.setdefault(name, [])
        parts.append(tensor)

        def wait() -> None:
            total = sum(parts, start=torch.zeros(()))
            for part in parts:
                part.copy_(total)
            parts.clear()

        return SimpleNamespace(wait=wait)


def train_one_after_the_other(training: Averaged, parts: Sequence[Sequence[int]]) -> list[Trained]:
    """Train each replica on its samples by plain PyTorch, and average them."""
    case, n_global = training.case, training.case.strategy.batch
    tasks = [case.make_task() for _ in parts]
    sums = ReplicaSum()
    averages = []
    for task in tasks:
        named = dict(task.model.named_parameters())
        averages.append(
            ReplicaAverage(
                named, training.outer, lambda *words: sums.all_reduce(*words), "fp32",
                {name: named[name].numel() for name in sorted(named)},
            )
        )  # fmt: skip
    optimizers = [plain_optimizer(case, task.model) for task in tasks]
    losses: list[list[float]] = [[] for _ in parts]
    for step in range(case.n_steps):
        sums = ReplicaSum()
        for average, own in zip(averages, parts, strict=True):
            average.begin(len(own) / n_global)
        for k, (task, own) in enumerate(zip(tasks, parts, strict=True)):
            batch = case.batch(task, step)
            part = part_of(batch, list(own))
            optimizers[k].zero_grad()
            loss = task.sum_loss(task.model(*part.inputs), part.targets)
            loss = loss / sum(target_counts(batch))
            (loss * n_global / len(own)).backward()
            clip(case, task.model)
            optimizers[k].step()
            losses[k].append(float(loss.detach()))
        for average in averages:
            average.wait()
            average.update()
    return [
        Trained(losses=loss, own=_state(task.model), agreed=_agreed(task.model, average))
        for loss, task, average in zip(losses, tasks, averages, strict=True)
    ]


def _state(model: torch.nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach() for name, tensor in model.state_dict().items()}


def _agreed(model: torch.nn.Module, average: ReplicaAverage) -> dict[str, Tensor]:
    whole = average.whole()
    named = model.named_parameters(remove_duplicate=False)
    return _state(model) | {name: whole[p].detach() for name, p in named}
