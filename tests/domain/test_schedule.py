from collections import Counter
from itertools import accumulate

import pytest

from harness.domain.schedule import (
    SCHEDULE_NAMES,
    flush_actions,
    rank_actions,
    unflushed_actions,
    unflushed_position,
)
from harness.errors import StrategyError

LETTER = {"forward": "F", "backward": "B", "weight": "W"}


def actions_of(schedule, n_ranks, n_microbatches, n_stages=None):
    """By rank."""
    numbers = {"n_microbatches": n_microbatches, "n_ranks": n_ranks}
    numbers["n_stages"] = n_ranks if n_stages is None else n_stages
    return [list(rank_actions(schedule, rank=rank, **numbers)) for rank in range(n_ranks)]


def table(schedule, n_ranks, n_microbatches, n_stages=None):
    return [
        " ".join(
            f"{LETTER[a.kind]}{a.microbatch}" + (f".{a.stage}" if n_stages else "") for a in own
        )
        for own in actions_of(schedule, n_ranks, n_microbatches, n_stages)
    ]


def test_1f1b_written_out():
    assert table("1f1b", 3, 4) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_interleaved_written_out():
    assert table("interleaved", 2, 2, n_stages=4) == [
        "F0.0 F1.0 F0.2 F1.2 B0.2 B1.2 B0.0 B1.0",
        "F0.1 F1.1 F0.3 B0.3 F1.3 B1.3 B0.1 B1.1",
    ]


def test_zero_bubble_written_out():
    assert table("zero_bubble", 3, 3) == [
        "F0 F1 F2 B0 W0 B1 W1 B2 W2",
        "F0 F1 B0 F2 B1 W0 B2 W1 W2",
        "F0 B0 F1 B1 F2 B2 W0 W1 W2",
    ]


@pytest.mark.parametrize(
    ("schedule", "chunks"),
    [(name, 1) for name in SCHEDULE_NAMES] + [("gpipe", 2), ("interleaved", 2), ("interleaved", 3)],
)
@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5])
def test_every_pass_happens_once_and_no_rank_waits_for_ever(schedule, n_ranks, chunks):
    n_stages, n_microbatches = n_ranks * chunks, 2 * n_ranks
    queues = actions_of(schedule, n_ranks, n_microbatches, n_stages)
    counts = Counter(action for queue in queues for action in queue)
    n_kinds = 3 if schedule == "zero_bubble" else 2
    assert set(counts.values()) == {1}
    assert len(counts) == n_kinds * n_stages * n_microbatches

    done = set()

    def is_ready(action):
        kind, microbatch, stage = action
        if kind == "forward":
            return stage == 0 or ("forward", microbatch, stage - 1) in done
        if kind == "weight":
            return ("backward", microbatch, stage) in done
        after = stage == n_stages - 1 or ("backward", microbatch, stage + 1) in done
        return after and ("forward", microbatch, stage) in done

    moved = True
    while moved:
        moved = False
        for queue in queues:
            while queue and is_ready(queue[0]):
                done.add(tuple(queue.pop(0)))
                moved = True
    assert not any(queues)


@pytest.mark.parametrize("schedule", ["1f1b", "zero_bubble"])
def test_at_most_as_many_microbatches_as_ranks_hold_activations(schedule):
    last = "weight" if schedule == "zero_bubble" else "backward"
    for own in actions_of(schedule, 4, 9):
        held = accumulate((a.kind == "forward") - (a.kind == last) for a in own)
        assert max(held) <= 4


@pytest.mark.parametrize(
    ("schedule", "n_stages", "n_microbatches", "n_ranks", "message"),
    [
        ("fastest", 2, 2, 2, "unknown schedule"),
        ("gpipe", 3, 2, 2, "do not spread evenly"),
        ("1f1b", 4, 2, 2, "one stage per rank"),
        ("interleaved", 4, 3, 2, "multiples of its 2 ranks, got 3"),
        ("gpipe", 0, 1, 1, "must be >= 1"),
    ],
)
def test_impossible_schedule_is_refused(schedule, n_stages, n_microbatches, n_ranks, message):
    with pytest.raises(StrategyError, match=message):
        actions_of(schedule, n_ranks, n_microbatches, n_stages)


@pytest.mark.parametrize("n_ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("n_microbatches", [1, 2, 3, 7])
def test_steps_without_a_flush_and_a_flush_are_one_long_1f1b(n_microbatches, n_ranks):
    n_fed = 4 * n_microbatches
    for rank, wanted in enumerate(actions_of("1f1b", n_ranks, n_fed)):
        where = {"n_ranks": n_ranks, "rank": rank}
        found = []
        for first in range(0, n_fed, n_microbatches):
            step = unflushed_actions(n_microbatches=n_microbatches, n_before=first, **where)
            found += [one._replace(microbatch=first + one.microbatch) for one in step]
        at_flush = [
            unflushed_position(one.microbatch, is_backward=one.kind == "backward", **where)
            for one in found
        ]
        flush = flush_actions(n_before=n_fed, **where)
        found += [one._replace(microbatch=n_fed + one.microbatch) for one in flush]
        assert found == wanted
        assert at_flush == list(range(len(at_flush)))
