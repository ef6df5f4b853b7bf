"""Races of candidates whose times are written down."""

import itertools

from harness.workloads.search.trials import LEAST_ROUNDS, MOST_ROUNDS, places, race


def never_late():
    return False


def racing(*rounds):
    """Times each racer by its own cycle of seconds."""
    times = [itertools.cycle(own) for own in rounds]
    return lambda k: next(times[k])


def test_who_is_slower_in_all_first_rounds_leaves_and_the_last_one_need_not_run():
    found = race(racing([1.0], [2.0], [3.0]), 3, never_late)
    assert [len(own) for own in found] == [LEAST_ROUNDS] * 3


def test_those_near_each_other_go_on_without_the_slow():
    # The first two change places, the first is a tenth faster in four rounds of five.
    near = [1.0, 1.2, 1.0, 1.0, 1.0], [1.1] * 5
    found = race(racing(*near, [2.0]), 3, never_late)
    n_near, again, n_slow = map(len, found)
    assert n_near == again > n_slow == LEAST_ROUNDS
    assert n_near < MOST_ROUNDS
    assert [place.index for place in places(found)] == [0, 1, 2]


def test_equal_ones_end_with_the_rounds():
    found = race(racing([1.0, 1.1], [1.1, 1.0]), 2, never_late)
    assert [len(own) for own in found] == [MOST_ROUNDS] * 2


def test_it_ends_when_it_is_late_after_the_first_rounds():
    asked = []

    def is_late():
        asked.append(1)
        return len(asked) == 2

    found = race(racing([1.0, 1.1], [1.1, 1.0]), 2, is_late)
    assert [len(own) for own in found] == [LEAST_ROUNDS + 1] * 2
