"""A traced graph keeps what a model says beside its operators, or says what it cannot keep.

A draw while a model is traced would be kept for ever, so it is refused.
"""

import random

import numpy as np
import pytest
import torch
from nets import Net, Scaled, by_closure, hooked, task_on, users_task
from torch import nn
from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
from torch.utils.checkpoint import checkpoint

from harness.errors import ModelError
from harness.runtime.capture.capture import capture
from harness.runtime.tracing import tracer
from harness.runtime.tracing.kept_calls import Vmap
from harness.runtime.tracing.trace import trace


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, grad):
        return 3 * grad


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


def data(net, x):
    return x * x.data + x.detach()


def in_place_function(net, x):
    return Doubled.apply(x * 1) + 1


def double(net, x):
    return checkpoint(torch.tanh, x, use_reentrant=False) + checkpoint(
        lambda a, b: a * b, x, x, use_reentrant=True
    )


def function_behind_control_flow(net, x):
    return Scaled.apply(torch.stack(list(x.unbind(1)), dim=1), lambda grad: 2 * grad)


def cast_of_nothing_without_gradients(net, x):
    x = torch.stack(list(x.unbind(1)), dim=1)
    with torch.no_grad():
        scale = x.to(x.dtype).mean(1, keepdim=True)
    return x * scale


@pytest.mark.parametrize(
    "middle",
    [
        no_grad_tuple, grad_mode_that_is_left_on, hooked, data, by_closure,
        in_place_function, double, function_behind_control_flow,
        cast_of_nothing_without_gradients,
    ],
)  # fmt: skip
def test_gradients_are_the_models_own(middle):
    assert_same_gradients(middle)


class Rows(nn.Module):
    """Kept whole, because it loops over samples; its outputs have names."""

    def forward(self, x):
        return {"sums": x.sum(1), "logits": torch.stack([x[k] * 2 for k in range(x.shape[0])])}


@pytest.mark.parametrize(
    "middle",
    [lambda net, x: net.rows(x)["logits"], lambda net, x: net.rows(x)["sums"][:, None] + x],
)
def test_a_module_that_is_kept_whole_may_name_its_outputs(middle):
    assert_same_gradients(middle, lambda middle: Net(middle, rows=Rows()))


def test_a_model_may_return_the_named_outputs_of_a_module_that_is_kept_whole():
    model, x = nn.Sequential(nn.Linear(4, 4), Rows()), torch.randn(5, 4)
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


def frozen_within(net, x):
    net.last.requires_grad_(False)
    y = net.last(x)
    net.last.requires_grad_(True)
    return y


def frozen_by_setting(net, x):
    net.first.weight.requires_grad = False
    return x


@pytest.mark.parametrize(
    ("middle", "reason"),
    [
        (frozen_within, "sets requires_grad of 'last.weight' to False: set it where the model is"),
        (frozen_by_setting, "sets requires_grad of 'first.weight' to False: set it where"),
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
    captured = capture(task_on(Named()), 4, "named")
    names = [op.name for op in captured.graph.operators]
    assert len(set(names)) == len(names)
    assert "loss" not in {node.name for node in captured.module.graph.nodes}
    assert captured.graph.operators[-1].name == "loss"


class Autoencoder(nn.Module):
    """Its loss is a module's, as in most programs."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 2), nn.Linear(2, 4)
        self.criterion = nn.MSELoss()

    def forward(self, x):
        found = self.outer(self.inner(x))
        return {"loss": self.criterion(found, x), "found": found}


def test_the_module_of_a_loss_that_is_computed_of_the_outputs_is_no_operator():
    task = users_task(Autoencoder(), {"x": torch.rand(2, 4)})
    operators = capture(task, 4, "autoencoder").graph.operators
    assert [op.name for op in operators[1:]] == ["model.inner", "model.outer", "loss"]
    assert not any(op.attrs.get("mixes_samples") for op in operators)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.shared, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        with torch.no_grad():
            x = self.shared(self.first(x))
        return self.last(self.shared(x))


def test_parameters_without_a_gradient_are_found():
    captured = capture(task_on(Encoder()), 4, "encoder")
    assert captured.untrained == {"first.weight", "first.bias"}
    flops = {op.name: op.backward_flops for op in captured.graph.operators}
    assert flops["first"] == 0
    assert flops["last"] > 0


class Optional(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(4, 3)

    def forward(self, x, targets=None, sizes=(2, 3), *, scale=2.0):
        assert targets is None
        return {"logits": self.head(x) * scale * sizes[1], "x": x}


def test_arguments_that_are_not_fed_keep_their_defaults():
    operators = capture(task_on(Optional()), 4, "o").graph.operators
    assert [op.name for op in operators if op.kind == "input"] == ["x"]


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


X = torch.zeros(4, 6)


class Drawing(nn.Module):
    def __init__(self, draw, is_exported):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.draw, self.is_exported = draw, is_exported

    def forward(self, x):
        if self.is_exported and x.sum(1).shape[0] < 0:
            return x
        for layer in self.layers:
            x = self.draw(x, layer)
        return x


def by_torch(x, layer):
    return x if torch.rand(()).item() < 0.5 else layer(x)


def by_python(x, layer):
    return x if random.random() < 0.5 else layer(x)


def by_numpy(x, layer):
    return x if np.random.rand() < 0.5 else layer(x)


def fixed_noise(x, layer):
    return layer(x + torch.randn(6))


@pytest.mark.parametrize(
    ("draw", "by", "is_exported"),
    [
        (by_torch, "torch", False), (by_python, "Python's random", False),
        (by_numpy, "numpy.random", False), (fixed_noise, "torch", False),
        (by_python, "Python's random", True),
    ],
)  # fmt: skip
def test_layers_left_out_at_random_are_refused(draw, by, is_exported):
    with pytest.raises(ModelError, match=rf"Drawing cannot be captured: forward draws .* \({by}\)"):
        trace(Drawing(draw, is_exported), (X,))


def by_vmap(x, layer):
    codes = (x > 0).long()
    with TransformGetItemToIndex():
        x = x + torch.vmap(lambda k: codes[0, k])(torch.arange(6))
    one, two = torch.vmap(lambda row: (layer(row), torch.vmap(torch.sin)(row)))(x)
    return one * two


def test_a_vmap_is_one_operator():
    net = Drawing(by_vmap, is_exported=True)
    module = trace(net, (X,))
    found = [node for node in module.graph.nodes if isinstance(node.target, Vmap)]
    assert len(found) == 6
    assert not any("spec" in x.name for x in found[0].args)  # constants that are no tensors
    x = torch.randn(4, 6)
    assert torch.equal(module(x), net(x))
    with pytest.raises(IndexError):
        module(torch.randn(4, 5))
    assert torch.equal(module(x), net(x))


def test_a_check_of_values_is_left_out():
    def checked(x, layer):
        torch._check_tensor_all(x.sum() < 0)
        return layer(x)

    assert trace(Drawing(checked, is_exported=True), (X,))(X).shape == X.shape


def test_noise_of_the_inputs_shape_is_drawn_in_every_step():
    module = trace(
        Drawing(lambda x, layer: layer(x + torch.randn_like(x)), is_exported=False), (X,)
    )
    assert not torch.equal(module(X), module(X))


def of_a_mask_of_its_own(x, layer):
    mask = None if torch.compiler.is_compiling() else torch.arange(6) < 4
    return layer(x * mask.to(x.dtype))


def test_a_model_that_asks_whether_it_is_compiled_is_captured_as_it_runs():
    net = Drawing(of_a_mask_of_its_own, is_exported=True)
    module = trace(net, (X,))
    x = torch.randn(4, 6)
    assert torch.equal(module(x), net(x))


def test_an_operator_without_a_line_of_user_code_has_no_stack_trace_rather_than_none(monkeypatch):
    """torch.compile joins the stack traces of a graph, and fails on None."""
    monkeypatch.setattr(tracer, "users_frame", lambda: None)
    traced = trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), (torch.rand(2, 4),))
    assert not any("stack_trace" in node.meta for node in traced.graph.nodes)
