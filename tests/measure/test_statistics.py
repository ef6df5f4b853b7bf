"""Intervals against hand-worked binomials, warnings at their thresholds, verdicts."""

import math
import random
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.measure.statistics import (
    distrust,
    median_interval_ranks,
    paired_ratio,
    summarize,
    verdict,
)


def test_eight_samples_are_the_first_with_a_99_percent_interval():
    assert median_interval_ranks(8) == (0, 7, 1 - 2 / 2**8)
    assert median_interval_ranks(7) == (0, 6, 1 - 2 / 2**7)


def test_interval_of_twenty_samples_is_the_tabled_one():
    # Ranks 4 and 17 of 20 (from 1), coverage 0.9974: Hahn and Meeker, table J.
    first, last, coverage = median_interval_ranks(20)
    assert (first + 1, last + 1) == (4, 17)
    assert coverage == pytest.approx(0.99742, abs=1e-5)


def test_interval_of_a_million_samples_is_the_normal_one_at_once():
    start_s = time.perf_counter()
    first, last, coverage = median_interval_ranks(1_000_000)
    assert time.perf_counter() - start_s < 1.0  # whole numbers of a million bits take minutes
    assert first + last == 999_999
    # Half a million less 2.576 standard deviations of 500.
    assert first == pytest.approx(500_000 - 2.576 * 500, abs=2)
    assert coverage == pytest.approx(0.99, abs=1e-4)


@given(st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=60))
def test_summary_is_ordered_and_independent_of_order(values):
    summary = summarize(values)
    assert summary.min <= summary.low <= summary.median <= summary.high <= summary.max
    assert summary.median <= summary.p95 <= summary.max
    assert summarize(sorted(values, reverse=True)) == summary


def test_interval_holds_the_true_median_as_often_as_it_says():
    source = random.Random(1)
    hits = 0
    for _ in range(2000):
        summary = summarize([source.expovariate(math.log(2)) for _ in range(12)])
        hits += summary.low <= 1.0 <= summary.high  # the median of this distribution is 1
    assert hits / 2000 == pytest.approx(0.9937, abs=0.006)  # three standard errors


def test_few_samples_show_their_range_and_say_so():
    summary = summarize([3.0, 1.0, 2.0])
    assert (summary.low, summary.median, summary.high) == (1.0, 2.0, 3.0)
    assert summary.coverage == 0.75
    assert "3 samples are too few" in distrust(summary)[0]


def test_one_sample_has_no_spread():
    summary = summarize([5.0])
    assert (summary.cv, summary.coverage, summary.low, summary.high) == (0.0, 0.0, 5.0, 5.0)


def test_spread_outlier_and_short_samples_are_warned_of():
    text = " ".join(distrust(summarize([1e-4] * 9 + [3e-4])))
    assert "standard deviation is 53% of the mean" in text
    assert "maximum is 150% above the mean" in text
    assert "shorter than 1 ms" in text


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf]])
def test_samples_that_are_not_numbers_are_refused(values):
    with pytest.raises(ValueError):
        summarize(values)


def test_paired_ratio_cancels_a_drift_that_both_share():
    drift = [1.0, 1.5, 2.0, 3.0, 5.0, 8.0, 13.0, 21.0]
    ratio = paired_ratio([2 * x for x in drift], drift)
    assert (ratio.median, ratio.low, ratio.high, ratio.n) == (2.0, 2.0, 2.0, 8)


def test_unpaired_lengths_are_refused():
    with pytest.raises(ValueError, match="2 and 1 samples do not pair"):
        paired_ratio([1.0, 2.0], [1.0])


def _repeats(median, n, seed, spread=0.01):
    source = random.Random(seed)
    return [median * math.exp(source.gauss(0, spread)) for _ in range(n)]


def test_clearly_lower_durations_are_faster_and_reversed_slower():
    a, b = _repeats(1.0, 8, 1), _repeats(1.3, 8, 2)
    assert verdict(a, b).outcome == "faster"
    reverse = verdict(b, a)
    assert reverse.outcome == "slower"
    assert reverse.ratio == pytest.approx(1.3, rel=0.02)
    assert reverse.n_more == 0


def test_a_significant_difference_below_the_minimum_effect_is_the_same():
    judged = verdict(_repeats(1.0, 20, 1), _repeats(1.04, 20, 2))
    assert judged.p < 0.002
    assert judged.outcome == "same"


def test_fewer_than_nine_repeats_are_inconclusive_and_say_how_many_more(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.stats", None)  # whose import takes a second
    judged = verdict([1.0, 1.01, 0.99, 1.0], [2.0, 2.01, 1.99, 2.0])
    assert judged.outcome == "inconclusive"
    assert judged.n_more == 3  # seven of each is the first separation with p below 0.002
    assert "3 more repeats" in str(judged)


def test_ranges_that_do_not_overlap_are_said_and_need_seven_of_each():
    judged = verdict([5.65, 5.82], [0.161, 0.185])
    assert (judged.outcome, judged.is_apart, judged.n_more) == ("inconclusive", True, 5)
    assert str(judged) == (
        "inconclusive (33.2 times as long): the ranges do not overlap, and 5 more repeats of each "
        "would settle it"
    )
    assert not verdict([2.0], [1.0]).is_apart  # single values always differ
    assert not verdict([1.03, 1.04], [1.0, 1.01]).is_apart  # by less than a tenth
    assert not verdict([2.0, 3.0], [1.0, 2.5]).is_apart


def test_the_ratio_that_is_said_is_that_of_the_medians():
    said = str(verdict([7.6, 19.9], [12.5, 12.7]))  # Hodges and Lehmann's is 0.976
    assert said.startswith("inconclusive (1.09 times as long)")


def test_noisy_repeats_are_inconclusive_rather_than_the_same():
    judged = verdict(_repeats(1.0, 10, 3, spread=0.5), _repeats(1.0, 10, 4, spread=0.5))
    assert judged.outcome == "inconclusive"
    assert judged.n_more > 0
