import pytest
import torch
from torch import fx, nn

from harness.errors import ModelError
from harness.runtime.executor.inplace import check_in_place


class ReadsAgain(nn.Module):
    def forward(self, x):
        y = x * 2
        z = torch.relu_(y)
        return y + z


class GoesOn(nn.Module):
    def __init__(self):
        super().__init__()
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x):
        y = x * 2
        shape = y.shape
        return self.relu(y).reshape(shape)


def check(model):
    traced = fx.symbolic_trace(model)
    names = {"x", "mul", "relu_", "relu", "add", "reshape"}
    check_in_place(traced, {node for node in traced.graph.nodes if node.name in names})


def test_a_value_that_is_read_after_it_was_changed_in_place_is_refused():
    with pytest.raises(ModelError, match=r"relu_ changes mul in place, and add reads"):
        check(ReadsAgain())


def test_working_in_place_on_what_nobody_reads_again_is_fine():
    check(GoesOn())
