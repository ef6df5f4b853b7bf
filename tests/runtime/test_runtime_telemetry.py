"""Device readings: what a device refuses is left out, and nothing else is hidden."""

import pytest

from harness.runtime.telemetry import read_available


class Refusal(Exception):
    """What a driver raises for a meter that the card does not have."""


def refuse() -> float:
    raise Refusal("not supported")


def test_a_meter_that_a_card_lacks_leaves_the_others() -> None:
    readings = {"power_w": refuse, "device_temperature_c": lambda: 40}
    assert read_available(readings, Refusal) == {"device_temperature_c": 40.0}


def test_another_error_is_not_hidden() -> None:
    with pytest.raises(Refusal):
        read_available({"power_w": refuse}, KeyError)
