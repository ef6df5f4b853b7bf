"""Marks are the clock's device's, whichever thread makes them; no GPU is needed to see that."""

from __future__ import annotations

import pytest
import torch
from fake_clock import FakeClock

from harness.runtime.devices.sampling import Budget, clock_for, take_samples

DEVICE = torch.device("cuda", 1)


class Event:
    """Stands in for a CUDA event."""

    def __init__(self, enable_timing):
        assert enable_timing

    def record(self, stream):
        self.stream = stream


@pytest.fixture
def settled(monkeypatch):
    """The devices that were waited for."""
    found = []
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(torch.cuda, "synchronize", found.append)
    return found


def test_a_mark_is_of_the_clocks_own_device(settled):
    clock = clock_for(DEVICE)
    assert clock.mark().stream == "stream of cuda:1"
    clock.settle()
    assert settled == [DEVICE, DEVICE]


@pytest.mark.parametrize(
    ("sample_s", "expected"), [(0.1, 10), (0.3, 4), (2.0, 3), (1e-6, 50), (0.0, 50)]
)
def test_a_budget_holds_between_its_least_and_most(sample_s, expected):
    assert Budget(time_s=1.0, n_min=3, n_max=50).count(sample_s) == expected


def test_samples_are_durations_after_the_warm_up():
    clock = FakeClock()
    calls: list[float] = []

    def sample():
        calls.append(1.0 if len(calls) < 2 else 0.25)
        start = clock.mark()
        clock.advance(calls[-1])
        return start, clock.mark()

    found = take_samples(sample, clock, Budget(time_s=1.0, n_min=2, n_warm_up=2))
    assert found == [0.25] * 4
    assert len(calls) == 6
