"""LeNet learns real digits as well under every strategy as on one device."""

from __future__ import annotations

from random import Random

import pytest
from equivalence_digits import BATCH, accuracy, digits_graph, learn_alone, learn_digits
from equivalence_strategies import named_strategies, random_strategy

from harness.domain.schedule import SCHEDULE_NAMES

N_RANKS = 3
QUICK = ("tensor parallel", "2-1 1f1b")


@pytest.fixture(scope="module")
def learned_alone():
    return learn_alone()


def strategies():
    graph = digits_graph()
    found = named_strategies(graph, N_RANKS, BATCH)
    for schedule in SCHEDULE_NAMES:
        found[f"random {schedule}"] = random_strategy(
            Random(schedule), graph, N_RANKS, BATCH, schedule=schedule
        )
    return found


def marked(name):
    return name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)


@pytest.mark.parametrize("name", [marked(name) for name in strategies()])
def test_every_strategy_reaches_the_accuracy_of_one_device(name, learned_alone, ranks):
    classes = ranks.run(N_RANKS, learn_digits, strategies()[name])[0]
    # In float64 the weights agree to 1e-10, so that no class of the 357 images is near enough to
    # another to change.
    assert classes.tolist() == learned_alone.tolist()
    assert accuracy(classes) == accuracy(learned_alone) > 0.93
