"""Which sharded weights are gathered together, and when."""

import pytest

from harness.domain.schedule import Action
from harness.domain.weight_units import SharedWeight, plan_units, plan_visits

PAIR = (0, 1)
STAGE_0 = frozenset({0})


def weight(*operators, n_bytes=10, devices=PAIR, stages=STAGE_0, **changes):
    return SharedWeight(devices, operators, stages, n_bytes, **changes)


def units_of(weights, limit=10, *, segments=None, recomputes=(False,), is_freeing=True):
    return plan_units(
        weights, limit, segments=segments or {}, recomputes=recomputes, is_freeing=is_freeing
    )


@pytest.mark.parametrize(
    ("weights", "limit", "users"),
    [
        ([weight(op) for op in (2, 0, 1)], 10, [(0,), (1,), (2,)]),
        ([weight(op) for op in range(5)], 15, [(0, 1), (2, 3), (4,)]),
        # A large bias does not end a unit before the matrix of its operator.
        ([weight(0), weight(1, n_bytes=6), weight(1)], 15, [(0, 1)]),
        # A tied weight is gathered with its first operator.
        ([weight(0, 3), weight(1), weight(2)], 10, [(0, 3), (1,), (2,)]),
        # Other devices, stages, dtypes or waits than those of the other weights.
        ([weight(0, devices=(0, 2)), weight(1), weight(2)], 40, [(0,), (1, 2)]),
        ([weight(0), weight(1, stages=frozenset({1})), weight(2)], 40, [(0, 2), (1,)]),
        ([weight(0), weight(1, dtype="float16"), weight(2)], 40, [(0, 2), (1,)]),
        ([weight(0), weight(1, is_alike=False), weight(2)], 40, [(0, 2), (1,)]),
    ],
)
def test_a_unit_ends_with_the_operator_that_fills_it(weights, limit, users):
    units = units_of(weights, limit)
    assert [unit.operators for unit in units] == users
    assert [unit.n_bytes for unit in units] == [
        sum(weights[k].n_bytes for k in unit.weights) for unit in units
    ]


def test_weights_that_devices_use_in_unlike_operators_are_not_freed():
    units = units_of([weight(0), weight(1, is_alike=False)])
    assert [unit.is_freed for unit in units] == [True, False]
    assert not any(unit.is_freed for unit in units_of([weight(0)], is_freeing=False))


@pytest.mark.parametrize(
    ("segments", "is_freeing", "users"),
    [
        ({}, True, [(0,), (1,), (2,), (3,)]),
        ({}, False, [(0, 1, 2, 3)]),
        # Either segment has more than an eighth of the weights.
        ({0: 0, 1: 0, 2: 1, 3: 1}, True, [(0,), (1,), (2,), (3,)]),
        ({0: 0, 1: 0, 2: 1, 3: 1}, False, [(0, 1), (2, 3)]),
    ],
)
def test_units_end_with_segments_that_run_again(segments, is_freeing, users):
    weights = [weight(op) for op in range(4)]
    units = units_of(weights, segments=segments, recomputes=[True], is_freeing=is_freeing)
    assert [unit.operators for unit in units] == users


def test_a_unit_of_a_segment_has_at_most_an_eighth_of_the_weights_more_than_its_limit():
    weights = [weight(0), weight(1), weight(2, n_bytes=1000)]
    units = units_of(weights, segments={0: 0, 1: 0, 2: 1}, recomputes=[True])
    assert [unit.operators for unit in units] == [(0, 1), (2,)]


def test_the_last_unit_of_an_action_stays_if_it_is_the_first_of_the_next():
    units = dict(enumerate(units_of([weight(0), weight(1), weight(2, stages=frozenset({1}))])))
    passes = [("forward", 0), ("forward", 1), ("backward", 1), ("backward", 0), ("forward", 0)]
    visits = plan_visits([Action(kind, 0, stage) for kind, stage in passes], units)
    assert visits == [(0, 0, 0), (1, 0, 0), (2, 1, 2), (1, 3, 3), (0, 3, 4), (1, 4, 4)]
