"""Cells of a few strategies whose order, error and regret can be read off."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import spearmanr

from harness.measure.derive import RankedStrategy, cell_summary


def judged(*pairs: tuple[float, float]) -> list[RankedStrategy]:
    """Strategies s0, s1, ... of (predicted, measured) seconds."""
    return [
        RankedStrategy(name=f"s{i}", predicted_s=predicted, measured_s=measured)
        for i, (predicted, measured) in enumerate(pairs)
    ]


def test_error_is_relative_to_the_measured_step() -> None:
    assert judged((0.9, 1.0))[0].error == pytest.approx(-0.1)
    cell = cell_summary(judged((0.9, 1.0), (2.4, 2.0), (3.0, 3.0)))
    assert (cell.median_error, cell.worst_error) == (pytest.approx(0.1), pytest.approx(0.2))


def test_regret_is_what_the_predicted_choice_costs() -> None:
    cell = cell_summary(judged((1.0, 1.1), (1.2, 1.0), (2.0, 2.0)))
    assert (cell.chosen, cell.best) == ("s0", "s1")
    assert cell.regret == pytest.approx(0.1)
    assert cell.rank_correlation == pytest.approx(0.5)  # 1 - 6 x 2 / (3 x 8)


def test_right_order_has_no_regret_whatever_the_error() -> None:
    cell = cell_summary(judged((10.0, 1.0), (20.0, 2.0), (30.0, 3.0)))
    assert (cell.regret, cell.rank_correlation) == (0.0, pytest.approx(1.0))
    assert cell.median_error == pytest.approx(9.0)


def test_equal_predictions_are_charged_with_the_slower_choice() -> None:
    assert cell_summary(judged((1.0, 1.0), (1.0, 1.5))).regret == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("predicted_s", "chosen", "regret"),
    [(0.9, "broken", None), (1.0, "broken", None), (1.1, "s0", 0.1)],
)
def test_a_choice_that_failed_has_no_regret(
    predicted_s: float, chosen: str, regret: float | None
) -> None:
    cell = cell_summary(judged((1.0, 1.1), (1.2, 1.0)), {"broken": predicted_s, "later": 5.0})
    assert (cell.chosen, cell.n_strategies, cell.n_failed) == (chosen, 2, 2)
    assert cell.regret == (None if regret is None else pytest.approx(regret))


def test_two_strategies_or_constant_predictions_have_no_correlation() -> None:
    assert cell_summary(judged((1.0, 1.0), (2.0, 2.0))).rank_correlation is None
    flat = judged((1.0, 1.0), (1.0, 2.0), (1.0, 3.0))
    assert cell_summary(flat).rank_correlation is None


def test_a_cell_without_strategies_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        cell_summary([])


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=3, max_size=9))
def test_correlation_is_spearmans(pairs: list[tuple[int, int]]) -> None:
    found = cell_summary(judged(*pairs)).rank_correlation
    if found is not None:
        # Both are sums of a few ranks in double precision.
        expected = spearmanr([p for p, _ in pairs], [m for _, m in pairs]).statistic
        assert found == pytest.approx(expected, abs=1e-12)
