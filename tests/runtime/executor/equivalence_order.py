"""Strategies that bring the orders of messages and of readers apart."""

from __future__ import annotations

from collections.abc import Iterable

from equivalence_cases import Case
from equivalence_training import make_engine

from harness.domain.partition import REPLICA
from harness.domain.strategy import OperatorPlan, Stage, Strategy
from harness.runtime.executor.transport.messages import Message
from harness.runtime.ranks.world import World


def third_branch_copied() -> Case:
    """The branches on device 0, what reads them on device 1, with a copy of the third branch."""
    plans = {name: OperatorPlan({}, [0]) for name in ("stem", "relu", "tanh")}
    plans["sigmoid"] = OperatorPlan({REPLICA: 2}, [0, 1])
    plans |= {name: OperatorPlan({}, [1]) for name in ("add", "mul", "loss")}
    strategy = Strategy(name="branches", batch=4, operators=plans)
    return Case(name="branches", model="branches", n_ranks=2, strategy=strategy)


def read_by_two_stages() -> Case:
    """Device 1 has stages 1 and 3, which read one value; the later one joins its microbatches."""
    stage_of = {"stem": 0, "relu": 1, "tanh": 2, "late": 3, "add": 3, "loss": 3}
    return _joining_in_turns("read_twice", stage_of)


def read_as_view() -> Case:
    """Stage 1 of device 1 makes a view of what it is sent, stage 3 joins its microbatches of it."""
    stage_of = {"stem": 0, "view": 1, "tanh": 2, "late": 3, "add": 3, "loss": 3}
    return _joining_in_turns("read_as_view", stage_of)


def _joining_in_turns(model: str, stage_of: dict[str, int]) -> Case:
    """Four stages on two devices in turn, with all gradients of weights joined."""
    strategy = Strategy(
        name=model,
        batch=17,  # no linear layer counts as large, then, and all microbatches but one are alike
        operators={name: OperatorPlan({}, [s % 2], s) for name, s in stage_of.items()},
        n_microbatches=8,
        schedule="interleaved",
        stages=[Stage()] * 4,
    )
    return Case(name=model, model=model, n_ranks=2, strategy=strategy, seed=1)


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
        stages = message.source.stage, message.target.stage
        found.setdefault(stages, []).append(message.number)
    return found


def order_of_messages(case: Case, world: World) -> dict[str, tuple[Orders, Orders]]:
    """What this rank sends and receives, forward and backward, in order."""
    engine = make_engine(case, case.make_task(), world)
    ((program, moves),) = engine._programs.values()
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
