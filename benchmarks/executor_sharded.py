"""Sharded data parallel for benchmarks/executor.py: the executor, FSDP2 and DeepSpeed's ZeRO-3."""

from __future__ import annotations

import ctypes
import gc
import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
from executor_sides import (
    OPTIMIZER,
    EngineSide,
    Loop,
    Side,
    batches,
    ours,
    own_copy,
    share_of,
)
from torch import nn
from torch.distributed.fsdp import fully_shard

from harness.domain.cluster import Cluster
from harness.domain.shard_state import ShardState
from harness.measure.peak_rss import peak_rss_bytes
from harness.measure.recorder import Recorder
from harness.plan import builders
from harness.runtime.capture.capture import capture
from harness.runtime.devices.sampling import clock_for
from harness.runtime.engines.deepspeed_engine import DeepSpeedEngine
from harness.runtime.engines.engine import EngineOptions, Share
from harness.runtime.models.task import Task
from harness.runtime.ranks.gather import maximum_over_ranks
from harness.runtime.ranks.world import World

_N_STEPS = 3


def sharded_makers(task: Task, world: World, batch: int) -> list[Callable[[], Side]]:
    """The sides, ours first; all gather one block of the model at a time, and one ahead."""
    block_bytes = largest_child_bytes(task.model)
    return [
        lambda: sharded(task, world, batch, "parameters", block_bytes),
        lambda: fsdp(task, world, batch),
        lambda: stock_zero(task, world, batch, block_bytes),
    ]


def any_cluster(world: World) -> Cluster:
    """A device for each rank."""
    return Cluster.uniform(1, world.size, inside_bytes_per_s=1e9, memory_bytes=1 << 40)


def largest_child_bytes(model: nn.Module) -> int:
    return max(sum(p.nbytes for p in child.parameters()) for child in model.children())


def sharded(task: Task, world: World, batch: int, state: ShardState, unit_bytes: int) -> EngineSide:
    graph = capture(task, batch, "model").graph
    strategy = msgspec.structs.replace(
        builders.ddp(graph, any_cluster(world), batch), shard_state=state
    )
    return ours(task, world, strategy, bucket_bytes=unit_bytes)


def fsdp(task: Task, world: World, batch: int) -> Loop:
    """FSDP2 in its default form: fully_shard of each child with weights, then of the whole."""
    own = own_copy(task, world)
    for child in own.model.children():
        if any(True for _ in child.parameters()):
            fully_shard(child)
    return Loop("fully_shard", own, fully_shard(own.model), world, batch)


def stock_zero(task: Task, world: World, batch: int, block_bytes: int) -> EngineSide:
    """DeepSpeed's ZeRO-3, without the harness's marks of its collectives."""
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    own, recorder = share_of(batch, world), Recorder(clock_for(world.device))
    options = EngineOptions(
        dtype="fp32",
        optimizer=OPTIMIZER,
        bucket_bytes=block_bytes,
        zero_stage=3,
        batch=len(own),
    )
    engine = DeepSpeedEngine(own_copy(task, world), world, recorder, options)
    engine.unmark()
    counts = (task.n_targets,) * batch
    share = Share(n_local=len(own), n_global=batch, counts=counts)
    return EngineSide("ZeRO-3", engine, recorder, batches(task, batch, own, world), share)


def peaks(makers: Sequence[Callable[[], Side]], world: World) -> dict[str, float]:
    """Bytes that the fullest rank's process grows by in steps of each side alone, by name.

    Counted from before the side is built; building itself, which holds the whole model, does not
    count.
    """
    found: dict[str, float] = {}
    for make in makers:
        before = _resident_peak()
        side = make()
        side.step()
        _resident_peak()
        for _ in range(_N_STEPS):
            side.step()
        grown = peak_rss_bytes() - before
        found[side.name] = maximum_over_ranks([float(grown)], world)[0]
        del side
    return found


def _resident_peak() -> int:
    """Return unused memory to the system, reset the peak of the resident set, and read it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return peak_rss_bytes()
