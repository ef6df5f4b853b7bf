"""Ends of sums are marked where they hold up nothing; no GPU is needed to see where that is."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest
import torch
from fake_clock import FakeClock

from harness.runtime.engines.completion_stream import CompletionStream


class Machine:
    """Stands in for CUDA: which stream is current, and in what order it is told something."""

    def __init__(self, monkeypatch):
        self.current, self.told = "computing", []
        monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: (device, priority))
        monkeypatch.setattr(torch.cuda, "stream", self.on)

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def synchronize(self):
        self.told.append(("wait", self.current))

    def mark(self):
        self.told.append(("mark", self.current))
        return "end"


@pytest.mark.parametrize(("backend", "priority"), [("nccl", -1), ("gloo", 0)])
def test_the_end_is_marked_behind_the_sum_and_not_behind_what_computes(
    backend, priority, monkeypatch
):
    machine, device = Machine(monkeypatch), torch.device("cuda", 1)
    aside = CompletionStream(SimpleNamespace(device=device, backend=backend))
    assert aside.mark(machine, machine) == "end"
    assert machine.told == [("wait", (device, priority)), ("mark", (device, priority))]
    assert machine.current == "computing"


def test_a_cpu_has_one_queue():
    clock = FakeClock()
    clock.advance(3.0)
    aside = CompletionStream(SimpleNamespace(device=torch.device("cpu"), backend="gloo"))
    assert aside.mark(None, clock) == 3.0
