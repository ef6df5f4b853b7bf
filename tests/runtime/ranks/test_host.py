"""What is read of the host."""

from __future__ import annotations

from collections import namedtuple

import psutil
import pytest

from harness.runtime.ranks.host import processor_seconds

_Times = namedtuple("_Times", "user system idle steal guest guest_nice")


def test_guests_of_this_host_are_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "cpu_times", lambda: _Times(40.0, 5.0, 50.0, 5.0, 30.0, 2.0))
    assert processor_seconds() == (5.0, 100.0)


def test_a_system_without_steal_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    times = namedtuple("times", "user idle")
    monkeypatch.setattr(psutil, "cpu_times", lambda: times(1.0, 3.0))
    assert processor_seconds() == (0.0, 4.0)
