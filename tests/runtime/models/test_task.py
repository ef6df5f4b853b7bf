"""The loss takes the same tensor of a model's outputs on one device and by a plan."""

from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
from nets import task_on
from torch import Tensor, nn

from harness.errors import ModelError
from harness.runtime.capture.capture import capture
from harness.runtime.models.task import logits_of

Pair = namedtuple("Pair", ["logits", "hidden"])
Odd = namedtuple("Odd", ["scores", "hidden"])


@dataclass
class Outputs:
    hidden: Tensor
    logits: Tensor


class Model(nn.Module):
    """Returns what `pack` makes of logits and a hidden value; exported where it has a loop."""

    def __init__(self, pack, *, has_loop=False):
        super().__init__()
        self.body, self.head, self.aux = nn.Linear(4, 4), nn.Linear(4, 3), nn.Linear(4, 2)
        self.pack, self.has_loop = pack, has_loop

    def forward(self, x):
        if self.has_loop:
            x = torch.stack(list(x.unbind(1)), dim=1)
        x = torch.tanh(self.body(x))
        return self.pack(self.head(x), self.aux(x))


PACKS = {
    "tensor": lambda logits, aux: logits,
    "dict": lambda logits, aux: {"aux": aux, "logits": logits},
    "segmentation": lambda logits, aux: {"out": logits, "aux": aux},
    "named tuple": lambda logits, aux: Pair(logits, aux),
    "dataclass": lambda logits, aux: Outputs(aux, logits),
}
REFUSED = {
    "tuple": lambda logits, aux: (logits, aux),
    "list": lambda logits, aux: [logits],
    "dict": lambda logits, aux: {"scores": logits, "aux": aux},
    "Odd": lambda logits, aux: Odd(logits, aux),
}


@pytest.mark.parametrize("name", PACKS)
def test_named_logits_are_what_a_plan_and_one_device_train(name):
    task = task_on(Model(PACKS[name]))
    captured = capture(task, 4, name)
    assert captured.graph.operators[-1].inputs == ["head"]
    assert captured.untrained <= {"aux.weight", "aux.bias"}
    x = torch.randn(4, 4)
    assert torch.equal(captured.module(x), logits_of(task.model(x)))
    task.sum_loss(task.model(x), torch.zeros(4, dtype=torch.int64)).backward()
    assert task.model.head.weight.grad is not None
    assert task.model.aux.weight.grad is None


@pytest.mark.parametrize("name", ["dict", "tensor"])
def test_outputs_of_an_exported_model_are_those_of_the_model(name):
    task = task_on(Model(PACKS[name], has_loop=True))
    captured = capture(task, 4, name)
    x = torch.randn(6, 4)
    assert torch.equal(captured.module(x), logits_of(task.model(x)))


@pytest.mark.parametrize("name", REFUSED)
def test_outputs_without_logits_are_refused_by_both(name):
    task = task_on(Model(REFUSED[name]))
    reason = (
        rf"the model returns an output of type {name}.*, and the loss takes one tensor: return that"
    )
    with pytest.raises(ModelError, match=reason):
        capture(task, 4, name)
    with pytest.raises(ModelError, match=reason):
        task.sum_loss(task.model(torch.ones(2, 4)), torch.zeros(2, dtype=torch.int64))


def test_logits_that_are_no_tensor_are_refused():
    with pytest.raises(ModelError, match="logits of type list"):
        logits_of({"logits": [1.0]})


def test_an_operator_that_gives_a_tuple_is_not_the_logits():
    recurrent = nn.Sequential(nn.LSTM(4, 3, batch_first=True))
    with pytest.raises(ModelError, match="returns an output of type tuple"):
        capture(task_on(recurrent, 2, 4), 4, "lstm")
