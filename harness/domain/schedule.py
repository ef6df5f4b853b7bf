"""Microbatch schedules: the order of actions on each rank, for executor and simulator.

A pipeline has stages 0..S-1 on ranks 0..P-1 (a rank is a stage's whole device set); stage s is on
rank s % P. Each rank has a list of actions; waiting for inputs is not an action.

    gpipe (P=2, M=2)   rank 0  F0 F1       B0 B1        all forwards, then all backwards
                       rank 1     F0 F1 B0 B1
    1f1b               rank 0  F0 F1    B0    B1        at most P - rank in flight
                       rank 1     F0 B0 F1 B1
    interleaved        as 1f1b, with S / P stages on each rank (Megatron-LM, SC'21, section 2.2)
    zero_bubble        ZB-H1 (Qi et al., 2023): separate backward to inputs (B) and weights (W);
                       rank r delays r weight actions, which fill the bubble

Without a flush (PipeDream, SOSP 2019) steps of 1f1b leave each rank's last microbatches in flight:

    steps of M=2       rank 0  F0       F1 B0 | F2 B1 F3 B2 | ...
                       rank 1     F0 B0 F1 B1 | F2 B2 F3 B3 | ...
"""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

from harness.errors import StrategyError

ActionKind = Literal["forward", "backward", "weight"]
ScheduleName = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
SCHEDULE_NAMES: tuple[ScheduleName, ...] = get_args(ScheduleName)

AHEAD = 6  # exchanges beyond the one that a device waits for, whose receives it posts at most


class Action(NamedTuple):
    """One pass of one microbatch through one stage.

    `backward` computes gradients of inputs and weights, or only those of the inputs
    (`splits_backward`); `weight` computes the others later. If `weight` follows directly, as on the
    first rank, the two may run as one.
    """

    kind: ActionKind
    microbatch: int
    stage: int


def rank_actions(
    schedule: ScheduleName, *, n_stages: int, n_microbatches: int, n_ranks: int, rank: int
) -> Iterator[Action]:
    """The actions of one rank, in order.

    Raises:
        StrategyError: the schedule cannot be made for these numbers (see `check_schedule`).
    """
    check_schedule(schedule, n_stages=n_stages, n_microbatches=n_microbatches, n_ranks=n_ranks)
    yield from SCHEDULES[schedule].actions(n_stages, n_microbatches, n_ranks, rank)


def unflushed_actions(
    *, n_microbatches: int, n_ranks: int, rank: int, n_before: int
) -> Iterator[Action]:
    """One rank's actions in a step of 1F1B that leaves microbatches in flight for the next step.

    Args:
        n_before: microbatches since the pipeline was last empty; those of earlier steps have
            negative numbers.
    """
    lag = n_ranks - 1 - rank
    for microbatch in range(n_microbatches):
        yield Action("forward", microbatch, rank)
        if n_before + microbatch >= lag:
            yield Action("backward", microbatch - lag, rank)


def flush_actions(*, n_ranks: int, rank: int, n_before: int) -> Iterator[Action]:
    """One rank's actions that empty the pipeline after such steps."""
    for microbatch in range(-min(n_before, n_ranks - 1 - rank), 0):
        yield Action("backward", microbatch, rank)


def unflushed_position(microbatch: int, *, n_ranks: int, rank: int, is_backward: bool) -> int:
    """Number of actions before one of a microbatch, counted from an empty pipeline."""
    lag = n_ranks - 1 - rank
    return 2 * microbatch + lag + 1 if is_backward else microbatch + max(0, microbatch - lag)


def check_schedule(
    schedule: ScheduleName, *, n_stages: int, n_microbatches: int, n_ranks: int
) -> None:
    """Refuse numbers that the schedule does not support."""
    if schedule not in SCHEDULE_NAMES:
        raise StrategyError(
            f"unknown schedule {schedule!r}: use one of {', '.join(SCHEDULE_NAMES)}"
        )
    if min(n_stages, n_microbatches, n_ranks) < 1:
        raise StrategyError(
            f"{n_stages} stages, {n_microbatches} microbatches and {n_ranks} ranks: "
            "all must be >= 1"
        )
    if n_stages % n_ranks:
        raise StrategyError(
            f"{n_stages} stages do not spread evenly over {n_ranks} ranks: "
            f"use a multiple of {n_ranks}"
        )
    if SCHEDULES[schedule].has_one_stage and n_stages != n_ranks:
        raise StrategyError(
            f"{schedule} needs one stage per rank, got {n_stages} stages on {n_ranks} ranks: "
            "use interleaved"
        )
    if schedule == "interleaved" and n_stages > n_ranks and n_microbatches % n_ranks:
        raise StrategyError(
            f"interleaved needs microbatches in multiples of its {n_ranks} ranks, "
            f"got {n_microbatches}"
        )


def _gpipe(n_stages: int, n_microbatches: int, n_ranks: int, rank: int) -> Iterator[Action]:
    stages = range(rank, n_stages, n_ranks)
    for stage in stages:
        for microbatch in range(n_microbatches):
            yield Action("forward", microbatch, stage)
    for stage in reversed(stages):
        for microbatch in range(n_microbatches):
            yield Action("backward", microbatch, stage)


def _one_forward_one_backward(n_microbatches: int, n_ranks: int, rank: int) -> Iterator[Action]:
    n_ahead = min(n_ranks - rank, n_microbatches)
    for microbatch in range(n_ahead - 1):
        yield Action("forward", microbatch, rank)
    for microbatch in range(n_microbatches):
        if microbatch + n_ahead - 1 < n_microbatches:
            yield Action("forward", microbatch + n_ahead - 1, rank)
        yield Action("backward", microbatch, rank)


def _interleaved(n_stages: int, n_microbatches: int, n_ranks: int, rank: int) -> Iterator[Action]:
    n_chunks = n_stages // n_ranks
    if n_chunks == 1:
        yield from _one_forward_one_backward(n_microbatches, n_ranks, rank)
        return
    total = n_microbatches * n_chunks
    n_warmup = min(total, (n_ranks - rank - 1) * 2 + (n_chunks - 1) * n_ranks)

    def place(k: int) -> tuple[int, int]:
        group, within = divmod(k, n_ranks * n_chunks)
        chunk, offset = divmod(within, n_ranks)
        return group * n_ranks + offset, chunk

    def forward(k: int) -> Action:
        microbatch, chunk = place(k)
        return Action("forward", microbatch, chunk * n_ranks + rank)

    def backward(k: int) -> Action:
        microbatch, chunk = place(k)
        return Action("backward", microbatch, (n_chunks - 1 - chunk) * n_ranks + rank)

    for k in range(n_warmup):
        yield forward(k)
    for k in range(n_warmup, total):
        yield forward(k)
        yield backward(k - n_warmup)
    for k in range(total - n_warmup, total):
        yield backward(k)


def _zero_bubble(n_microbatches: int, n_ranks: int, rank: int) -> Iterator[Action]:
    n_done = 0
    for action in _one_forward_one_backward(n_microbatches, n_ranks, rank):
        yield action
        if action.kind == "backward" and action.microbatch >= rank:
            yield Action("weight", n_done, rank)
            n_done += 1
    for microbatch in range(n_done, n_microbatches):
        yield Action("weight", microbatch, rank)


class Schedule(NamedTuple):
    """One row of SCHEDULES.

    Attributes:
        actions: of a rank, given the numbers of stages, microbatches and ranks.
        has_one_stage: each rank has one stage; else one or more.
        splits_backward: it has `weight` actions.
    """

    actions: Callable[[int, int, int, int], Iterator[Action]]
    has_one_stage: bool = False
    splits_backward: bool = False


SCHEDULES: dict[ScheduleName, Schedule] = {
    "gpipe": Schedule(_gpipe),
    "1f1b": Schedule(lambda _, *numbers: _one_forward_one_backward(*numbers), has_one_stage=True),
    "interleaved": Schedule(_interleaved),
    "zero_bubble": Schedule(
        lambda _, *numbers: _zero_bubble(*numbers), has_one_stage=True, splits_backward=True
    ),
}
