"""Marks are the clock's device's, whichever thread makes them; no GPU is needed to see that."""

from __future__ import annotations

import pytest
import torch

from harness.runtime.devices.cuda_clock import clock_for

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
