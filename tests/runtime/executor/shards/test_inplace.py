import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from harness.runtime.executor.shards.inplace import copying_function, out_of_place


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
    ids=lambda function: getattr(function, "__name__", str(function)),
)
def test_a_function_is_known_by_what_it_changes(function, copying):
    assert copying_function(function) is copying


@pytest.mark.parametrize(
    ("op", "target", "args", "wanted"),
    [
        ("call_function", torch.ops.aten.fill_diagonal_.default, (1.0,), [[1, 3], [3, 1]]),
        ("call_method", "fill_", (2.0,), [[2, 2], [2, 2]]),
        ("call_method", "add_", (2.0,), [[5, 5], [5, 5]]),
        ("call_function", operator.setitem, (0, 7.0), [[7, 7], [3, 3]]),
        ("call_function", torch.relu_, (), [[3, 3], [3, 3]]),
    ],
)
def test_an_operator_out_of_place_leaves_its_argument_as_it_is(op, target, args, wanted):
    graph = fx.Graph()
    node = graph.create_node(op, target, (graph.placeholder("x"), *args))
    given = torch.full((2, 2), 3.0, requires_grad=True)
    found = out_of_place(graph, node, {}).target(given, *args)
    assert found.tolist() == wanted
    assert found.requires_grad
    assert given.tolist() == [[3, 3], [3, 3]]
