"""What limits an interface."""

from collections import namedtuple

import psutil

from harness.runtime.ranks.host import processor_seconds
from harness.runtime.ranks.interfaces import shaped_rates


def test_a_shaper_at_the_root_limits_its_interface():
    qdiscs = [
        {"kind": "noqueue", "dev": "lo", "root": True, "options": {}},
        {"kind": "tbf", "dev": "eth0", "root": True, "options": {"rate": 12500000}},
        {"kind": "tbf", "dev": "eth1", "parent": "1:1", "options": {"rate": 1}},
    ]
    assert shaped_rates(qdiscs) == {"eth0": 100e6}


_Times = namedtuple("_Times", "user system idle steal guest guest_nice")


def test_guests_of_this_host_are_not_counted_twice(monkeypatch):
    monkeypatch.setattr(psutil, "cpu_times", lambda: _Times(40.0, 5.0, 50.0, 5.0, 30.0, 2.0))
    assert processor_seconds() == (5.0, 100.0)
