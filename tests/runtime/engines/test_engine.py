"""Shares and checksums; engines on several ranks are tested with the train workload."""

import contextlib
import logging
import os
import sys
import warnings
from types import SimpleNamespace

import pytest
import torch
from fake_clock import FakeClock
from torch import nn

from harness.errors import ConfigError, VerificationError
from harness.measure.recorder import Recorder
from harness.runtime.devices.precision import Precision
from harness.runtime.engines import replicas
from harness.runtime.engines.deepspeed_engine import TimedBackend, _import_deepspeed
from harness.runtime.engines.engine import CollectiveSpans, Share
from harness.runtime.engines.optimizers import OptimizerOptions, make_optimizer
from harness.runtime.engines.replicas import fingerprint, verify_replicas
from harness.runtime.engines.torch_engine import unread_parameters
from harness.runtime.models.factory import task_of
from harness.runtime.models.task import ModelOptions


def test_weights_make_the_ranks_parts_add_up_to_the_mean():
    shares = [Share(n_local=n, n_global=6) for n in (3, 2, 1)]
    assert sum(share.weight * share.n_local for share in shares) == pytest.approx(1.0)


def test_equal_models_have_equal_digests_and_one_bit_changes_them():
    model = nn.Linear(3, 2)
    digests = []
    for _ in range(3):
        digests.append(verify_replicas(model, SimpleNamespace(size=1)))
        with torch.no_grad():
            model.weight.view(torch.int32)[0, 0] ^= 1
    assert digests[0] == digests[2] != digests[1]


def test_replicas_that_differ_are_named(monkeypatch):
    def gathered(_, mine):
        return [mine, {place: [*bits[:1], 0] for place, bits in mine.items()}]

    monkeypatch.setattr(replicas, "gather_objects", gathered)
    with pytest.raises(VerificationError, match="ranks 0 and 1 hold unequal weight after"):
        verify_replicas(nn.Linear(3, 2), SimpleNamespace(size=2))


def test_exchanged_values_change_the_fingerprint():
    model = nn.Linear(4, 1, bias=False)
    before = fingerprint(model)
    with torch.no_grad():
        model.weight.copy_(model.weight[:, [2, 3, 0, 1]])
    changed = fingerprint(model)
    assert changed[0, 0] == before[0, 0]
    assert changed[0, 1] != before[0, 1]


@pytest.mark.parametrize("dtype", ["fp32", "tf32", "bf16", "fp16"])
def test_only_narrow_dtypes_are_autocast(dtype):
    layer, x = nn.Linear(2, 2), torch.randn(1, 2)
    with Precision(dtype, torch.device("cpu")).autocast():
        computed = layer(x).dtype
    wide = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(dtype, torch.float32)
    assert computed == wide


def test_an_unknown_optimizer_is_refused():
    with pytest.raises(ConfigError, match="choose one of sgd, adamw"):
        make_optimizer([], OptimizerOptions(name="lion"), torch.device("cpu"))


class Partly(nn.Module):
    """Has an output that no loss reads, a layer that forward does not call, and a frozen one."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 3), nn.Linear(3, 2)
        self.aside, self.never, self.frozen = (nn.Linear(3, 3) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x):
        hidden = self.frozen(self.first(x))
        return {"logits": self.last(hidden), "aside": self.aside(hidden)}


def test_parameters_without_a_gradient_are_found_without_computing():
    task = task_of("m:f", (Partly(), torch.rand(2, 4)), ModelOptions())
    assert unread_parameters(task) == tuple(
        f"{layer}.{name}" for layer in ("aside", "never") for name in ("weight", "bias")
    )
    assert task.model.training
    assert all(p.grad is None and not p.is_meta for p in task.model.parameters())


class SlowBackend:
    """A backend whose collective takes two seconds, of its caller or while that waits."""

    def __init__(self, clock):
        self._clock = clock

    def all_reduce(self, tensor):
        self._clock.advance(2.0)
        return "done"

    def all_gather(self, tensor, *, async_op):
        assert async_op
        return self

    def wait(self):
        self._clock.advance(2.0)

    def get_rank(self):
        return 7


def test_compute_is_what_lies_between_blocking_collectives():
    clock = FakeClock()
    recorder = Recorder(clock)
    backend = TimedBackend(SlowBackend(clock), recorder)
    clock.advance(1.0)  # computes from 0 to 1
    assert backend.all_reduce(torch.zeros(4)) == "done"
    clock.advance(3.0)  # and from 3 to 6
    backend.add_compute("backward", 0.0, clock.mark())
    found = [(s.kind, s.name, s.start_s, s.duration_s, s.n_bytes) for s in recorder.collect()]
    assert found == [
        ("backward", "", 0.0, 1.0, None),
        ("communication", "all_reduce", 1.0, 2.0, 16),
        ("backward", "", 3.0, 3.0, None),
    ]
    assert backend.n_collectives == 1
    assert backend.get_rank() == 7


def test_of_a_collective_in_the_background_only_the_wait_is_not_compute():
    clock = FakeClock()
    recorder = Recorder(clock)
    backend = TimedBackend(SlowBackend(clock), recorder)
    work = backend.all_gather(torch.zeros(4), async_op=True)
    clock.advance(1.0)  # computes from 0 to 1, waits to 3
    work.wait()
    clock.advance(3.0)  # computes to 6
    backend.add_compute("forward", 0.0, clock.mark())
    found = [(s.kind, s.name, s.start_s, s.duration_s) for s in recorder.collect()]
    assert sorted(found) == [
        ("communication", "all_gather", 0.0, 3.0),
        ("forward", "", 0.0, 1.0),
        ("forward", "", 3.0, 3.0),
    ]


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
    recorder = SimpleNamespace(clock=machine, add_marks=lambda *_, **__: None)
    spans = CollectiveSpans(SimpleNamespace(device=device, backend=backend), recorder)
    spans._end(machine, "start", "bucket0", 4)
    assert spans.last_done == "end"
    assert machine.told == [("wait", (device, priority)), ("mark", (device, priority))]
    assert machine.current == "computing"


def test_a_cpu_has_one_queue():
    clock = FakeClock()
    clock.advance(3.0)
    cpu = SimpleNamespace(device=torch.device("cpu"), backend="gloo")
    spans = CollectiveSpans(cpu, Recorder(clock))
    spans._end(None, 0.0, "bucket0", 4)
    assert spans.last_done == 3.0


def test_deepspeed_does_not_warn_of_names_that_torch_has_changed(monkeypatch):
    ops = SimpleNamespace(__compatible_ops__={})
    fake = SimpleNamespace(ops=ops, utils=SimpleNamespace(logger=logging.getLogger("fake")))
    for name, module in (("deepspeed", fake), ("deepspeed.ops", ops)):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(os, "environ", {})
    with warnings.catch_warnings(record=True, action="always") as caught:
        assert _import_deepspeed(SimpleNamespace(device=torch.device("cpu"))) is fake
        warnings.warn("`torch.distributed.all_gather` is deprecated.", FutureWarning, stacklevel=1)
        warnings.warn("another", FutureWarning, stacklevel=1)
    assert [str(one.message) for one in caught] == ["another"]
