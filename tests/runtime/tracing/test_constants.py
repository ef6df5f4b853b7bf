"""Operators that read no input become constants; those of each sample, repeated ones."""

import pytest
import torch
from nets import held, task_on
from torch import nn

from harness.runtime.tracing.constructs import FOLDED


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.last, self.middle = nn.Linear(4, 3), middle
        self.register_buffer("table", torch.arange(4.0))

    def forward(self, x):
        return self.last(self.middle(self, x))


def operators_of(middle):
    """Operators between the input and the last layer."""
    return held(task_on(Net(middle))).graph.operators[1:-2]


def causal(net, x):
    return x * torch.tril(torch.ones(4, 4, device=x.device)).sum(1)


def of_a_buffer(net, x):
    return x + (2 * net.table).cos()


def of_each_sample(net, x):
    positions = torch.arange(4, device=x.device).expand(x.shape[0], -1)
    return x + (positions + 1)


def of_the_batch_size(net, x):
    return x + torch.arange(x.shape[0], device=x.device)[:, None] / x.shape[0]


def in_place(net, x):
    mask = torch.zeros(4, device=x.device)
    mask[:2] = 1
    return x * mask


def made_empty(net, x):
    sizes = torch.empty(2, 2, device=x.device)
    sizes[0, 0], sizes[0, 1], sizes[1] = 1, 2, 3
    return x / sizes.flatten()


def of_the_type_of_an_input(net, x):
    return x + torch.ones(x.shape[0], 4).type_as(x).reshape(x.shape[0], 2, 2).flatten(1)


def of_a_larger_batch(net, x):
    return x * torch.full((1,), max(x.shape[0], 3), device=x.device)


def in_groups(net, x):
    return x + (torch.arange(x.shape[0], device=x.device) // 3)[:, None]


def written_by_inputs(net, x):
    found = torch.zeros(x.shape[0], 4, device=x.device)
    found[:, 1] = x[:, 2]
    return found + x


@pytest.mark.parametrize(
    ("middle", "n_left"),
    [
        (causal, 1),
        (of_a_buffer, 1),
        (of_each_sample, 2),
        (in_place, 1),
        (made_empty, 1),
        (of_the_type_of_an_input, 5),
    ],
)
def test_constants_are_no_operators(middle, n_left):
    assert len(operators_of(middle)) == n_left


def in_part(net, x):
    return x + net.table[: x.shape[1]]


def as_it_is(net, x):
    return x.view(-1, *net.table.shape) + net.table


@pytest.mark.parametrize(
    ("middle", "names"), [(of_a_buffer, {"table"}), (in_part, {"table"}), (as_it_is, set())]
)
def test_a_graph_names_the_buffers_that_its_constants_are_computed_from(middle, names):
    found = held(task_on(Net(middle))).module.meta[FOLDED]
    assert found & {"table"} == names


@pytest.mark.parametrize("is_known", [True, False])
def test_a_buffer_that_forward_registers_by_the_dtype_of_an_input_is_a_constant(is_known):
    def middle(net, x):
        if getattr(net, "mask", None) is None:
            net.register_buffer("mask", torch.ones(4, dtype=x.dtype), persistent=False)
        return x * net.mask

    net = Net(middle)
    if is_known:
        net.register_buffer("mask", None)
    held(task_on(net))


@pytest.mark.parametrize(
    "middle", [of_the_batch_size, of_a_larger_batch, in_groups, written_by_inputs]
)
def test_values_that_depend_on_the_batch_stay_operators(middle):
    assert len(operators_of(middle)) > 1
