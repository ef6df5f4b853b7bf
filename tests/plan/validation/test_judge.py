import pytest

from harness.measure.statistics import rank_correlation
from harness.plan.validation.judge import percentile_error, regret_of
from harness.plan.validation.points import fit_amounts, solve_all


def test_scores_of_a_hand_sized_cell():
    predicted, measured = [1.0, 2.0, 3.0, 4.0], [2.0, 1.0, 4.0, 4.0]
    assert percentile_error(predicted, measured, 50) == pytest.approx(0.375)
    assert regret_of(predicted, measured) == 1.0
    assert rank_correlation([1, 2, 3], [3, 1, 2]) == pytest.approx(-0.5)
    assert rank_correlation([1, 2], [1, 2]) is None
    assert rank_correlation([1, 1, 1], [1, 2, 3]) is None


def test_runs_of_one_choice_count_by_their_mean():
    assert regret_of([1.0, 1.0, 2.0], [1.0, 3.0, 1.6]) == pytest.approx(2.0 / 1.6 - 1)
    assert regret_of([1.0, 1.0], [1.0, 3.0]) is None


def test_a_term_that_would_be_negative_is_left_out():
    assert fit_amounts([[1, 1], [2, 1]], [3, 5]) == pytest.approx([2, 1])
    assert fit_amounts([[1, 1], [2, 1]], [3, 7])[1] == 0


def test_bisection_finds_the_bandwidth_and_stops_at_a_bound():
    assert solve_all(lambda _, rate: 10 / rate, [2.0], 0.1, 100) == pytest.approx(5)
    assert solve_all(lambda _, rate: 10 / rate, [1e-9], 0.1, 100) == pytest.approx(100)
