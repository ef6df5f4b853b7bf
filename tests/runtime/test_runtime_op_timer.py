"""Operators run alone: what is timed, and on which inputs."""

import contextlib

import pytest
import torch
from torch import nn

from harness.errors import VerificationError
from harness.measure.clock import FakeClock
from harness.runtime.capture import capture
from harness.runtime.models import ModelOptions, build_task, fit_options
from harness.runtime.node_walk import NodeWalk
from harness.runtime.op_timer import OperatorCall, OpTimer, tensors_in
from harness.runtime.sampling import Budget

ONCE = Budget(time_s=0.0, n_min=4, n_max=4, n_warm_up=1)


class Slow(torch.autograd.Function):
    """Doubles; forward takes `forward_s` and backward `backward_s` of the fake clock."""

    @staticmethod
    def forward(ctx, x, clock, forward_s, backward_s):
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.advance(next(forward_s))
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.advance(ctx.backward_s)
        return gradient * 2, None, None, None


def timer(clock=None, **options):
    options = {"autocast": contextlib.nullcontext, "device": torch.device("cpu"), **options}
    return OpTimer(clock or FakeClock(), options.pop("budget", ONCE), **options)


def slow_call(clock, forward_s, backward_s=5.0):
    times = iter(forward_s)
    x = torch.ones(2, requires_grad=True)
    return OperatorCall(lambda x: Slow.apply(x, clock, times, backward_s), (x,), {})


def always(value):
    while True:
        yield value


def test_forward_and_backward_are_timed_apart():
    clock = FakeClock()
    found = timer(clock).measure(slow_call(clock, always(3.0)))
    assert found.forward_s == [3.0] * 4
    assert found.backward_s == [5.0] * 4
    assert (found.median_forward_s, found.median_backward_s, found.spread) == (3.0, 5.0, 0.0)


class SlowToRead(FakeClock):
    """Reading it takes a quarter of a second."""

    def mark(self):
        at = super().mark()
        self.advance(0.25)
        return at


def test_what_takes_time_without_the_operator_is_not_its():
    clock = SlowToRead()
    found = timer(clock).measure(slow_call(clock, always(3.0)))
    assert (found.forward_s, found.backward_s) == ([3.0] * 4, [5.0] * 4)
    nothing = timer(clock).measure(slow_call(clock, always(0.0), 0.0))
    assert (nothing.forward_s, nothing.backward_s) == ([0.0] * 4, [0.0] * 4)


class Queueing(FakeClock):
    """A GPU that the host is ahead of, or not: marks are passed when both have come to them."""

    def __init__(self):
        super().__init__()
        self.host_s = 0.0

    def advance(self, duration_s):
        self.now_s = max(self.now_s, self.host_s) + duration_s

    def mark(self):
        self.host_s += 0.25
        self.advance(0.0)
        return self.now_s

    def settle(self):
        self.host_s = self.now_s


@pytest.mark.parametrize("forward_s", [0.125, 3.0])
def test_what_the_host_takes_is_not_the_gpus(forward_s):
    # Without being held up it ends its work before the host has queued more: a quarter of a second
    # between two marks that stand for nothing, and all or none of it between those of an operator.
    clock = Queueing()
    held = timer(clock, hold=lambda: clock.advance(10.0))
    found = held.measure(slow_call(clock, always(forward_s), 2.0))
    assert (found.forward_s, found.backward_s) == ([forward_s] * 4, [2.0] * 4)


def test_more_samples_of_a_call_are_added():
    clock = FakeClock()
    operators = timer(clock)
    first = operators.measure(slow_call(clock, always(3.0)))
    found = operators.measure(slow_call(clock, always(1.0), 2.0), before=first)
    assert found.forward_s == [3.0] * 4 + [1.0] * 4
    assert found.backward_s == [5.0] * 4 + [2.0] * 4
    assert found.saved_bytes == first.saved_bytes


def test_pauses_are_shared_out_by_what_the_processor_computed():
    clock, computed = FakeClock(), FakeClock()
    # The process computes 3 s forward and 5 s backward; every forward pass is paused for 4 s.

    def run(x):
        computed.advance(3.0)
        return Slow.apply(x, clock, iter([3.0 + 4.0]), 5.0)

    def processor():
        return computed.now_s

    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda gradient: computed.advance(5.0))
    found = timer(clock, processor=processor).measure(OperatorCall(run, (x,), {}))
    # 12 s pass while the processor computes 8.
    assert found.forward_s == pytest.approx([4.5] * 4)
    assert found.backward_s == pytest.approx([7.5] * 4)


def test_emptying_the_cache_costs_the_operator_nothing():
    clock, flushed = FakeClock(), []

    def flush(n_bytes):
        flushed.append(clock.now_s)
        clock.advance(100.0)

    found = timer(clock, flush=flush).measure(slow_call(clock, always(3.0)))
    assert found.forward_s == [3.0] * 4
    assert found.backward_s == [5.0] * 4
    assert len(flushed) >= 2 * 4


def test_what_a_step_goes_through_passes_through_the_cache():
    clock, flushed = FakeClock(), []
    timer(clock, flush=flushed.append).measure(slow_call(clock, always(3.0)), n_between=7e6)
    assert set(flushed) == {7e6}


def alternating():
    while True:
        yield 1.0
        yield 3.0


def test_a_sample_is_the_mean_of_as_many_iterations_as_make_it_steady():
    clock = FakeClock()
    # An iteration takes 6 or 8 s: at least 12 of them make 75 s, an even number of each.
    found = timer(clock, shortest_s=75.0).measure(slow_call(clock, alternating()))
    assert all(value == pytest.approx(2.0, abs=0.16) for value in found.forward_s)
    assert set(found.backward_s) == {5.0}


def test_an_operator_in_place_gets_fresh_inputs_each_time():
    x = torch.tensor([-1.0, 2.0], requires_grad=True)
    seen = []

    def double(x):
        seen.append(x.tolist())
        return x.mul_(2)

    timer().measure(OperatorCall(double, (x,), {}))
    assert len(seen) > 4
    assert all(values == [-1.0, 2.0] for values in seen)


def test_saved_bytes_are_the_inputs_and_not_the_parameters():
    linear = nn.Linear(10, 3)
    x = torch.ones(4, 10, requires_grad=True)
    found = timer().measure(OperatorCall(linear, (x,), {}, tuple(linear.parameters())))
    assert found.saved_bytes == 4 * 10 * 4


def test_an_operator_without_gradient_has_no_backward():
    found = timer().measure(OperatorCall(lambda x: x[:, :1], (torch.ones(2, 2).long(),), {}))
    assert found.backward_s == [0.0] * 4


def test_a_result_that_is_not_finite_is_no_measurement():
    call = OperatorCall(torch.log, (torch.zeros(3),), {})
    with pytest.raises(VerificationError, match="operator 'log1' gives outputs"):
        timer().measure(call, "operator 'log1'")


def test_a_gradient_that_is_not_finite_is_no_measurement():
    call = OperatorCall(torch.sqrt, (torch.zeros(3, requires_grad=True),), {})
    with pytest.raises(VerificationError, match="gives gradients"):
        timer().measure(call)


def walk_lenet(visit, wanted=None):
    task = build_task("lenet", fit_options("lenet", ModelOptions()))
    captured = capture(task, 4, "lenet")
    names = {node: name for name, node in captured.nodes.items()}
    wanted = set(captured.nodes) if wanted is None else wanted
    walk = NodeWalk(captured.module, names, wanted, visit, contextlib.nullcontext)
    images = torch.randn(3, 1, 28, 28)
    return task, images, walk.walk(images)


def test_a_walk_visits_operators_in_order_with_their_inputs_and_parameters():
    found = {}
    task, images, output = walk_lenet(lambda name, call: found.setdefault(name, call))
    assert list(found)[:3] == ["features.0", "features.1", "features.2"]
    assert torch.equal(found["features.0"].args[0], images)
    assert [len(found[f"features.{i}"].parameters) for i in range(3)] == [2, 0, 0]
    assert torch.allclose(output, task.model(images))
    # The images need no gradient; all that follows the first weights does.
    needs = [call.args[0].requires_grad for call in found.values()]
    assert needs == [False] + [True] * 11
    assert output.requires_grad
    assert output.is_leaf


def test_a_walk_visits_only_what_is_wanted():
    found = []
    walk_lenet(lambda name, call: found.append(name), {"features.3"})
    assert found == ["features.3"]


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x):
        x = self.first(x)
        return self.attention(x, x, x, need_weights=False)[0]


def test_an_input_that_stands_three_times_stays_one():
    module = torch.fx.symbolic_trace(Twice())
    names = {node: node.name for node in module.graph.nodes}
    found = {}
    walk = NodeWalk(
        module, names, {"attention"}, lambda name, call: found.setdefault(name, call),
        contextlib.nullcontext,
    )  # fmt: skip
    walk.walk(torch.ones(2, 3, 4))
    assert len({id(tensor) for tensor in tensors_in(found["attention"].args)}) == 1
