"""Races of candidates whose times are written down."""

import itertools

import pytest

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


def test_each_begins_in_turn():
    order = []

    def time_one(k):
        order.append(k)
        return 1.0

    race(time_one, 3, lambda: True)
    assert order[:12] == [0, 1, 2, 1, 2, 0, 2, 0, 1, 0, 1, 2]


def test_a_slow_round_counts_for_nobody():
    # All take three times as long in the third round, and the second racer is a half slower.
    (first, second) = places([[1.0, 1.0, 3.0, 1.0], [1.5, 1.5, 4.5, 1.5]])
    assert (first.index, second.index) == (0, 1)
    assert (first.duration_s, second.duration_s) == pytest.approx((1.0, 1.5))


def test_who_left_comes_after_those_who_stayed():
    # The third was timed while all were slow, and takes three times the mean of those who stayed.
    found = places([[2.0, 2.0, 1.0, 1.0, 1.0], [2.0, 2.0, 1.0, 1.0, 1.0], [6.0, 6.0]])
    assert [place.index for place in found] == [0, 1, 2]
    assert [place.duration_s for place in found] == pytest.approx([1.0, 1.0, 3.0])
    assert [place.n_rounds for place in found] == [5, 5, 2]
