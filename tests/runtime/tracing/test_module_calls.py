"""Operators of an export are joined to PyTorch's layers where a call of the layer computes them."""

import pytest
import torch
from nets import held, users_task
from torch import nn


class Exported(nn.Module):
    """torch.fx cannot follow its loop over a size."""

    def __init__(self, middle, *layers):
        super().__init__()
        self.middle, self.layers = middle, nn.ModuleList(layers)

    def forward(self, x):
        y = self.middle(self.layers, x)
        for _ in range(x.shape[1]):
            y = 2 * y
        return y


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("rows", torch.rand(3, 2))


@pytest.mark.parametrize(
    ("middle", "layers", "example", "function"),
    [
        (
            lambda layers, x: layers[0](x[:, 1:]),
            [nn.EmbeddingBag(10, 4, mode="sum")],
            torch.randint(10, (2, 3)),
            "EmbeddingBag",
        ),
        (
            lambda layers, x: x[:, :, None] * layers[0](layers[1].rows),
            [nn.Linear(2, 4), Table()],
            torch.rand(2, 3),
            "Linear",
        ),
        (
            lambda layers, x: layers[0](x),
            [nn.ConvTranspose2d(1, 2, 3, 2, output_padding=1)],
            torch.rand(2, 1, 4, 4),
            "ConvTranspose2d",
        ),
        (
            lambda layers, x: layers[1](layers[0](x), output_size=x.shape[2:]),
            [nn.Conv2d(1, 1, 3, 2), nn.ConvTranspose2d(1, 2, 3, 2)],
            torch.rand(2, 1, 8, 8),
            "conv_transpose2d",
        ),
    ],
)
def test_a_layer_is_called_where_it_computes_the_operators(middle, layers, example, function):
    graph = held(users_task(Exported(middle, *layers), (example,))).graph
    assert function in [op.attrs.get("function") for op in graph.operators]
    assert graph.mixing_operator() is None
