"""The shortest round trip decides the offset."""

import pytest

from harness.runtime.clock_offset import estimate_offset


def test_the_shortest_round_trip_decides():
    trips = [(0.0, 105.0, 10.0), (20.0, 121.0, 22.0), (30.0, 139.0, 39.0)]
    offset_s, error_s = estimate_offset(trips)
    assert offset_s == pytest.approx(21.0 - 121.0)
    assert error_s == pytest.approx(1.0)
