"""Operators timed where they stand: what is timed, in which order, and what is taken away."""

import contextlib

import pytest
import torch
from fake_clock import FakeClock
from lines import line
from torch import nn

from harness.runtime.devices.sampling import Budget
from harness.runtime.profiling.subgraph import OperatorCall
from harness.runtime.profiling.timer import OpTimer

ONCE = Budget(time_s=0.0, n_min=4, n_max=4, n_warm_up=1)


class Slow(torch.autograd.Function):
    """Doubles; forward takes `forward_s` and backward `backward_s` of the fake clock."""

    @staticmethod
    def forward(ctx, x, clock, forward_s, backward_s):
        ctx.clock, ctx.backward_s = clock, backward_s
        clock.advance(forward_s)
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        ctx.clock.advance(ctx.backward_s)
        return gradient * 2, None, None, None


def timer(clock, **options):
    options = {"autocast": contextlib.nullcontext, "device": torch.device("cpu"), **options}
    return OpTimer(clock, options.pop("budget", ONCE), **options)


def slow(clock, forward_s, backward_s):
    return lambda x: Slow.apply(x, clock, forward_s, backward_s)


class SlowToRead(FakeClock):
    """Reading it takes a quarter of a second, which is none of an operator's."""

    def mark(self):
        at = super().mark()
        self.advance(0.25)
        return at


@pytest.mark.parametrize("kind", [FakeClock, SlowToRead])
def test_each_operator_is_timed_apart_forward_and_backward(kind):
    clock = kind()
    steps = [slow(clock, *seconds) for seconds in ((3.0, 5.0), (1.0, 2.0), (0.0, 0.0))]
    found = timer(clock).measure(line(steps), ["op0", "op1", "op2"])
    assert (found["op0"].forward_s, found["op0"].backward_s) == ([3.0] * 4, [5.0] * 4)
    assert (found["op1"].forward_s, found["op1"].backward_s) == ([1.0] * 4, [2.0] * 4)
    assert (found["op2"].forward_s, found["op2"].backward_s) == ([0.0] * 4, [0.0] * 4)
    one = found["op0"]
    assert (one.median_forward_s, one.median_backward_s, one.spread) == (3.0, 5.0, 0.0)


def test_only_what_is_named_is_timed_and_all_runs():
    clock, ran = FakeClock(), []

    def noting(x):
        ran.append(clock.now_s)
        return x * 1.0

    found = timer(clock).measure(line([slow(clock, 3.0, 5.0), noting]), ["op0"])
    assert list(found) == ["op0"]
    assert len(ran) == 1 + 4  # a warm-up and four samples


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
    found = held.measure(line([slow(clock, forward_s, 2.0)]), ["op0"])["op0"]
    assert (found.forward_s, found.backward_s) == ([forward_s] * 4, [2.0] * 4)


def test_pauses_are_shared_out_by_what_the_processor_computed():
    clock, computed = FakeClock(), FakeClock()
    # The process computes 3 s forward and 5 s backward; every forward pass is paused for 4 s.

    def run(x):
        computed.advance(3.0)
        return Slow.apply(OnProcessor.apply(x, computed), clock, 3.0 + 4.0, 5.0)

    found = timer(clock, processor=lambda: computed.now_s).measure(line([run]), ["op0"])["op0"]
    # 12 s pass while the processor computes 8.
    assert found.forward_s == pytest.approx([4.5] * 4)
    assert found.backward_s == pytest.approx([7.5] * 4)


class OnProcessor(torch.autograd.Function):
    """Computes for 5 s of the processor in backward."""

    @staticmethod
    def forward(ctx, x, computed):
        ctx.computed = computed
        return x * 1.0

    @staticmethod
    def backward(ctx, gradient):
        ctx.computed.advance(5.0)
        return gradient, None


def test_a_sample_is_the_mean_of_as_many_iterations_as_make_it_steady():
    clock, times = FakeClock(), []

    def alternating(x):
        times.append(3.0 if times and times[-1] == 1.0 else 1.0)
        return Slow.apply(x, clock, times[-1], 5.0)

    # An iteration takes 6 or 8 s: at least 12 of them make 75 s, an even number of each.
    found = timer(clock, shortest_s=75.0).measure(line([alternating]), ["op0"])["op0"]
    assert all(value == pytest.approx(2.0, abs=0.16) for value in found.forward_s)
    assert set(found.backward_s) == {5.0}


def test_a_pause_in_one_warm_up_iteration_does_not_make_the_samples_short():
    """A quota lets every tenth iteration pause, as the first: a sample must include pauses."""
    clock, n_run = FakeClock(), []

    def pausing(x):
        n_run.append(1)
        return Slow.apply(x, clock, 90.0 if len(n_run) % 10 == 1 else 0.0, 1.0)

    found = timer(clock, shortest_s=100.0).measure(line([pausing]), ["op0"])["op0"]
    assert all(value == pytest.approx(9.0, abs=1.5) for value in found.forward_s)


def test_microbatches_go_forward_before_the_first_goes_backward():
    clock, order = FakeClock(), []

    class Noting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            order.append("forward")
            return x * 1.0

        @staticmethod
        def backward(ctx, gradient):
            order.append("backward")
            return gradient

    budget = Budget(time_s=0.0, n_min=1, n_max=1, n_warm_up=1)
    timer(clock, budget=budget).measure(line([Noting.apply]), ["op0"], n_in_flight=3)
    assert order == (["forward"] * 3 + ["backward"] * 3) * 2


def test_a_substitute_is_timed_before_the_operator_which_still_runs():
    clock, part = FakeClock(), nn.Linear(2, 1)
    ran = []

    def whole(x):
        ran.append("whole")
        return Slow.apply(x, clock, 3.0, 5.0)

    def half(x):
        ran.append("half")
        return Slow.apply(part(x), clock, 1.5, 2.5)

    def substitute(call):
        return OperatorCall(half, call.args, call.kwargs, tuple(part.parameters()))

    found = timer(clock).measure(line([whole, slow(clock, 1.0, 1.0)]), ["op0"], {"op0": substitute})
    assert (found["op0"].forward_s, found["op0"].backward_s) == ([1.5] * 4, [2.5] * 4)
    assert ran == ["half", "whole"] * 5


@pytest.mark.parametrize(("is_added", "times"), [(False, 1), (True, 3)])
def test_gradients_of_weights_are_added_over_microbatches_alone(is_added, times):
    linear, found = nn.Linear(2, 2, bias=False), []
    linear.weight.register_hook(found.append)
    subgraph = line([linear], parameters=[(linear.weight,)])
    # By this clock an iteration takes no time: three make a sample of 2.5 us.
    steady = timer(FakeClock(), shortest_s=2.5e-6)
    steady.measure(subgraph, ["op0"], is_added=is_added)
    first, second, third = found[-3:]
    assert torch.equal(second, third)
    assert torch.equal(first, times * second)
    assert linear.weight.grad is None


def test_the_expanded_gradient_of_a_sum_is_added():
    weight = nn.Parameter(torch.ones(3))
    subgraph = line([lambda x: x + weight.sum()], parameters=[(weight,)])
    timer(FakeClock(), shortest_s=2.5e-6).measure(subgraph, ["op0"], is_added=True)
