"""A traced graph keeps what a model says beside its operators, or says what it cannot keep."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from harness.domain.strategy import OperatorPlan, Stage, Strategy, check_buffers
from harness.errors import ModelError, StrategyError
from harness.plan.builders import pipeline
from harness.runtime.capture.capture import capture
from harness.runtime.models import InputSpec, Task
from harness.runtime.tracing.trace import trace


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor(grad), None


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(4, 4), nn.Linear(4, 3), middle

    def forward(self, x):
        return self.last(self.middle(self, self.first(x)))


def assert_same_gradients(middle, kind=Net):
    torch.manual_seed(0)
    model = kind(middle).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    traced = trace(model, (x,))
    assert isinstance(traced, torch.fx.GraphModule)
    found = []
    for each in (model, traced):
        torch.manual_seed(1)
        model.zero_grad()
        output = each(x)
        output.square().sum().backward()
        gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        found.append((output.detach(), gradients))
    (wanted, wanted_gradients), (own, gradients) = found
    assert torch.equal(own, wanted)
    assert gradients.keys() == wanted_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradient, wanted_gradients[name], rtol=1e-12, atol=0)


def no_grad_tuple(net, x):
    with torch.no_grad():
        a, b = x.chunk(2, dim=1)
        n = x.size(0)
    return x + torch.cat([b, a], dim=1).reshape(n, -1)


def grad_mode_that_is_left_on(net, x):
    torch.set_grad_enabled(False)
    y = net.first(x)
    torch.set_grad_enabled(True)
    return x * y


def hooked(net, x):
    y = torch.tanh(x)
    a = y * 2
    if y.requires_grad:
        y.register_hook(lambda grad: grad * 3)
    y.retain_grad()
    handle = y.register_hook(lambda grad: grad + 100)
    y.register_hook(lambda grad: None)
    handle.remove()
    y.register_hook(lambda grad: grad + 1)
    return a + y.sin()


def data(net, x):
    return x * x.data + x.detach()


def by_closure(net, x):
    return Scaled.apply(x, lambda grad: 2 * grad)


def in_place_function(net, x):
    return Doubled.apply(x * 1) + 1


def double(net, x):
    return checkpoint(torch.tanh, x, use_reentrant=False) + checkpoint(
        lambda a, b: a * b, x, x, use_reentrant=True
    )


def function_behind_control_flow(net, x):
    return Scaled.apply(torch.stack(list(x.unbind(1)), dim=1), lambda grad: 2 * grad)


@pytest.mark.parametrize(
    "middle",
    [
        no_grad_tuple, grad_mode_that_is_left_on, hooked, data, by_closure,
        in_place_function, double, function_behind_control_flow,
    ],
)  # fmt: skip
def test_gradients_are_the_models_own(middle):
    assert_same_gradients(middle)


class Rows(nn.Module):
    """Kept whole, because it loops over samples; its outputs have names."""

    def forward(self, x):
        return {"sums": x.sum(1), "logits": torch.stack([x[k] * 2 for k in range(x.shape[0])])}


class WithRows(Net):
    def __init__(self, middle):
        super().__init__(middle)
        self.rows = Rows()


@pytest.mark.parametrize(
    "middle",
    [lambda net, x: net.rows(x)["logits"], lambda net, x: net.rows(x)["sums"][:, None] + x],
)
def test_a_module_that_is_kept_whole_may_name_its_outputs(middle):
    assert_same_gradients(middle, WithRows)


class Wrapped(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.rows = nn.Linear(4, 4), Rows()

    def forward(self, x):
        return self.rows(self.first(x))


def test_a_model_may_return_the_named_outputs_of_a_module_that_is_kept_whole():
    model, x = Wrapped(), torch.randn(5, 4)
    assert torch.equal(trace(model, (x,))(x), model(x)["logits"])


def registered_in_forward(net, x):
    net.first.weight.register_hook(lambda grad: grad)
    return x


def in_place_data(net, x):
    y = torch.tanh(x)
    y.data.mul_(2)
    return y


def in_place_without_gradients(net, x):
    y = torch.tanh(x)
    with torch.no_grad():
        y.mul_(2)
    return y


def function_of_a_module(net, x):
    return Scaled.apply(x, net.first)


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (registered_in_forward, "register_hook on 'first.weight', which adds a hook in every step"),
        (in_place_data, "changes the data of tanh in place"),
        (in_place_without_gradients, "changes tanh in place under no_grad"),
        (function_of_a_module, "autograd function Scaled is given a module"),
    ],
)
def test_what_would_be_lost_is_refused_by_name(middle, reason):
    with pytest.raises(ModelError, match=reason) as found:
        trace(Net(middle), (torch.ones(2, 4),))
    assert "\n" not in str(found.value)
    assert "--engine torch" in str(found.value)


def test_autograd_functions_are_themselves_again_after_tracing():
    trace(Net(by_closure), (torch.ones(2, 4),))
    x = torch.ones(2, requires_grad=True)
    Scaled.apply(x, lambda grad: 5 * grad).sum().backward()
    assert x.grad.tolist() == [5, 5]


def graph_of(middle, batch=4):
    task = Task(model=Net(middle), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=3)
    return capture(task, batch, "net").graph


class Flipped(torch.autograd.Function):
    """The gradient of a sample is that of another."""

    @staticmethod
    def forward(ctx, x):
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return grad.flip(0)


def counted(net, x):
    calls = []
    x.register_hook(lambda grad: calls.append(1) or grad * len(calls))
    return x


@pytest.mark.parametrize(
    ("middle", "name", "is_mixing"),
    [
        (by_closure, "scaled", False),
        (lambda net, x: Flipped.apply(x), "flipped", True),
        (hooked, "register_hook", False),
        (lambda net, x: x.register_hook(lambda g: g / g.norm()) and x, "register_hook", True),
        (counted, "register_hook", True),
    ],
)
def test_what_mixes_samples_is_found_out(middle, name, is_mixing):
    (operator,) = (op for op in graph_of(middle).operators if op.name == name)
    assert operator.attrs.get("mixes_samples", False) == is_mixing
    assert operator.attrs.get("is_cut_by_samples", True) != is_mixing


def test_what_mixes_samples_refuses_microbatches():
    graph = graph_of(lambda net, x: Flipped.apply(x))
    names = [op.name for op in graph.operators if op.kind != "input"]
    strategy = pipeline(graph, 4, [names[:2], names[2:]], [[0], [1]], n_microbatches=2)
    from harness.domain.strategy import check_microbatches

    with pytest.raises(StrategyError, match=r"'flipped' \(Flipped\) needs all samples .* 2 micro"):
        check_microbatches(strategy, graph)


def autocast(net, x):
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = net.first(x)
        y = torch.softmax(y @ net.last.weight.t() @ net.last.weight, dim=1) * net.first(y).tanh()
        with torch.autocast("cpu", enabled=False):
            y = net.first(y.float())
        a, b = y.exp().chunk(2, dim=1)
    return torch.cat([b, a], dim=1).float() + x


def autocast_off_on_its_device(net, x):
    """As the rotary embeddings of language models do."""
    with torch.autocast(device_type=x.device.type, enabled=False):
        return net.first(x.float()).sin()


def autocast_in_a_loop(net, x):
    x = torch.stack([2 * column for column in x.unbind(1)], dim=1)
    return autocast(net, x)


@pytest.mark.parametrize("middle", [autocast, autocast_in_a_loop, autocast_off_on_its_device])
@pytest.mark.parametrize("dtype", [None, torch.bfloat16])  # of the rest of the model
def test_a_part_under_autocast_computes_in_its_own_dtypes(middle, dtype):
    torch.manual_seed(0)
    model, x = Net(middle), torch.randn(6, 4)
    captured = capture(Task(model=model, inputs=(InputSpec(name="x", shape=(4,)),)), 6, "net")

    def gradients_of(each):
        each.zero_grad()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            each(x).float().square().sum().backward()
        return {name: each.get_parameter(name).grad.clone() for name, _ in model.named_parameters()}

    wanted, found = gradients_of(model), gradients_of(captured.module)
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_dtypes_under_autocast_are_known_before_anything_is_computed():
    task = Task(model=Net(autocast), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=3)
    captured = capture(task, 4, "net")
    graph = captured.graph
    known = {op.name: op.dtype for op in graph.operators}
    run = torch.fx.Interpreter(captured.module, garbage_collect_values=False)
    run.run(torch.randn(4, 4))
    real = {name: run.env[node] for name, node in captured.nodes.items()}
    dtypes = {n: str(x.dtype).split(".")[1] for n, x in real.items() if isinstance(x, torch.Tensor)}
    assert dtypes == {name: known[name] for name in dtypes}
    assert {"bfloat16", "float32"} <= set(dtypes.values())
    regions = {op.name: op.attrs.get("autocast") for op in graph.operators}
    assert regions["first_autocast_off"] == "off"
    (mixing,) = {op.attrs.get("mixes_samples", False) for op in graph.operators}
    assert not mixing


class Relu(torch.autograd.Function):
    """Named as an operator that can be cut in any way, which it cannot."""

    @staticmethod
    def forward(ctx, x):
        return x - x.mean(1, keepdim=True)

    @staticmethod
    def backward(ctx, grad):
        return grad - grad.mean(1, keepdim=True)


@pytest.mark.parametrize("name", ["relu", "dropout", "view", "add"])
def test_a_function_of_a_users_is_what_it_does_whatever_its_name(name):
    own = type(name, (Relu,), {})
    (operator,) = (
        op for op in graph_of(lambda net, x: own.apply(x)).operators if op.name not in
        ("x", "first", "last", "loss")
    )  # fmt: skip
    assert operator.kind == "other"
    assert operator.attrs["is_repeatable"] is False


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


class WithRunning(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), Running(), nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.norm(self.first(x)))


def strategy_of(graph, devices, **changes):
    plans = {
        op.name: OperatorPlan({}, [devices.get(op.name, 0)])
        for op in graph.operators
        if op.kind != "input"
    }
    return Strategy(name="own", batch=4, operators=plans, **changes)


def test_a_small_module_that_writes_a_buffer_is_kept_whole():
    graph = capture(
        Task(model=WithRunning(), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=3), 4, "r"
    ).graph
    norm = next(op for op in graph.operators if op.name == "norm")
    assert norm.attrs["writes_buffers"] == ["norm.mean"]
    check_buffers(strategy_of(graph, {}), graph)
    with pytest.raises(StrategyError, match=r"'norm' writes the buffer .*its recompute"):
        check_buffers(strategy_of(graph, {}, stages=[Stage(recompute=True)]), graph)


def test_a_buffer_is_written_where_it_is_read():
    task = Task(model=Writer(assign), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=3)
    graph = capture(task, 4, "w").graph
    check_buffers(strategy_of(graph, {}), graph)
    with pytest.raises(StrategyError, match=r"'child.seen', which operator 'read_child_seen' has"):
        check_buffers(strategy_of(graph, {"write_child_seen": 1}), graph)


class Named(nn.Module):
    """Modules named as the harness names operators, and as torch.fx names nodes."""

    def __init__(self):
        super().__init__()
        self.loss, self.t, self.t_1 = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.x = nn.Linear(4, 4)

    def forward(self, x):
        x = self.x(self.loss(x).t().t())
        return self.t_1(self.t(x))


def test_operators_have_names_of_their_own():
    task = Task(model=Named(), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=3)
    captured = capture(task, 4, "named")
    names = [op.name for op in captured.graph.operators]
    assert len(set(names)) == len(names)
    assert "loss" not in {node.name for node in captured.module.graph.nodes}
    assert captured.graph.operators[-1].name == "loss"


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            x = self.shared(self.first(x))
        return self.last(self.shared(x))


def test_parameters_without_a_gradient_are_found():
    task = Task(model=Encoder(), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=3)
    captured = capture(task, 4, "encoder")
    assert captured.untrained == {"first.weight", "first.bias"}
    flops = {op.name: op.backward_flops for op in captured.graph.operators}
    assert flops["first"] == 0
    assert flops["last"] > 0


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x, targets=None, *, scale=2.0):
        assert targets is None
        return self.head(x) * scale


def test_arguments_that_are_not_fed_keep_their_defaults():
    task = Task(model=Optional(), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=3)
    assert [op.name for op in capture(task, 4, "o").graph.operators if op.kind == "input"] == ["x"]


class Multiplied(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * factor

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


class UnlikeAlone(Multiplied):
    """Another function of one sample than of several."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor if len(x) > 1 else 1
        return x * ctx.factor


class SignedWeight(torch.autograd.Function):
    """A weight's gradient that does not add up over samples."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(weight)
        return x * weight

    @staticmethod
    def backward(ctx, grad):
        (weight,) = ctx.saved_tensors
        return grad * weight, weight.sign()


class Logarithm(torch.autograd.Function):
    """NaN of random values, whatever they are divided by."""

    @staticmethod
    def forward(ctx, x):
        return (x / x.abs().mean() - 9).log()

    @staticmethod
    def backward(ctx, grad):
        return grad


@pytest.mark.parametrize(
    ("middle", "is_mixing"),
    [
        (lambda net, x: Multiplied.apply(x, x.shape[1]), False),
        (lambda net, x: Multiplied.apply(x, x.shape[0]), True),
        (lambda net, x: UnlikeAlone.apply(x, 2), True),
        (lambda net, x: SignedWeight.apply(x, net.last.bias[0]), True),
        (lambda net, x: Logarithm.apply(x), True),
    ],
)
def test_a_users_function_keeps_samples_apart_for_any_number_of_them(middle, is_mixing):
    (operator,) = (
        op for op in graph_of(middle).operators if op.attrs.get("is_repeatable") is False
    )
    assert operator.attrs.get("mixes_samples", False) == is_mixing


class Attending(nn.Module):
    """PyTorch's attention and decoder under masks that forward makes."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(6, 3, batch_first=True)
        layer = nn.TransformerDecoderLayer(6, 3, 8, dropout=0.0, batch_first=True)
        self.decode = nn.TransformerDecoder(layer, 1)
        self.last = nn.Linear(6, 3)

    def forward(self, x):
        mask = torch.full((x.size(1), x.size(1)), float("-inf"), device=x.device).triu(1)
        y, _ = self.attend(x, x, x, attn_mask=mask.to(x.dtype), key_padding_mask=x[..., 0] > 2)
        return self.last(self.decode(y, x, tgt_mask=mask))


def test_attentions_under_masks_mix_no_samples():
    spec = InputSpec(name="x", shape=(5, 6))
    task = Task(model=Attending(), inputs=(spec,), n_classes=3, target_shape=(5,))
    operators = capture(task, 4, "attending").graph.operators
    assert len(operators) > 30
    assert not [op.name for op in operators if op.attrs.get("mixes_samples")]


@pytest.mark.parametrize(
    "read",
    [
        lambda model: sum(p.square().sum() for p in model.parameters()),
        lambda model: sum(p.norm() for name, p in model.named_parameters() if "bias" not in name),
        lambda model: (next(model.parameters()).T @ model.first.weight).sum(),
        lambda model: nn.utils.parameters_to_vector(model.last.parameters()).abs().mean(),
        lambda model: torch.stack([p.mean() for p in model.parameters()]).sum(),
    ],
)
def test_operators_on_parameters_have_their_gradients(read):
    assert_same_gradients(lambda model, x: x * read(model))


def test_facts_about_parameters_are_constants():
    def middle(model, x):
        weight = next(model.parameters())
        assert weight.dtype.is_floating_point
        assert weight.requires_grad
        return x.to(weight.dtype).to(weight.device) * (weight.shape[0] / weight.numel())

    assert_same_gradients(middle)
