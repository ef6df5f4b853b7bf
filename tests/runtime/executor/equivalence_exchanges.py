"""Cases of what ranks exchange, and what they run: norms, orders of messages, sharded state."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple
from unittest import mock

import equivalence_training
import msgspec
from equivalence_cases import Case
from equivalence_models import small_graph
from equivalence_reference import Trace
from equivalence_training import make_engine, options_of, train_by_strategy, train_step
from torch import Tensor

from harness.domain.partition import REPLICA
from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.runtime.executor.gradients.deferred import WeightGradients
from harness.runtime.executor.gradients.sync import backward_calls
from harness.runtime.executor.sharded.units import WeightUnit
from harness.runtime.executor.transport.messages import Message
from harness.runtime.ranks.world import World


def norms_case(
    model: str,
    plans: dict[str, OperatorPlan],
    batch: int,
    *,
    others: OperatorPlan | None = None,
    **flow: object,
) -> Case:
    """A case on two ranks; operators without a plan have that of `others`, or are on device 0."""
    others = others or OperatorPlan({}, [0])
    operators = filter(has_tasks, small_graph(model).operators)
    placed = {op.name: plans.get(op.name, others) for op in operators}
    strategy = Strategy(name=model, batch=batch, operators=placed, **flow)  # type: ignore[arg-type]
    return Case(name=model, model=model, n_ranks=2, strategy=strategy)


def joined_parameters(case: Case, world: World) -> int:
    """Of how many parameters this rank joins the microbatches."""
    engine = make_engine(case, world)
    modules = [
        segment.module
        for program, _ in engine._runner._programs.values()
        for segments in program.stages.values()
        for segment in segments
    ]
    return sum(len(backward_calls(module).joined) for module in modules)


def train_joined_on_rank_1(case: Case, world: World) -> Trace:
    """Train a case whose microbatches are joined on one rank alone."""
    with mock.patch.object(WeightGradients, "joins", return_value=world.rank == 1):
        return train_by_strategy(case, world)


def third_branch_copied() -> Case:
    """The branches on device 0, what reads them on device 1, with a copy of the third branch."""
    plans = {name: OperatorPlan({}, [0]) for name in ("stem", "relu", "tanh")}
    plans["sigmoid"] = OperatorPlan({REPLICA: 2}, [0, 1])
    plans |= {name: OperatorPlan({}, [1]) for name in ("add", "mul", "loss")}
    strategy = Strategy(name="branches", batch=4, operators=plans)
    return Case(name="branches", model="branches", n_ranks=2, strategy=strategy)


def read_ahead() -> Case:
    """Stages 0 and 2 on device 0, 1 and 3 on device 1, which fetches both values in stage 1."""
    stage_of = {"stem": 0, "tanh": 0, "relu": 3, "sigmoid": 1, "mul": 1, "cos": 2}
    stage_of |= {"add": 3, "loss": 3}
    strategy = Strategy(
        name="read_ahead",
        batch=8,
        operators={name: OperatorPlan({}, [s % 2], s) for name, s in stage_of.items()},
        n_microbatches=4,
        schedule="interleaved",
        stages=[Stage()] * 4,
    )
    return Case(name="read_ahead", model="read_ahead", n_ranks=2, strategy=strategy)


# Numbers of messages by their stages, from and to.
Orders = dict[tuple[int, int], list[int]]


def _orders(messages: Iterable[Message]) -> Orders:
    found: Orders = {}
    for message in messages:
        stages = message.sender.stage, message.reader.stage
        found.setdefault(stages, []).append(message.number)
    return found


def order_of_messages(case: Case, world: World) -> dict[str, tuple[Orders, Orders]]:
    """What this rank sends and receives, forward and backward, in order."""
    engine = make_engine(case, world)
    ((program, moves),) = engine._runner._programs.values()
    leaving, returning = sorted(moves.leaving.items()), sorted(moves.returning.items())[::-1]
    sent = {
        "forward": [message for _, own in leaving for message in own],
        "backward": [message for _, own in returning for message in own],
    }
    received = {
        way: [m for stage in program.stages for m in moves.received(stage, is_backward=is_backward)]
        for way, is_backward in (("forward", False), ("backward", True))
    }
    return {way: (_orders(sent[way]), _orders(received[way])) for way in sent}


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
    engine = make_engine(case, world)
    train_step(engine, case, 0)
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
        train_step(engine, case, 1)
    own = list(engine.owners.own.values())
    buckets = [bucket for queue in engine._sync._queues.values() for bucket in queue]
    sums = [getattr(bucket, "sums", None) for bucket in buckets]
    flats = [getattr(bucket, "flat", None) for bucket in buckets]
    state = [
        value
        for values in engine.optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor) and value.dim()
    ]
    return Kept(
        weights=_n_bytes([p.data for p in (*engine.weights.parameters(), *own)]),
        sums=_n_bytes([t for t in (*sums, *flats) if t is not None]),
        state=_n_bytes(state),
        most_units=max(found, default=0),
        n_units=len(engine.gathers._freed) + len(engine.gathers._kept),
    )


def train_unrounded(case: Case, world: World) -> Trace:
    """Train a case whose sharded weights travel in their own dtype."""
    with mock.patch("harness.runtime.executor.sharded.units.ROUNDED_KINDS", frozenset()):
        return train_by_strategy(case, world)


def train_in_int8(case: Case, world: World) -> Trace:
    """Train a case whose gradients are summed as int8."""
    options = replace(options_of(case), reduce_dtype="int8")
    with mock.patch.object(equivalence_training, "options_of", return_value=options):
        return train_by_strategy(case, world)


def gathered_bytes(case: Case, world: World) -> int:
    """Of all freed units, sent once."""
    return sum(unit.n_bytes for unit in make_engine(case, world).gathers._freed.values())


def sharded(case: Case, shard_state: str) -> Case:
    """The case with another shard_state."""
    strategy = msgspec.structs.replace(case.strategy, shard_state=shard_state)
    return msgspec.structs.replace(case, strategy=strategy)
