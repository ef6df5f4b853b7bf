import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from harness.errors import ModelError
from harness.runtime.executor.inplace import check_in_place, copying_function, out_of_place


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


def test_an_exported_operator_that_works_in_place_is_seen():
    graph, aten = fx.Graph(), torch.ops.aten
    doubled = graph.call_function(aten.mul.Tensor, (graph.placeholder("x"), 2))
    changed = graph.call_function(aten.relu_.default, (doubled,))
    graph.output(graph.call_function(aten.add.Tensor, (doubled, changed)))
    module = fx.GraphModule(nn.Module(), graph)
    with pytest.raises(ModelError, match=r"relu__default changes mul_tensor in place, and add_"):
        check_in_place(module, set(graph.nodes))


@pytest.mark.parametrize(
    ("function", "copying"),
    [
        (torch.ops.aten.relu_.default, torch.ops.aten.relu.default),
        (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor),
        (torch.ops.aten.add.Tensor, torch.ops.aten.add.Tensor),
        # Its running statistics change, its input does not.
        (torch.ops.aten._native_batch_norm_legit.default,) * 2,
        (operator.ipow, operator.pow),
        (operator.add, operator.add),
        (torch.relu_, torch.relu),
        (F.hardtanh_, F.hardtanh),
        (torch.relu, torch.relu),
    ],
    ids=str,
)
def test_a_function_is_known_by_what_it_changes(function, copying):
    assert copying_function(function) is copying


def test_what_has_no_function_out_of_place_is_refused():
    graph = fx.Graph()
    function = torch.ops.aten.fill_diagonal_.default
    node = graph.call_function(function, (graph.placeholder("x"), 1.0))
    with pytest.raises(ModelError, match=r"\(fill_diagonal_\) changes what others read"):
        out_of_place(graph, node, {})
