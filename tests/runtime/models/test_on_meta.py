"""A model without memory for its weights is the model, but for their values."""

from __future__ import annotations

import torch
from torch import nn

from harness.runtime.models.on_meta import weights_on_meta


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.last = nn.Embedding(5, 4), nn.Linear(4, 5)
        self.last.weight = self.embedding.weight
        self.token = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.rates = [x.item() for x in torch.linspace(0, 1, 3)]
        self.register_buffer("positions", torch.arange(3))


def test_parameters_are_on_meta_and_all_else_is_real():
    with weights_on_meta():
        net = Net()
    assert {p.device.type for p in net.parameters()} == {"meta"}
    assert net.last.weight is net.embedding.weight
    assert not net.token.requires_grad
    assert (net.rates, net.positions.tolist()) == ([0.0, 0.5, 1.0], [0, 1, 2])
    assert nn.Linear(2, 2).weight.device.type == "cpu"
