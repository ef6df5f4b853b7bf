"""Copies without memory keep shapes and what is shared, and copy no tensor on the way."""

from unittest import mock

import torch
from torch import nn

from harness.runtime.capture.meta_copy import meta_copy


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.norm = nn.BatchNorm1d(3)


def test_nothing_is_copied_where_it_is_and_ties_stay():
    model = Tied()
    with mock.patch.object(torch.Tensor, "__deepcopy__", side_effect=AssertionError):
        copied = meta_copy(model)
    tensors = {**dict(copied.named_parameters()), **dict(copied.named_buffers())}
    assert {tensor.device.type for tensor in tensors.values()} == {"meta"}
    assert copied.second.weight is copied.first.weight
    assert isinstance(copied.first.weight, nn.Parameter)
    assert [p.requires_grad for p in copied.parameters()] == [
        p.requires_grad for p in model.parameters()
    ]
    assert {name: t.shape for name, t in tensors.items()} == {
        name: t.shape for name, t in (*model.named_parameters(), *model.named_buffers())
    }


def test_a_weight_that_a_hook_computes_is_copied_without_memory():
    model = nn.utils.weight_norm(nn.Linear(3, 2))
    model(torch.ones(1, 3))
    copied = meta_copy(model)
    assert copied.weight.is_meta
    assert copied(torch.ones(4, 3, device="meta")).shape == (4, 2)
