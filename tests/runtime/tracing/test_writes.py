"""Models whose operators change what others read, rewritten so that none does; buffers that a model
writes, passed on and written once, or refused.
"""

import copy

import pytest
import torch
from nets import graph_of, task_on
from torch import fx, nn

from harness.domain.strategy import OperatorPlan, Stage, Strategy, check_buffers
from harness.errors import ModelError, StrategyError
from harness.runtime.capture.capture import capture
from harness.runtime.executor.shards.inplace import COPIES
from harness.runtime.tracing.trace import trace
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
def test_the_values_are_those_of_the_model_also_where_each_operator_has_copies_of_its_own(function):
    module = traced(function)
    x = torch.randn(6, 8)
    wanted = copy.deepcopy(module)(x.clone())
    replace_in_place_writes(module, (x,))
    assert torch.allclose(module(x.clone()), wanted)
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


def test_a_constant_without_elements_may_be_an_argument():
    module = traced(lambda model, x: torch.atleast_1d(x, torch.empty([0]))[0] + 1)
    replace_in_place_writes(module, (torch.randn(6, 8),))


def test_a_tensor_without_elements_is_refused():
    module = traced(lambda model, x: x + x[:, 8:].sum())
    with pytest.raises(ModelError, match=r"getitem gives a tensor without elements, of shape"):
        replace_in_place_writes(module, (torch.randn(6, 8),))


class Writer(nn.Module):
    """Writes a buffer of a child, which is small beside it."""

    def __init__(self, write):
        super().__init__()
        self.first, self.child, self.last = nn.Linear(4, 4), nn.Linear(1, 1), nn.Linear(4, 3)
        self.child.register_buffer("seen", torch.ones(4))
        self.register_buffer("n_steps", torch.zeros(()))
        self.write = write

    def forward(self, x):
        x = self.first(x)
        self.write(self, x)
        return self.last(x * self.child.seen)


def assign(net, x):
    net.child.seen = net.child.seen + x.detach().mean(0)


def items(net, x):
    net.child.seen[:2] = x.detach().mean(0)[:2]


def zero(net, x):
    net.child.seen.zero_().add_(x.detach().mean(0))


@pytest.mark.parametrize("write", [assign, items, zero])
def test_a_written_buffer_is_passed_on_and_written_once(write):
    torch.manual_seed(0)
    model, twin = Writer(write), Writer(write)
    twin.load_state_dict(model.state_dict())
    traced = trace(twin, (torch.ones(5, 4),))
    assert torch.equal(twin.child.seen, torch.ones(4))
    for seed in (1, 2):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        assert torch.equal(model(x), traced(x))
        assert torch.equal(model.child.seen, traced.child.seen)


def count(net, x):
    net.n_steps += 1


def test_a_buffer_that_depends_on_nothing_is_counted_by_the_graph():
    model = Writer(count)
    traced = trace(model, (torch.ones(5, 4),))
    assert traced.n_steps == 0
    traced(torch.ones(5, 4))
    traced(torch.ones(5, 4))
    assert traced.n_steps == 2


def part(net, x):
    net.child.seen[:2].add_(1)


def weight(net, x):
    net.first.weight.data.clamp_(-1, 1)


@pytest.mark.parametrize(
    ("write", "reason"),
    [
        (part, "changes a view of the buffer 'child.seen' in place"),
        (weight, "changes the data of first_weight in place"),
        (lambda net, x: setattr(net.first, "weight", x), "assigns 'first.weight'"),
    ],
)
def test_writes_that_no_graph_can_keep_are_refused(write, reason):
    with pytest.raises(ModelError, match=reason):
        trace(Writer(write), (torch.ones(2, 4),))


class Running(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x):
        self.mean = self.mean.lerp(x.detach().mean(0), 0.1)
        return x - self.mean


class CalledTwice(nn.Module):
    """Exported, because torch.fx cannot follow a branch that reads a size."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

    def forward(self, x):
        if x.shape[0] == 0:
            x = 2 * x
        return self.last(self.norm(self.norm(self.first(x))))


def test_every_write_of_an_exported_buffer_is_known():
    graph = capture(task_on(CalledTwice()), 4, "twice").graph
    names = [op.name for op in graph.operators if op.attrs.get("writes_buffers")]
    assert len(names) == 2
    with pytest.raises(StrategyError, match=r"forward writes the buffer 'norm\.num"):
        check_buffers(strategy_of(graph, {names[1]: 1}), graph)


def strategy_of(graph, devices, **changes):
    plans = {
        op.name: OperatorPlan({}, [devices.get(op.name, 0)])
        for op in graph.operators
        if op.kind != "input"
    }
    return Strategy(name="own", batch=4, operators=plans, **changes)


def test_a_small_module_that_writes_a_buffer_is_kept_whole():
    graph = graph_of(lambda net, x: net.norm(x), norm=Running())
    norm = next(op for op in graph.operators if op.name == "norm")
    assert norm.attrs["writes_buffers"] == ["norm.mean"]
    check_buffers(strategy_of(graph, {}), graph)
    with pytest.raises(StrategyError, match=r"'norm' writes the buffer .*its recompute"):
        check_buffers(strategy_of(graph, {}, stages=[Stage(recompute=True)]), graph)


def test_a_buffer_is_written_where_it_is_read():
    graph = capture(task_on(Writer(assign)), 4, "w").graph
    check_buffers(strategy_of(graph, {}), graph)
    with pytest.raises(StrategyError, match=r"'child.seen', which operator 'read_child_seen' has"):
        check_buffers(strategy_of(graph, {"write_child_seen": 1}), graph)


class Clipping(nn.Module):
    """A weight that each forward clips, beside a branch that torch.fx cannot follow."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        self.layer.weight.data.clamp_(-100, 100)
        return self.layer(x) if x.shape[0] > 0 else x


def test_a_parameter_that_an_exported_forward_changes_is_refused():
    with pytest.raises(
        ModelError, match=r"changes the parameter '.*layer\.weight' in place \(clamp_"
    ):
        capture(task_on(Clipping()), 6, "clipping")


class Reading(Clipping):
    def forward(self, x):
        return self.layer(x) * self.layer.weight.data.sum() if x.shape[0] > 0 else x


def test_an_exported_forward_reads_the_data_of_a_parameter_in_every_step():
    model, x = Reading(), torch.rand(6, 4)
    module = trace(model, (x,))
    for each in (model, module):
        nn.init.constant_(each.get_parameter("layer.weight"), 0.5)
    torch.testing.assert_close(module(x), model(x))
