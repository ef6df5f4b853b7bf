"""Which regions travel when the strategy changes."""

from __future__ import annotations

import pytest

from harness.errors import StrategyError
from harness.runtime.executor.change.migration import find_migrations
from harness.runtime.executor.geometry.slices import WeightSlice


def piece(start, stop, name="w"):
    return WeightSlice(name, ((start, stop), (0, 2)))


def moved(before, after):
    """(start, stop, source, target) of each migration."""
    found = find_migrations(before, after)
    return [(*m.region.intervals[0], m.source, m.target) for m in found]


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        # replicas: a rank keeps its own
        ({piece(0, 8): (0, 1)}, {piece(0, 8): (1,)}, [(0, 8, 1, 1)]),
        # a new replica
        ({piece(0, 8): (0,)}, {piece(0, 8): (0, 1)}, [(0, 8, 0, 0), (0, 8, 0, 1)]),
        # a cut that moves
        (
            {piece(0, 4): (0,), piece(4, 8): (1,)},
            {piece(0, 2): (0,), piece(2, 8): (1,)},
            [(0, 2, 0, 0), (2, 4, 0, 1), (4, 8, 1, 1)],
        ),
        # two holders share the sending
        (
            {piece(0, 8): (0, 1)},
            {piece(0, 4): (2,), piece(4, 8): (3,)},
            [(0, 4, 0, 2), (4, 8, 1, 3)],
        ),
    ],
)
def test_a_rank_gets_only_regions_that_it_lacks(before, after, wanted):
    assert moved(before, after) == wanted


def test_a_slice_that_nobody_holds_is_refused():
    with pytest.raises(StrategyError, match="needs 16 elements of w, the ranks hold 8 of them"):
        find_migrations({piece(0, 4): (0,)}, {piece(0, 8): (1,)})
