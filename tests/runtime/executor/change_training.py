"""Jobs of the ranks for trainings that change their strategy between steps."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from change_cases import ChangingCase, named_state
from equivalence_cases import part_of, target_counts
from equivalence_reference import Trace
from equivalence_training import as_drawn, make_engine, options_of, plan_of, task_of, whole_state
from torch import Tensor

from harness.domain.strategy import Strategy
from harness.errors import VerificationError
from harness.measure.recorder import HostClock, Recorder
from harness.runtime.engines.engine import Share
from harness.runtime.executor.change.elastic import ElasticExecutor
from harness.runtime.executor.change.transfer import PairBytes, StateTransfer
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.state.survivor import Survivor
from harness.runtime.ranks.gather import gather_objects
from harness.runtime.ranks.world import World


@dataclass(frozen=True, kw_only=True)
class RankTrace(Trace):
    """One rank's trace, with the samples that it read and the bytes that its changes moved."""

    gradients: list[dict[str, Tensor]] = field(default_factory=list)
    fed: list[list[int]]
    moved: list[PairBytes] = field(default_factory=list)


class Changing:
    """A training on one rank whose engine is replaced between steps."""

    def __init__(self, changing: ChangingCase, world: World) -> None:
        case = changing.case
        self._changing, self._world = changing, world
        self._data = changing.data(case.make_task())
        task, captured = task_of(case)
        with as_drawn(case):
            self.elastic = ElasticExecutor(
                task, world, Recorder(HostClock()), options_of(case), plan_of(case), captured
            )  # fmt: skip
        self._samples = self._read_from(0)

    def _read_from(self, step: int) -> Iterator[list[int]]:
        positions = gather_objects(self._world, tuple(self.elastic.engine.samples))
        self._at, self._plan = step, self._changing.plan(tuple(positions))
        return self._plan.indices(self._world.rank, first_step=step)

    def change(self, strategy: Strategy, step: int) -> PairBytes:
        """Go on by another strategy from a step on."""
        with as_drawn(self._changing.case):
            engine = self.elastic.build(strategy, self._changing.frozen_at(step))
        moved = self.elastic.change(engine)
        self._samples = self._read_from(step)
        return moved

    def step(self) -> tuple[float, list[int]]:
        """Train one step; this rank's part of the loss, and the samples that it read."""
        samples = next(self._samples)
        whole = self._plan.global_indices(self._at)
        self._at += 1
        share = Share(
            n_local=len(samples),
            n_global=len(whole),
            counts=target_counts(part_of(self._data, whole)),
        )
        return float(self.elastic.engine.step(lambda: part_of(self._data, samples), share)), samples


def train_and_change(changing: ChangingCase, world: World) -> RankTrace:
    """Train a case with all its changes."""
    training, at = Changing(changing, world), dict(changing.changes)
    losses, fed, moved = [], [], []
    for step in range(changing.case.n_steps):
        if step in at:
            moved.append(training.change(at[step], step))
        loss, samples = training.step()
        losses.append(loss)
        fed.append(samples)
    training.elastic.engine.verify()
    state = named_state(whole_state(training.elastic.engine, world))
    return RankTrace(losses=losses, fed=fed, state={} if world.rank else state, moved=moved)


def train_and_rebuild(changing: ChangingCase, world: World) -> RankTrace:
    """Train a case by engines that load the whole state of the one before."""
    at = {0: changing.case.strategy, **dict(changing.changes)}
    state: dict[str, Any] = {}
    losses: list[float] = []
    for step, samples in enumerate(changing.batches()):
        if step in at:
            case = msgspec.structs.replace(changing.case, strategy=at[step])
            engine = make_engine(case, world)
            if state:
                engine.load_full_state(lambda: state)  # noqa: B023
        data = changing.data(changing.case.make_task())
        part = part_of(data, samples)
        share = Share(n_local=len(samples), n_global=len(samples), counts=target_counts(part))
        losses.append(float(engine.step(lambda: part, share)))  # noqa: B023
        state = whole_state(engine, world)
    return RankTrace(losses=losses, fed=changing.batches(), state=named_state(state))


def layer_norms(changing: ChangingCase, world: World) -> list[float]:
    """Train all steps, the last ones from the norms' saved state; the norms of each layer."""
    training = Changing(changing, world)
    norms = training.elastic.watch_gradients()
    for step in range(changing.case.n_steps):
        if step == 2:
            norms = training.elastic.watch_gradients(is_common=True, state=norms.state())
        training.step()
    return norms.take()


def survive_the_last_change(job: tuple[ChangingCase, str], world: World) -> None:
    """Train until the last change; all ranks but the first save what they hold after it."""
    changing, directory = job
    training, at = Changing(changing, world), dict(changing.changes)
    for step in range(max(at) + 1):
        if step in at:
            training.change(at[step], step)
        if step < max(at):
            training.step()
    survivor = Survivor(training.elastic.engine, world)
    if world.rank:
        survivor.save(Path(directory), "run")


class Footprint(NamedTuple):
    """Resources that a process holds."""

    n_groups: int
    n_files: int
    rss_bytes: int


def _footprint() -> Footprint:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    n_groups = len(dist.distributed_c10d._world.pg_map)
    return Footprint(n_groups, len(os.listdir("/proc/self/fd")), pages * os.sysconf("SC_PAGESIZE"))


def change_often(often: tuple[ChangingCase, int], world: World) -> list[Footprint]:
    """Change to and fro so many times, with a step between; the footprint after each."""
    changing, n_changes = often
    training = Changing(changing, world)
    strategies = [changing.changes[0][1], changing.case.strategy]
    found: list[Footprint] = []
    for number in range(n_changes):
        training.step()
        training.change(strategies[number % 2], 0)
        found.append(_footprint())
    return found


def change_with_a_fault(changing: ChangingCase, world: World) -> tuple[Trace, str]:
    """The first change fails, because a rank's message arrives with other bits; the rest of the
    steps are trained by the first strategy."""
    training = Changing(changing, world)
    losses, said = [], ""
    for step in range(changing.case.n_steps):
        if step == changing.changes[0][0]:
            try:
                with mock.patch.object(StateTransfer, "exchange", _with_a_fault(world)):
                    training.change(changing.changes[0][1], step)
            except VerificationError as error:
                said = str(error)
        losses.append(training.step()[0])
    return Trace(losses=losses, gradients=[], state={}), said


def _with_a_fault(world: World) -> Any:
    exchange = StateTransfer.exchange

    def faulty(transfer: StateTransfer) -> None:
        exchange(transfer)
        for flat in transfer._incoming.values():
            if world.rank == world.size - 1:
                flat[0] += 1

    return faulty


def running_means(changing: ChangingCase, world: World) -> dict[bool, list[list[float]]]:
    """Train a case with its changes; this rank's running means, by whether a layer is frozen."""
    training, at = Changing(changing, world), dict(changing.changes)
    for step in range(changing.case.n_steps):
        if step in at:
            training.change(at[step], step)
        training.step()
    layers = training.elastic.layers[: changing.frozen_at(changing.case.n_steps)]
    frozen = {name for layer in layers for name in layer.modules}
    found: dict[bool, list[list[float]]] = {True: [], False: []}
    for piece, tensor in sorted(training.elastic.engine.weights.held.items()):
        module, _, name = piece.name.rpartition(".")
        if name == "running_mean":
            found[module in frozen].append(tensor.tolist())
    return found


class Freed(NamedTuple):
    """Bytes that freezing has freed on one rank, and whether frozen parameters kept their bits."""

    frozen_bytes: int
    freed_state_bytes: int
    freed_bucket_bytes: int
    is_bit_equal: bool


def freeze_and_count(changing: ChangingCase, world: World) -> Freed:
    """Train, freeze at the first change, and train on through the others."""
    training, at = Changing(changing, world), dict(changing.changes)
    names = training.elastic.layers[0].parameters
    first, found = changing.changes[0][0], Freed(0, 0, 0, True)
    kept: dict[str, Any] = {}
    for step in range(changing.case.n_steps):
        before = _held_bytes(training.elastic.engine)
        if step in at:
            training.change(at[step], step)
        if step == first:
            after = _held_bytes(training.elastic.engine)
            state = training.elastic.engine.model_state()
            kept = {name: state[name].clone() for name in names}
            n_bytes = sum(tensor.nbytes for tensor in kept.values())
            found = Freed(n_bytes, before[0] - after[0], before[1] - after[1], True)
        training.step()
    state = training.elastic.engine.model_state()
    is_equal = all(torch.equal(state[name], tensor) for name, tensor in kept.items())
    return found._replace(is_bit_equal=is_equal)


def _held_bytes(engine: ExecutorEngine) -> tuple[int, int]:
    """Bytes of the optimizer's state and of the buckets."""
    states = engine.optimizer.state.values()
    tensors = [value for values in states for value in values.values() if value is not None]
    buckets = [bucket.flat for queue in engine._sync._queues.values() for bucket in queue]
    return sum(t.nbytes for t in tensors), sum(flat.nbytes for flat in buckets)
