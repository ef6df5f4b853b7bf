"""Traced models whose operators change what others read, rewritten so that none does."""

import copy

import pytest
import torch
from torch import fx, nn

from harness.errors import ModelError
from harness.runtime.executor.shards.inplace import COPIES
from harness.runtime.tracing.tracer import ModelTracer
from harness.runtime.tracing.writes import replace_in_place_writes


def traced(function, *modules):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.relu, self.norm = nn.ReLU(inplace=True), nn.BatchNorm1d(8)

        def forward(self, x):
            return function(self, x)

    model = Model()
    return fx.GraphModule(model, ModelTracer((), (), 1).trace(model))


def chained(model, x):
    y = model.norm(x)
    y += x
    return model.relu(y)


def read_again(model, x):
    y = x * 2
    z = torch.relu_(y)
    return y + z


def view_changed(model, x):
    y = x * 2
    v = y.view(-1, 2, 4)
    v.transpose(1, 2).add_(1)
    return y.sum(1, keepdim=True) + v.flatten(1)


def base_changed(model, x):
    y = x * 2
    v = y.t()
    y.mul_(3)
    return v.t() + 1


def module_on_a_view(model, x):
    y = x * 2
    first = y.sigmoid()
    return model.relu(y.view(-1, 8)) + first


def several_times(model, x):
    y = x * 1
    y[:, 0].fill_(5)
    y[:, 1:3].copy_(y[:, 5:7])
    y[:, 3].zero_()
    y.clamp_(max=2)
    return y.exp_() + y


def items_changed(model, x):
    y = x * 1
    v, turned = y[:, 2], y.movedim(0, 1)
    y[:, 1:3] = 5
    y[:, 2] *= 2
    turned[3] = 7
    return y + v.unsqueeze(1)


def out_of(model, x):
    y = torch.empty_like(x)
    torch.mul(x, 2, out=y)
    return y + x


FUNCTIONS = (
    chained, read_again, view_changed, base_changed, module_on_a_view, several_times, items_changed,
    out_of,
)  # fmt: skip


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_values_are_those_of_the_model(function):
    module = traced(function)
    x = torch.randn(6, 8)
    wanted = copy.deepcopy(module)(x.clone())
    replace_in_place_writes(module, (x,))
    assert torch.allclose(module(x.clone()), wanted)


def run_on_copies(module, x):
    """Run each node on copies of what it reads, as another device would."""
    alone = copy.deepcopy(module)

    class Copying(fx.Interpreter):
        def run_node(self, n):
            args, kwargs = self.fetch_args_kwargs_from_env(n)
            args, kwargs = fx.node.map_aggregate(
                (args, kwargs), lambda a: a.clone() if isinstance(a, torch.Tensor) else a
            )
            return getattr(self, n.op)(n.target, args, kwargs)

    return Copying(alone).run(x)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_operators_may_run_anywhere_once_each_has_copies_of_its_own(function):
    module = traced(function)
    x = torch.randn(6, 8)
    wanted = copy.deepcopy(module)(x.clone())
    replace_in_place_writes(module, (x,))
    assert torch.allclose(run_on_copies(module, x.clone()), wanted)


def test_what_works_in_place_on_its_own_goes_on_doing_so():
    module = traced(chained)
    before = str(module.graph)
    replace_in_place_writes(module, (torch.randn(6, 8),))
    assert str(module.graph) == before
    assert not any(COPIES in node.meta for node in module.graph.nodes)


def test_a_module_that_shares_memory_with_others_is_to_work_on_a_copy():
    module = traced(module_on_a_view)
    replace_in_place_writes(module, (torch.randn(6, 8),))
    (relu,) = module.graph.find_nodes(op="call_module", target="relu")
    assert relu.meta[COPIES]


@fx.wrap
def scribble(x):
    x.mul_(2)
    return torch.zeros(())


def test_a_function_that_changes_its_input_unsaid_is_refused():
    def function(model, x):
        y = x * 2
        scribble(y)
        return y + 1

    module = traced(function)
    with pytest.raises(ModelError, match=r"scribble \(scribble\) changes mul in place, which othe"):
        replace_in_place_writes(module, (torch.randn(6, 8),))


def test_tensors_of_a_tuple_are_handed_on_one_by_one():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.LSTM(4, 4), nn.LSTM(4, 4)

        def forward(self, x):
            steps, state = self.one(x)
            steps, state = self.two(steps, state)
            return torch.cat(steps.split(1)) + torch.stack(state).sum()

    module = fx.symbolic_trace(Model())
    x = torch.randn(3, 5, 4)
    wanted = module(x)
    replace_in_place_writes(module, (x,))
    assert torch.equal(module(x), wanted)
    values = {}

    class Run(fx.Interpreter):
        def run_node(self, n):
            values[n] = super().run_node(n)
            return values[n]

    Run(module).run(x)
    for node in module.graph.nodes:
        if "getitem" not in node.name and node.op != "output":
            assert all(isinstance(values[n], torch.Tensor) for n in node.all_input_nodes)


def test_writes_of_no_elements_are_left_out():
    def forward(model, x):
        y = x * 1
        y[:, 8:] = x[:, 8:]
        torch.ops.aten.copy_.default(y[:, 9:], x[:, 9:])
        return y + 1

    module = traced(forward)
    replace_in_place_writes(module, (torch.randn(6, 8),))
    assert [n.name for n in module.graph.nodes] == ["x", "mul", "add", "output"]


def test_a_tensor_without_elements_is_refused():
    module = traced(lambda model, x: x + x[:, 8:].sum())
    with pytest.raises(ModelError, match=r"getitem gives a tensor without elements, of shape"):
        replace_in_place_writes(module, (torch.randn(6, 8),))
