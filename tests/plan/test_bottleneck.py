"""Stages balanced by times: by hand, and against every way to cut."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from harness.errors import StrategyError
from harness.plan.bottleneck import Balanced, balance, balance_in_turn

TIMES = st.integers(2, 4).flatmap(
    lambda n_devices: st.integers(n_devices, 6).flatmap(
        lambda n_ops: st.lists(
            st.lists(st.integers(1, 9), min_size=n_ops, max_size=n_ops),
            min_size=n_devices,
            max_size=n_devices,
        )
    )
)


def cuts(n, n_parts):
    """Every way to cut range(n) into consecutive, non-empty parts."""
    for inner in combinations(range(1, n), n_parts - 1):
        yield [range(a, b) for a, b in pairwise((0, *inner, n))]


def pace(seconds, stages):
    bounds = pairwise((0, *stages.ends))
    return max(
        max(sum(seconds[d][a:b]) for d in group) / len(group)
        for (a, b), group in zip(bounds, stages.groups, strict=True)
    )


def test_like_devices_get_stages_of_about_equal_time():
    assert balance([[4, 1, 1, 2, 4]] * 3, 3) == Balanced((1, 4, 5), ((0,), (1,), (2,)))


def test_fewer_stages_than_devices_replicate_the_heavy_one():
    """Three quarters of the time are in the first stage: PipeDream's 3-1."""
    assert balance([[3, 3, 3, 3]] * 4, 2).groups in (((0, 1, 2), (3,)), ((0,), (1, 2, 3)))
    assert balance([[9, 3]] * 4, 2) == Balanced((1, 2), ((0, 1, 2), (3,)))


def test_a_slow_device_gets_a_short_stage():
    assert balance([[1, 1, 1, 1], [3, 3, 3, 3]], 2) == Balanced((3, 4), ((0,), (1,)))


@pytest.mark.parametrize("cut", [balance, balance_in_turn])
def test_a_cut_where_little_crosses_is_taken(cut):
    """Stages of 2 and 2 would pay 3 for their cut, those of 3 and 1 nothing."""
    seconds, crossing_s = [[1, 1, 1, 1]] * 2, [9, 3, 3, 0]
    assert cut(seconds, 2).ends == (2, 4)
    assert cut(seconds, 2, crossing_s).ends == (3, 4)


@settings(max_examples=60)
@given(TIMES)
def test_no_other_cut_is_faster(seconds):
    n_devices, n_ops = len(seconds), len(seconds[0])
    for n_stages in range(1, n_devices + 1):
        every = [
            Balanced(tuple(r.stop for r in ops), tuple(tuple(r) for r in devices))
            for ops in cuts(n_ops, n_stages)
            for devices in cuts(n_devices, n_stages)
        ]
        found = balance(seconds, n_stages)
        assert pace(seconds, found) == pytest.approx(min(pace(seconds, one) for one in every))


def every_cut_in_turn(seconds, n_stages):
    groups = tuple((stage % len(seconds),) for stage in range(n_stages))
    return [Balanced(tuple(r.stop for r in ops), groups) for ops in cuts(len(seconds[0]), n_stages)]


@settings(max_examples=60)
@given(TIMES)
def test_no_other_cut_is_faster_where_each_device_has_a_stage(seconds):
    found = balance_in_turn(seconds, len(seconds))
    every = every_cut_in_turn(seconds, len(seconds))
    assert pace(seconds, found) == min(pace(seconds, one) for one in every)


@pytest.mark.parametrize(
    ("cut", "n_stages", "most"), [(balance, 0, 2), (balance, 3, 2), (balance_in_turn, 4, 3)]
)
def test_impossible_numbers_of_stages_are_refused(cut, n_stages, most):
    message = f"{n_stages} stages cannot be made of 3 operators.*: use 1 to {most}$"
    with pytest.raises(StrategyError, match=message):
        cut([[1.0, 1.0, 1.0]] * 2, n_stages)
