"""What a rank keeps in memory while it trains with sharded state."""

from __future__ import annotations

from typing import NamedTuple
from unittest import mock

import msgspec
from equivalence_cases import Case
from equivalence_training import make_engine, train_step
from torch import Tensor

from harness.runtime.executor.sharded.gathers import WeightUnit
from harness.runtime.ranks.world import World


class Kept(NamedTuple):
    """Bytes on one rank.

    Attributes:
        weights, sums, state: between two steps: weights, summed gradients, optimizer state.
        most_units: of units that are in memory at once, in a step.
        n_units: number of units.
    """

    weights: int
    sums: int
    state: int
    most_units: int
    n_units: int


def _n_bytes(tensors: list[Tensor]) -> int:
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def kept_bytes(case: Case, world: World) -> Kept:
    """Train two steps, and count."""
    task = case.make_task()
    engine = make_engine(case, task, world)
    train_step(engine, case, task, 0)
    live: dict[int, int] = {}
    found: list[int] = []
    start, free = WeightUnit.start, WeightUnit.free

    def started(unit: WeightUnit, *, is_muted: bool) -> None:
        live[unit.number] = unit.n_bytes
        found.append(sum(live.values()))
        start(unit, is_muted=is_muted)

    def freed(unit: WeightUnit) -> None:
        live.pop(unit.number, None)
        free(unit)

    with (
        mock.patch.object(WeightUnit, "start", started),
        mock.patch.object(WeightUnit, "free", freed),
    ):
        train_step(engine, case, task, 1)
    own = list(engine.owners.own.values())
    buckets = [bucket for queue in engine._sync._queues.values() for bucket in queue]
    sums = [getattr(bucket, "sums", None) for bucket in buckets]
    flats = [getattr(bucket, "flat", None) for bucket in buckets]
    state = [
        value
        for values in engine._optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor) and value.dim()
    ]
    return Kept(
        weights=_n_bytes([p.data for p in (*engine.weights.parameters(), *own)]),
        sums=_n_bytes([t for t in (*sums, *flats) if t is not None]),
        state=_n_bytes(state),
        most_units=max(found, default=0),
        n_units=len(engine._units),
    )


def sharded(case: Case, shard_state: str) -> Case:
    """The case with another shard_state."""
    strategy = msgspec.structs.replace(case.strategy, shard_state=shard_state)
    return msgspec.structs.replace(case, strategy=strategy)
