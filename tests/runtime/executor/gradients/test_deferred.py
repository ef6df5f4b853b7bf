import copy
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils import parametrizations

from harness.runtime.executor.gradients.deferred import (
    Deferred,
    ImmediateSink,
    WeightQueue,
    can_defer,
)
from harness.runtime.executor.gradients.sync import backward_calls
from harness.runtime.executor.gradients.weight_gradients import GradientBuffers

assert_equal = partial(torch.testing.assert_close, rtol=0, atol=0)
CASES = [
    (nn.Linear(6, 5), (4, 6)),
    (nn.Linear(6, 5, bias=False), (4, 6)),
    (nn.Linear(6, 5), (2, 3, 6)),
    (nn.Conv2d(4, 6, 3, padding=1), (2, 4, 5, 7)),
    (nn.Conv2d(4, 6, 3, stride=2, groups=2, dilation=2, padding=(2, 1)), (2, 4, 9, 8)),
    (nn.Conv2d(4, 6, 1, bias=False), (2, 4, 5, 7)),
]


def trained(module, inputs, flush=lambda: None):
    """Output, gradient of the first input, and gradients of the weights, over all inputs."""
    inputs = [x.clone().requires_grad_() for x in inputs]
    for x in inputs:
        output = module(x)
        output.backward(torch.ones_like(output).cumsum(0))
    flush()
    return output, [x.grad for x in inputs]


def taken(module):
    """The gradients of a module's parameters, which has none then."""
    gradients = [p.grad for p in module.parameters()]
    module.zero_grad()
    return gradients


@pytest.mark.parametrize(("module", "shape"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_deferred_gradients_are_bit_equal_to_those_of_autograd(module, shape, dtype):
    module = copy.deepcopy(module).to(dtype)
    inputs = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    expected = trained(module, inputs)
    gradients, queue = taken(module), WeightQueue()
    found = trained(Deferred(module, queue, GradientBuffers()), inputs)
    assert all(p.grad is None for p in module.parameters())
    assert queue.flush() == list(module.parameters())
    assert queue.flush() == []
    assert_equal([*found, taken(module)], [*expected, gradients])


def test_deferred_gradients_have_the_strides_of_their_parameters():
    """A convolution of inputs in channels_last makes others, which fused optimizers refuse."""
    module, queue = nn.Conv2d(4, 6, 3), WeightQueue()
    x = torch.randn(2, 4, 5, 7).to(memory_format=torch.channels_last)
    trained(Deferred(module, queue, GradientBuffers()), [x], queue.flush)
    assert module.weight.grad.stride() == module.weight.stride()


def test_what_follows_a_deferred_layer_may_work_in_place():
    module, queue, x = nn.Linear(6, 5), WeightQueue(), torch.randn(2, 3, 6)
    F.relu(module(x), inplace=True).sum().backward()
    expected = taken(module)
    F.relu(Deferred(module, queue, GradientBuffers())(x), inplace=True).sum().backward()
    queue.flush()
    assert_equal(taken(module), expected)


@pytest.mark.parametrize("dim", [0, 1])  # of the only sample
def test_a_pending_gradient_shares_no_memory_with_that_of_a_parameter_that_is_added(dim):
    module, positions = nn.Linear(6, 5), nn.Parameter(torch.zeros(3, 5))
    inputs, gradients = (torch.randn(2, 3, n).unsqueeze(dim + 1) for n in (6, 5))
    queue = WeightQueue()
    deferred = Deferred(module, queue, GradientBuffers())
    for x, gradient in zip(inputs, gradients, strict=True):
        (deferred(x) + positions.unsqueeze(dim)).backward(gradient.clone())
    queue.flush()
    expected = torch.einsum("bnso,bnsi->oi", gradients, inputs)
    assert torch.allclose(module.weight.grad, expected, atol=1e-5)
    assert torch.allclose(positions.grad, gradients.sum((0, dim + 1)))


@pytest.mark.parametrize(
    "normed", [parametrizations.weight_norm, parametrizations.spectral_norm, nn.utils.spectral_norm]
)
def test_a_weight_that_is_computed_is_left_to_autograd(normed):
    for module in (nn.Linear(1024, 1024), nn.Conv2d(512, 512, 1)):
        made = normed(module)
        assert not can_defer(made)


def test_backward_reaches_a_parameter_once_by_autograd_and_by_each_call_at_once():
    plain, waiting, called, joined = (nn.Linear(2, 2) for _ in range(4))
    buffers = GradientBuffers()
    graph = fx.Graph()
    x = graph.placeholder("x")
    for name in ("plain", "waiting", "called", "plain", "called", "joined"):
        x = graph.call_module(name, (x,))
    graph.output(x)
    owned = {
        "plain": plain,
        "waiting": Deferred(waiting, WeightQueue(), buffers),
        "called": Deferred(called, ImmediateSink(lambda parameter: None), buffers),
        "joined": Deferred(joined, ImmediateSink(lambda parameter: None), buffers, n_joined=3),
    }
    found = backward_calls(fx.GraphModule(owned, graph))
    assert found.waiting == set(waiting.parameters())
    assert found.each == {plain.weight: 1, plain.bias: 1, called.weight: 2, called.bias: 2}
    assert found.joined == {joined.weight: 1, joined.bias: 1}


@pytest.mark.parametrize(("module", "shape"), CASES)
def test_joined_calls_give_their_gradients_with_the_last(module, shape):
    module, queue = copy.deepcopy(module).double(), WeightQueue()
    inputs = [torch.randn(n, *shape[1:], dtype=torch.float64) for n in (2, 3, 2)]
    expected = trained(module, inputs)
    gradients = taken(module)
    own = Deferred(module, queue, GradientBuffers(), n_joined=3)
    trained(own, inputs[:2])
    assert queue.flush() == []
    found = trained(own, inputs[2:])
    assert queue.flush() == list(module.parameters())
    assert torch.equal(found[0], expected[0])
    torch.testing.assert_close(taken(module), gradients)


def test_at_once_a_large_gradient_is_written_where_it_stays():
    module, buffers, reached = nn.Linear(1024, 1024), GradientBuffers(), []
    buffer = torch.zeros(2, 1024, 1024)[1]
    buffers[module.weight] = buffer
    own = Deferred(module, ImmediateSink(reached.append), buffers)
    inputs = [torch.randn(3, 1024) for _ in range(2)]
    trained(module, inputs)
    expected = taken(module)
    trained(own, inputs)
    assert reached == 2 * [module.weight, module.bias]
    assert module.weight.grad is buffer
    torch.testing.assert_close(taken(module), expected)
    trained(own, inputs[:1])
    assert module.weight.grad is buffer  # what the step before left there is gone
    trained(module.requires_grad_(), inputs[1:])
    torch.testing.assert_close(module.weight.grad, expected[0])


def test_under_autocast_gradients_are_those_of_autograd():
    module, queue = nn.Linear(6, 5), WeightQueue()
    x = torch.randn(4, 6)

    def run(called):
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            output = called(own)
        output.float().sum().backward()
        return output, own.grad

    expected = run(module)
    gradients = taken(module)
    found = run(Deferred(module, queue, GradientBuffers()))
    queue.flush()
    assert found[0].dtype == torch.bfloat16
    assert_equal([*found, taken(module)], [*expected, gradients])


def test_under_autocast_another_use_of_the_weights_is_trained():
    module, x = nn.Linear(5, 5), torch.randn(4, 5)
    own = Deferred(module, WeightQueue(), GradientBuffers())
    with torch.autocast("cpu", torch.bfloat16):
        module(own(x)).float().sum().backward()
    found = taken(module)
    with torch.autocast("cpu", torch.bfloat16):
        module(module(x).detach()).float().sum().backward()
    assert_equal(taken(module), found)
