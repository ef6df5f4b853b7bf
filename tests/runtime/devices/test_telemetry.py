"""Device readings: what a device refuses is left out, and nothing else is hidden."""

import pytest

from harness.runtime.devices.telemetry import _cpu_reader, read_available


class Refusal(Exception):
    """What a driver raises for a meter that the card does not have."""


def refuse():
    raise Refusal("not supported")


def test_a_meter_that_a_card_lacks_leaves_the_others():
    readings = {"power_w": refuse, "device_temperature_c": lambda: 40}
    assert read_available(readings, Refusal) == {"device_temperature_c": 40.0}


def test_load_is_a_share_of_the_cores_that_a_rank_may_use(monkeypatch):
    monkeypatch.setattr("psutil.Process.cpu_percent", lambda self: 18.0)
    assert _cpu_reader(0.36)()["device_utilization_percent"] == pytest.approx(50)
