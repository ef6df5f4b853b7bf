"""What each rank of the executor's tests runs; importable by name."""

from __future__ import annotations

import gc
import math
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import torch
import torch.distributed as dist
from equivalence_cases import Case, part_of, target_counts
from equivalence_reference import Trace
from torch import Tensor

from harness.domain.record import Span
from harness.domain.routes import BUCKET_BYTES
from harness.domain.strategy import Strategy
from harness.measure.derive.spans import spans_of
from harness.measure.recorder import HostClock, Recorder
from harness.runtime.capture.capture import Captured, capture
from harness.runtime.engines.engine import Engine, EngineOptions, Share
from harness.runtime.engines.torch_engine import TorchEngine
from harness.runtime.executor.change.elastic import Blueprint
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.gradients import deferred
from harness.runtime.executor.gradients.weight_gradients import ConvProduct
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.program import segments
from harness.runtime.executor.sharded import units
from harness.runtime.executor.shards import forms, ring
from harness.runtime.executor.state.files import load_sharded
from harness.runtime.executor.transport import messages
from harness.runtime.executor.transport.channels import Channels
from harness.runtime.models.task import Task
from harness.runtime.ranks.gather import gather_objects
from harness.runtime.ranks.world import World

TIMEOUT_S = 200.0
# Models that were captured before this process was forked; each serves one engine.
CAPTURED: dict[object, tuple[Task, Captured | None]] = {}


def key_of(case: Case) -> object:
    """What a captured model and its weights depend on."""
    return type(case), case.model, case.seed, case.dtype, case.dropout, case.strategy.batch


def task_of(case: Case) -> tuple[Task, Captured | None]:
    """A case's task, and its graph where that was captured before."""
    return CAPTURED.pop(key_of(case), None) or (case.make_task(), None)


def give_other_weights(case: Case) -> None:
    """Let the next engine of a case begin with other weights, so that nothing but a state can carry
    them over."""
    CAPTURED[key_of(case)] = task, _ = task_of(case)
    with torch.no_grad():
        for parameter in task.model.parameters():
            parameter.add_(1.0)


def make_engine(
    case: Case, world: World, recorder: Recorder | None = None, *, task: Task | None = None
) -> ExecutorEngine:
    """The engine of a case, by its own task if None is given."""
    given, captured = (task, None) if task else task_of(case)
    recorder, plan = recorder or Recorder(HostClock()), plan_of(case)
    with as_drawn(case):
        engine = ExecutorEngine(given, world, recorder, options_of(case), plan, captured)
    engine.is_priming_due = case.seed % 3 == 0  # as NCCL needs it
    return engine


def plan_of(case: Case) -> ExecutorPlan:
    return ExecutorPlan(
        strategy=case.strategy,
        batch_norm=case.batch_norm,
        dropout="exact" if case.dropout == "exact" else "local",
        is_asynchronous=case.is_asynchronous,
        is_compiled=bool(case.backend),
        seed=case.seed,
        timeout_s=TIMEOUT_S,
    )


def options_of(case: Case) -> EngineOptions:
    """With many small buckets and units for every second four seeds."""
    return EngineOptions(
        dtype=case.precision().dtype,
        optimizer=case.optimizer_options(),
        batch=case.strategy.batch,
        bucket_bytes=(BUCKET_BYTES, 1 << 10, BUCKET_BYTES, 1 << 6)[case.seed // 4 % 4],
    )


def compiled_by(backend: str, module: torch.nn.Module, device: torch.device) -> Any:
    """A segment, compiled by another backend than TorchInductor, which takes many seconds."""
    options = {"fallback_random": True} if backend == "inductor" else None
    return torch.compile(module, backend=backend, dynamic=False, options=options)


@contextmanager
def as_drawn(case: Case) -> Iterator[None]:
    """Compute gradients of weights in the ways that the case's seed and batch choose."""
    # By every second batch size all linear layers write their gradients where they stay.
    least = deferred.LARGE_ELEMENTS if case.strategy.batch % 2 else 1
    joined = (1, math.inf) if case.seed % 2 else (deferred.JOINED_ELEMENTS, deferred.KEPT_SHARE)
    with (
        mock.patch.object(deferred, "LARGE_ELEMENTS", least),
        mock.patch.object(deferred, "JOINED_ELEMENTS", joined[0]),
        mock.patch.object(deferred, "KEPT_SHARE", joined[1]),
        mock.patch.object(segments, "compiled_by_torch", partial(compiled_by, case.backend)),
        mock.patch.object(forms, "BUCKET_BYTES", 1 << 10),  # compiled segments end there
    ):
        yield


@contextmanager
def small_pieces(case: Case) -> Iterator[None]:
    """Send most pieces alone, and score a few queries at once, by every second eight seeds."""
    if case.seed // 8 % 2 == 0:
        yield
        return
    with (
        mock.patch.object(messages, "LARGEST_JOINED_BYTES", 100),
        mock.patch.object(units, "LARGEST_JOINED_BYTES", 100),
        mock.patch.dict(ring._N_SCORES, cpu=20),
    ):
        yield


def train_step(engine: ExecutorEngine, case: Case, step: int, *, is_muted: bool = False) -> float:
    """Carry out one step; this rank's part of its mean loss."""
    whole = case.batch(engine._task, step)
    part, counts = part_of(whole, engine.samples), target_counts(whole)
    share = Share(n_local=len(engine.samples), n_global=case.strategy.batch, counts=counts)
    return float(engine.step(lambda: part, share, is_muted=is_muted))


def n_synchronisations(case: Case, world: World) -> int:
    """How many sums of gradients this rank takes part in, in a step that follows another."""
    engine = make_engine(case, world)
    for step in range(2):
        train_step(engine, case, step)
    return engine.n_synchronisations


def train_in_fp16(case: Case, world: World) -> list[tuple[float, float, bool]]:
    """Train five steps, the third with a factor of the losses that overflows: this rank's loss, the
    factor after the step, and whether the step changed its weights. The fourth step is by an engine
    that takes over and gets the weights, the last by one that has loaded the state from files."""
    task, captured = task_of(case)
    captured = captured or capture(task, case.strategy.batch, "model")
    blueprint = Blueprint(task, captured, world.device)
    options = EngineOptions(dtype="fp16", optimizer=case.optimizer_options())
    plan = ExecutorPlan(strategy=case.strategy, timeout_s=TIMEOUT_S)
    engine = ExecutorEngine(task, world, Recorder(HostClock()), options, plan, captured)
    found = []
    for step in range(5):
        if step >= 3:
            old, (task, captured) = engine, blueprint.make()
            engine = ExecutorEngine(task, world, Recorder(HostClock()), options, plan, captured)
        if step == 3:
            engine.take_over(old)
            made, held = (
                [*one.model.parameters(), *one._runner.buffers()] for one in (engine, old)
            )
            for empty, tensor in zip(made, held, strict=True):
                empty.data.copy_(tensor.data)
        if step == 4:
            state = whole_state(old, world)
            engine.load_full_state(partial(dict, state))
        before = [p.detach().clone() for p in engine.model.parameters()]
        scaler = engine.updating.scale._scaler
        assert scaler is not None
        if step == 2:
            scaler.update(2.0**60)
        loss = train_step(engine, case, step)
        pairs = zip(before, engine.model.parameters(), strict=True)
        is_changed = any(not torch.equal(a, b) for a, b in pairs)
        found.append((loss, engine.updating.scale.factor(), is_changed))
    return found


Phase = tuple[str, str]


def steps_alone(case: Case, world: World) -> tuple[list[Phase], list[Phase], bool]:
    """Kinds and labels of spans of a step, and of one without communication, which every rank
    carries out while all others stand still; whether the engine says that it can. Both follow
    another step."""
    recorder = Recorder(HostClock())
    engine = make_engine(case, world, recorder)

    def phases(*, is_muted: bool) -> list[Phase]:
        train_step(engine, case, 0, is_muted=is_muted)
        return sorted((s.kind, s.label) for s in spans_of(recorder.collect()))

    phases(is_muted=False)
    together, alone = phases(is_muted=False), []
    engine.flush()
    recorder.collect()
    empty = torch.empty

    def dirty(*sizes: Any, **options: Any) -> Tensor:
        buffer = empty(*sizes, **options)
        return buffer.fill_(1 << 40) if buffer.dtype == torch.int64 else buffer

    for rank in range(world.size):
        if rank == world.rank:
            with mock.patch.object(torch, "empty", dirty):
                phases(is_muted=True)
                alone = phases(is_muted=True)
        dist.barrier()
    return together, alone, engine.can_be_muted


def spans_of_a_step(case: Case, world: World) -> list[Span]:
    """In the order of their start, of a step that follows another."""
    recorder = Recorder(HostClock())
    engine = make_engine(case, world, recorder)
    train_step(engine, case, 0)
    recorder.discard()
    train_step(engine, case, 1)
    return spans_of(recorder.collect())


def most_sending(case: Case, world: World) -> int:
    """The most sends whose tensors this rank keeps at once in a step."""
    engine = make_engine(case, world)
    found: list[int] = []
    send = Channels.send

    def counted(channels: Channels, *told: Any, **by: Any) -> None:
        send(channels, *told, **by)
        found.append(sum(map(len, channels._sending.values())))

    with mock.patch.object(Channels, "send", counted):
        train_step(engine, case, 0)
    return max(found)


def sends_kept(case: Case, world: World) -> list[int]:
    """How many sends' tensors this rank keeps after each of six steps."""
    engine = make_engine(case, world)
    found: list[int] = []
    for step in range(6):
        train_step(engine, case, step)
        found.append(sum(map(len, engine._channels._sending.values())))
    engine.flush()
    return found


def closing(case: Case, world: World) -> tuple[int, int, bool]:
    """How many process groups an engine makes, how many are left of it when it is closed, and
    whether it is freed then."""
    n_before = len(dist.distributed_c10d._world.pg_map)
    engine = make_engine(case, world)
    train_step(engine, case, 0)
    n_made = len(dist.distributed_c10d._world.pg_map) - n_before
    dist.barrier()  # nobody is in a step any more
    engine.close()
    known = weakref.ref(engine)
    del engine
    gc.collect()
    n_left = len(dist.distributed_c10d._world.pg_map) - n_before
    return n_made, n_left, known() is None


def samples_of_joined_products(case: Case, world: World) -> list[int]:
    """Of how many samples each gradient of a convolution's weights is computed in a step."""
    engine = make_engine(case, world)
    found: list[int] = []
    add = ConvProduct.add_gradients

    def counted(product: ConvProduct, x: Tensor, *others: Any) -> Any:
        found.append(len(x))
        return add(product, x, *others)

    with mock.patch.object(ConvProduct, "add_gradients", counted):
        train_step(engine, case, 0)
    return found


def _copied(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def keep_gradients(engine: ExecutorEngine) -> Callable[[], dict[str, Tensor]]:
    """Keep the gradients of each update from now on; the result assembles those of the last one,
    which all ranks must ask for."""
    kept: dict[WeightSlice, Tensor] = {}

    def keep(*_: object) -> None:
        found = {piece: parameter.grad for piece, parameter in engine.owners.own.items()}
        kept.clear()
        kept.update({piece: g.clone() for piece, g in found.items() if g is not None})

    def whole() -> dict[str, Tensor]:
        # At once, because a broadcast of each gradient takes a tenth of a rank's time.
        places, gatherer = gather_objects(engine._world, kept), engine._gatherer
        parts = {piece: part for place in reversed(places) for piece, part in place.items()}
        found: dict[str, Tensor] = {}
        for piece, part in parts.items():
            name = gatherer._model_name(piece)
            if name not in found:
                found[name] = torch.zeros(gatherer._shapes[piece.name], dtype=part.dtype)
            piece.take(found[name]).copy_(part)
        return found

    engine.optimizer.register_step_pre_hook(keep)
    return whole


def _final_state(case: Case, engine: Engine) -> dict[str, Tensor]:
    """The model's state, and its averages where the case has them."""
    state = dict(engine.model_state())
    if case.optimizer_options().ema is not None:
        averages = engine.averaged_state()
        state |= {f"average of {name}": tensor for name, tensor in averages.items()}
    return _copied(state)


def train_by_strategy(case: Case, world: World) -> Trace:
    """Train a case; gradients and state are the whole ones, on rank 0 alone."""
    with small_pieces(case):
        return _train_by_strategy(case, world)


def _train_by_strategy(case: Case, world: World) -> Trace:
    engine = make_engine(case, world)
    kept = keep_gradients(engine)
    losses: list[float] = []
    gradients: list[dict[str, Tensor]] = []
    for step in range(case.n_steps):
        losses.append(train_step(engine, case, step))
        gradients.append(_copied(kept()))
    engine.verify()
    state = _final_state(case, engine)
    if world.rank:
        return Trace(losses=losses, gradients=[], state={})
    return Trace(losses=losses, gradients=gradients, state=state)


def train_in_pairs(case: Case, world: World) -> Trace:
    """The same over groups of pairs, as NCCL needs them."""
    return train_by_strategy(case, replace(world, backend="nccl"))


def merged(traces: list[Trace]) -> Trace:
    """The ranks' traces as one: losses are sums over ranks."""
    losses = [sum(parts) for parts in zip(*(trace.losses for trace in traces), strict=True)]
    step_s = max(trace.step_s for trace in traces)
    return replace(traces[0], losses=losses, step_s=step_s)


@dataclass(frozen=True, kw_only=True)
class Move:
    """A training that goes on under another strategy after `n_before` steps.

    Attributes:
        directory: of the files in between.
    """

    case: Case
    after: Strategy
    n_before: int
    directory: str


def whole_state(engine: ExecutorEngine, world: World) -> dict[str, Any]:
    """The state of all ranks, as it is read from the files that they write."""
    with tempfile.TemporaryDirectory() as own:
        directory = gather_objects(world, own)[0]
        engine.shard().write(Path(directory))
        gather_objects(world, None)  # all have written
        found = load_sharded(directory)
        gather_objects(world, None)  # all have read
    return found


def train_and_save(move: Move, world: World) -> list[float]:
    """Train the first steps and write every rank's part; their losses."""
    engine = make_engine(move.case, world)
    losses = [train_step(engine, move.case, step) for step in range(move.n_before)]
    engine.shard().write(Path(move.directory))
    return losses


def load_and_train(move: Move, world: World) -> Trace:
    """Train the steps that follow."""
    state, case = load_sharded(Path(move.directory)), move.case
    give_other_weights(case)
    moved = make_engine(msgspec.structs.replace(case, strategy=move.after), world)
    moved.load_full_state(lambda: state)
    kept = keep_gradients(moved)
    losses = [train_step(moved, case, s) for s in range(move.n_before, case.n_steps)]
    gradients = _copied(kept())
    moved.verify()
    return Trace(losses=losses, gradients=[gradients], state=_final_state(case, moved))


def train_by_ddp(case: Case, world: World) -> Trace:
    """Train by torch's DistributedDataParallel on the samples that the strategy gives each rank."""
    samples = make_engine(case, world).samples
    task = case.make_task()
    options = EngineOptions(dtype="fp32", optimizer=case.optimizer_options())
    engine = TorchEngine(task, world, Recorder(HostClock()), options)
    share = Share(n_local=len(samples), n_global=case.strategy.batch)
    losses = [
        float(engine.step(lambda s=step: part_of(case.batch(task, s), samples), share))  # type: ignore[misc]
        for step in range(case.n_steps)
    ]
    return Trace(losses=losses, gradients=[], state=_final_state(case, engine))
