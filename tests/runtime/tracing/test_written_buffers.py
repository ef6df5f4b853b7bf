"""Buffers that a model writes are passed on and written once, or refused."""

import pytest
import torch
from torch import nn

from harness.domain.strategy import OperatorPlan, Stage, Strategy, check_buffers
from harness.errors import ModelError, StrategyError
from harness.runtime.capture.capture import capture
from harness.runtime.models import InputSpec, Task
from harness.runtime.tracing.trace import trace


class Writer(nn.Module):
    """Writes a buffer of a child, which is small beside it."""

    def __init__(self, write):
        super().__init__()
        self.first, self.child, self.last = nn.Linear(4, 4), nn.Linear(1, 1), nn.Linear(4, 3)
        self.child.register_buffer("seen", torch.ones(4))
        self.register_buffer("n_steps", torch.zeros(()))
        self.write = write

    def forward(self, x):
        x = self.first(x)
        self.write(self, x)
        return self.last(x * self.child.seen)


def assign(net, x):
    net.child.seen = net.child.seen + x.detach().mean(0)


def items(net, x):
    net.child.seen[:2] = x.detach().mean(0)[:2]


def zero(net, x):
    net.child.seen.zero_().add_(x.detach().mean(0))


@pytest.mark.parametrize("write", [assign, items, zero])
def test_a_written_buffer_is_passed_on_and_written_once(write):
    torch.manual_seed(0)
    model, twin = Writer(write), Writer(write)
    twin.load_state_dict(model.state_dict())
    traced = trace(twin, (torch.ones(5, 4),))
    assert torch.equal(twin.child.seen, torch.ones(4))
    for seed in (1, 2):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(model(x), traced(x))
        assert torch.equal(model.child.seen, traced.child.seen)


def count(net, x):
    net.n_steps += 1


def test_a_buffer_that_depends_on_nothing_is_counted_by_the_graph():
    model = Writer(count)
    traced = trace(model, (torch.ones(5, 4),))
    assert traced.n_steps == 0
    traced(torch.ones(5, 4))
    traced(torch.ones(5, 4))
    assert traced.n_steps == 2


def part(net, x):
    net.child.seen[:2].add_(1)


def weight(net, x):
    net.first.weight.data.clamp_(-1, 1)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (part, "changes a view of the buffer 'child.seen' in place"),
        (weight, "changes the data of first_weight in place"),
        (lambda net, x: setattr(net.first, "weight", x), "assigns 'first.weight'"),
    ],
)
def test_writes_that_no_graph_can_keep_are_refused(write, reason):
    with pytest.raises(ModelError, match=reason):
        trace(Writer(write), (torch.ones(2, 4),))


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return x - self.mean


class WithRunning(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), Running(), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def strategy_of(graph, devices, **changes):
    plans = {
        op.name: OperatorPlan({}, [devices.get(op.name, 0)])
        for op in graph.operators
        if op.kind != "input"
    }
    return Strategy(name="own", batch=4, operators=plans, **changes)


def test_a_small_module_that_writes_a_buffer_is_kept_whole():
    graph = capture(
        Task(model=WithRunning(), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=3), 4, "r"
    ).graph
    norm = next(op for op in graph.operators if op.name == "norm")
    assert norm.attrs["writes_buffers"] == ["norm.mean"]
    check_buffers(strategy_of(graph, {}), graph)
    with pytest.raises(StrategyError, match=r"'norm' writes the buffer .*its recompute"):
        check_buffers(strategy_of(graph, {}, stages=[Stage(recompute=True)]), graph)


def test_a_buffer_is_written_where_it_is_read():
    task = Task(model=Writer(assign), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=3)
    graph = capture(task, 4, "w").graph
    check_buffers(strategy_of(graph, {}), graph)
    with pytest.raises(StrategyError, match=r"'child.seen', which operator 'read_child_seen' has"):
        check_buffers(strategy_of(graph, {"write_child_seen": 1}), graph)
