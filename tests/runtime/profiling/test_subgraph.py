"""A model run operator by operator: the same outputs and gradients as by itself, in that order."""

import copy
import itertools

import pytest
import torch
from lines import steps_in_line
from nets import built_in, task_on
from torch import nn

from harness.runtime.capture.capture import capture
from harness.runtime.capture.saved import tensors_within
from harness.runtime.profiling.subgraph import Subgraph, resident, steps_of, values_at

CPU = torch.device("cpu")
# Unlike that of tensors, so that they are copied there, as to a GPU.
OTHER = torch.device("cpu", 0)


def run(step, call):
    return call()


class Collecting:
    """Runs backward and adds up the gradients of parameters."""

    def __init__(self):
        self.found, self.order = {}, []

    def __call__(self, step, pending, wanted):
        self.order.append(step.name)
        gradients = [sum(parts[1:], start=parts[0]) for parts in pending.gradients]
        found = torch.autograd.grad(pending.outputs, wanted, gradients, allow_unused=True)
        for x, gradient in zip(wanted, found, strict=True):
            if isinstance(x, nn.Parameter) and gradient is not None:
                self.found[x] = self.found.get(x, 0) + gradient
        return found


def captured_lenet(batch=4):
    task = built_in("lenet")
    return task, capture(task, batch, "lenet")


def fed_of(captured, *inputs):
    nodes = captured.module.graph.find_nodes(op="placeholder")
    return dict(zip(nodes, inputs, strict=True))


@pytest.mark.parametrize("device", [CPU, OTHER])
@pytest.mark.parametrize("bounds", [[0, None], [0, 5, None], [0, 1, 2, 7, None]])
def test_subgraphs_in_a_row_give_the_gradients_of_the_model(bounds, device):
    task, captured = captured_lenet()
    images, targets = torch.randn(4, 1, 28, 28), torch.tensor([0, 1, 2, 3])
    steps = steps_of(captured, lambda output: task.sum_loss(output, targets))
    fed = fed_of(captured, images)
    losses, last = [], Collecting()
    for begin, end in itertools.pairwise(bounds):
        later = {node for step in steps[end or len(steps) :] for node in step.reads}
        subgraph = Subgraph(steps[begin:end], values_at(steps, begin, fed, device), later)
        with resident(steps[begin:end], device):
            flight = subgraph.forward(run)
            losses = tensors_within(flight.outputs.get(steps[-1].node))
            last = Collecting()
            subgraph.backward(flight, last)
        assert last.order == [step.name for step in reversed(steps[begin:end])]
    expected = task.sum_loss(task.model(images), targets)
    assert torch.equal(losses[0], expected)
    # The last subgraph has the gradients of the loss; those before it got gradients of one.
    expected.backward()
    for parameter, gradient in last.found.items():
        assert torch.allclose(gradient, parameter.grad, rtol=1e-5, atol=1e-7)
    assert len(last.found) == sum(len(step.parameters) for step in steps[bounds[-2] :])


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.first, self.relu, self.second = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)

    def forward(self, x):
        y = self.first(x) * self.scale
        return self.second(self.relu(y * 1.0)) + y


def test_branches_operators_in_place_and_parameters_read_directly_have_their_gradients():
    model = Residual().double()
    whole = copy.deepcopy(model)
    task = task_on(model, 3, dtype=torch.float64)
    captured = capture(task, 2, "residual")
    x, targets = torch.randn(2, 3, dtype=torch.float64), torch.tensor([0, 2])
    steps = steps_of(captured, lambda output: task.sum_loss(output, targets))
    assert [step.is_in_place for step in steps].count(True) == 1
    assert [step.is_attribute for step in steps].count(True) == 1
    subgraph, collected = Subgraph(steps, fed_of(captured, x)), Collecting()
    subgraph.backward(subgraph.forward(run), collected)
    task.sum_loss(whole(x), targets).backward()
    named = dict(captured.module.named_parameters())
    assert len(collected.found) == len(named)
    for name, expected in whole.named_parameters():
        # Two of its own gradients, of the product and the sum, are added in another order.
        assert torch.allclose(collected.found[named[name]], expected.grad, rtol=1e-12)


def test_values_are_those_that_are_read_later_and_carry_gradients_as_in_the_model():
    first, steps = steps_in_line([lambda x: x * 2, lambda x: x + 1, lambda x: x * 3])
    found = values_at(steps, 2, {first: torch.ones(2)}, CPU)
    (value,) = found.values()
    assert value.tolist() == [3.0, 3.0]
    assert value.requires_grad
    assert list(values_at(steps, 0, {first: torch.ones(2)}, CPU)) == [first]


def test_tensors_of_the_host_return_there_after_steps_have_run_on_a_device():
    _, captured = captured_lenet()
    steps = steps_of(captured, lambda output: output.sum())[:3]
    tensors = [tensor for step in steps for tensor in step.tensors]
    places = [tensor.data_ptr() for tensor in tensors]
    assert places
    with resident(steps, OTHER):
        assert not {tensor.data_ptr() for tensor in tensors} & set(places)
    assert [tensor.data_ptr() for tensor in tensors] == places
    with resident(steps, CPU):
        assert [tensor.data_ptr() for tensor in tensors] == places
