"""Operators element by element, and those that work in place."""

import operator

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from harness.domain.graph import Operator
from harness.domain.partition import blocks
from harness.runtime.executor.shards.base import ShardSpec, Wanted
from harness.runtime.executor.shards.inplace import copying_function, out_of_place
from harness.runtime.executor.shards.pointwise import ExactDropout, RandomState, make_dropout

SHAPE = {"sample": 4, "feature": 6, "height": 5, "width": 3}


def make(module, block, state, name="drop", shape=SHAPE):
    root = fx.symbolic_trace(nn.Sequential(module))
    node = next(n for n in root.graph.nodes if n.op == "call_module")
    op = Operator(name=name, kind="elementwise", inputs=["x"], shape=SHAPE)
    part = ShardSpec(
        operator=op, node=node, root=root, shape=shape, block=block, wanted=[Wanted(shape, block)]
    )
    return make_dropout(part, state)


def whole(shape=SHAPE):
    return tuple((0, n) for n in shape.values())


@pytest.mark.parametrize("module", [nn.Dropout(0.4), nn.Dropout2d(0.4)])
@pytest.mark.parametrize("cuts", [{"sample": 2, "feature": [1, 2]}, {"height": 3, "width": 2}])
def test_blocks_drop_what_the_whole_drops(module, cuts):
    state = RandomState(seed=3, step=7, microbatch=1)
    x = torch.rand(*SHAPE.values()) + 1
    expected = make(module, whole(), state)(x)
    for block in blocks(list(SHAPE), list(SHAPE.values()), cuts):
        at = tuple(slice(*interval) for interval in block)
        assert torch.equal(make(module, block, state)(x[at]), expected[at])


def test_masks_come_from_the_hosts_generator_whatever_the_device():
    x = torch.ones(4, 6, device="meta")
    dropout = ExactDropout(0.25, x.shape, ((0, 4), (0, 6)), operator="0", state=RandomState(0))
    assert dropout(x).device == x.device


def test_what_is_kept_is_scaled_and_its_gradient_too():
    x = torch.ones(1000, 20, requires_grad=True)
    dropout = ExactDropout(0.25, x.shape, ((0, 1000), (0, 20)), operator="0", state=RandomState(0))
    output = dropout(x)
    output.sum().backward()
    assert output.unique().tolist() == [0.0, pytest.approx(1 / 0.75)]
    assert torch.equal(x.grad, output)
    # 20000 draws: four standard deviations of the share are 0.012.
    assert (output == 0).double().mean() == pytest.approx(0.25, abs=0.012)


def test_computing_again_draws_the_same_and_moving_on_draws_anew():
    state = RandomState(seed=1)
    x = torch.ones(8, 6)

    def draw(operator="0"):
        shape = {"sample": 8, "feature": 6}
        return ExactDropout(0.5, shape.values(), whole(shape), operator=operator, state=state)(x)

    first = draw()
    torch.rand(5)
    assert torch.equal(draw(), first)
    masks = [first, draw("1")]
    state.microbatch = 1
    masks.append(draw())
    state.step, state.microbatch = 1, 0
    masks.append(draw())
    state.seed, state.step = 2, 0
    masks.append(draw())
    assert all(not torch.equal(a, b) for k, a in enumerate(masks) for b in masks[:k])


@pytest.mark.parametrize(
    ("function", "copying"),
    [
        (torch.ops.aten.relu_.default, torch.ops.aten.relu.default),
        (torch.ops.aten.add_.Tensor, torch.ops.aten.add.Tensor),
        (torch.ops.aten.pow_.Scalar, torch.ops.aten.pow.Tensor_Scalar),
        (torch.ops.aten.polygamma_.default, None),
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
    found = out_of_place(node, {}).target(given, *args)
    assert found.tolist() == wanted
    assert found.requires_grad
    assert given.tolist() == [[3, 3], [3, 3]]
