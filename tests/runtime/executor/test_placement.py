"""A model on the host is trained on the device, where the whole model may not fit.

The meta device stands for a GPU: an operator that is given a tensor of the host too fails there. A
tensor's memory cannot be replaced by that of the meta device, so that here the tensors are swapped.
"""

import pytest
import torch
from equivalence_cases import draw_batch
from msgspec.structs import replace
from torch import nn
from zoo.training import BATCH, Planner

from harness.domain.strategy import Strategy
from harness.measure.recorder import HostClock, Recorder
from harness.runtime.capture.capture import capture
from harness.runtime.engines.engine import EngineOptions, Share
from harness.runtime.engines.optimizers import OptimizerOptions
from harness.runtime.executor.engine import ExecutorEngine
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.program import emit
from harness.runtime.executor.state import weights
from harness.runtime.models.task import InputSpec, Task
from harness.runtime.ranks.world import World

META = torch.device("meta")
WORLD = World(
    rank=0, size=1, hostname="a", hostnames=["a"], device=META, device_kind="GPU", backend="gloo",
    backend_reason="", interface="lo", n_cores=1, n_threads=1, memory_bytes=1 << 30,
)  # fmt: skip


def swap(tensor, device):
    if tensor.device != device:
        moved = tensor.detach().to(device)
        if isinstance(tensor, nn.Parameter):
            moved = nn.Parameter(moved, tensor.requires_grad)
        torch.utils.swap_tensors(tensor, moved)


@pytest.fixture(autouse=True)
def swapped(monkeypatch):
    for module in (weights, emit):
        monkeypatch.setattr(module, "move", swap)


class MadeTensors(nn.Module):
    """Makes tensors in forward, where its weight is; has an average with counts of its pixels."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.pool = nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)
        self.norm, self.last = nn.BatchNorm2d(4), nn.Linear(4, 6)

    def forward(self, x):
        y = self.norm(self.pool(self.conv(x)))
        ramp = torch.arange(4, device=self.last.weight.device, dtype=x.dtype)
        ones = torch.ones(4, device=next(self.parameters()).device, dtype=x.dtype)
        return self.last(y.mean((2, 3)) * ones + ramp)


def on_device_0(strategy: Strategy) -> Strategy:
    plans = strategy.operators.items()
    return replace(
        strategy,
        operators={name: replace(plan, devices=[0] * len(plan.devices)) for name, plan in plans},
    )


@pytest.mark.parametrize("kind", ["single", "tensor"])
def test_slices_of_a_model_on_the_host_train_on_the_device(kind):
    spec = InputSpec(name="x", shape=(3, 8, 8))
    task = Task(model=MadeTensors(), inputs=(spec,), n_classes=6)
    captured = capture(task, BATCH, "model")
    n_parts = 1 if kind == "single" else 2
    strategy = on_device_0(Planner(captured.graph, n_parts).make(kind))
    options = EngineOptions(dtype="fp32", optimizer=OptimizerOptions(name="adamw"), batch=BATCH)
    plan = ExecutorPlan(strategy=strategy, batch_norm="global")
    engine = ExecutorEngine(task, WORLD, Recorder(HostClock()), options, plan, captured)
    held = engine.weights.held.values()
    assert {tensor.device for tensor in held} == {META}
    batch = draw_batch(task, BATCH, 0)
    engine.compute_forward(batch)
    share = Share(n_local=BATCH, n_global=BATCH)
    assert engine.step(lambda: batch, share).device == META
