"""Comparisons and engines infer the shapes of a captured model once."""

import torch
from nets import held, task_on
from torch import nn

from harness.runtime.executor.geometry.values import MetaModel

CPU = torch.device("cpu")


class Partly(nn.Module):
    """Its first layer requires gradients and gets none."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.first(x).detach())


def differentiable(captured, task, samples):
    tensors = MetaModel.of(captured, task.inputs, CPU).at(samples).tensors
    return {node.name for node, found in tensors.items() if found.is_differentiable}


def test_a_copy_is_shared_until_other_parameters_are_trained():
    task = task_on(Partly())
    captured = held(task)
    (of_comparison,) = captured.shared.values()
    assert MetaModel.of(captured, task.inputs, CPU) is of_comparison
    assert differentiable(captured, task, 2) == {"first", "last", "output"}
    captured.freeze_untrained(task.model)
    assert differentiable(captured, task, 2) == {"last", "output"}
