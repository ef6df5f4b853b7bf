"""A draw while a model is traced would be kept for ever, so it is refused."""

import random

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex

from harness.errors import ModelError
from harness.runtime.tracing.kept_calls import Vmap
from harness.runtime.tracing.trace import trace

X = torch.zeros(4, 6)


class Net(nn.Module):
    def __init__(self, draw, is_exported):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.draw, self.is_exported = draw, is_exported

    def forward(self, x):
        if self.is_exported and x.sum(1).shape[0] < 0:
            return x
        for layer in self.layers:
            x = self.draw(x, layer)
        return x


def by_torch(x, layer):
    return x if torch.rand(()).item() < 0.5 else layer(x)


def by_python(x, layer):
    return x if random.random() < 0.5 else layer(x)


def by_numpy(x, layer):
    return x if np.random.rand() < 0.5 else layer(x)


def fixed_noise(x, layer):
    return layer(x + torch.randn(6))


@pytest.mark.parametrize(
    ("draw", "by"),
    [(by_torch, "torch"), (by_python, "random"), (by_numpy, "numpy"), (fixed_noise, "torch")],
)
def test_layers_left_out_at_random_are_refused(draw, by):
    with pytest.raises(ModelError, match=rf"Net cannot be captured: forward draws .* \({by}\)"):
        trace(Net(draw, is_exported=False), (X,))


def test_layers_left_out_at_random_are_refused_where_the_model_is_exported():
    with pytest.raises(ModelError, match=r"draws random numbers \(random\)"):
        trace(Net(by_python, is_exported=True), (X,))


def by_vmap(x, layer):
    codes = (x > 0).long()
    with TransformGetItemToIndex():
        x = x + torch.vmap(lambda k: codes[0, k])(torch.arange(6))
    one, two = torch.vmap(lambda row: (layer(row), torch.vmap(torch.sin)(row)))(x)
    return one * two


def test_a_vmap_is_one_operator():
    net = Net(by_vmap, is_exported=True)
    module = trace(net, (X,))
    found = [node for node in module.graph.nodes if isinstance(node.target, Vmap)]
    assert len(found) == 6
    assert not any("spec" in x.name for x in found[0].args)  # constants that are no tensors
    x = torch.randn(4, 6)
    assert torch.equal(module(x), net(x))
    with pytest.raises(IndexError):
        module(torch.randn(4, 5))
    assert torch.equal(module(x), net(x))


def test_a_check_of_values_is_left_out():
    def checked(x, layer):
        torch._check_tensor_all(x.sum() < 0)
        return layer(x)

    assert trace(Net(checked, is_exported=True), (X,))(X).shape == X.shape


def test_noise_of_the_inputs_shape_is_drawn_in_every_step():
    module = trace(Net(lambda x, layer: layer(x + torch.randn_like(x)), is_exported=False), (X,))
    assert not torch.equal(module(X), module(X))


def of_a_mask_of_its_own(x, layer):
    mask = None if torch.compiler.is_compiling() else torch.arange(6) < 4
    return layer(x * mask.to(x.dtype))


def test_a_model_that_asks_whether_it_is_compiled_is_captured_as_it_runs():
    net = Net(of_a_mask_of_its_own, is_exported=True)
    module = trace(net, (X,))
    x = torch.randn(4, 6)
    assert torch.equal(module(x), net(x))
