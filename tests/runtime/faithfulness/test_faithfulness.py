"""A graph that trains something else than its model is refused, by the operator and the cause.

Each lie is captured of a model without the construct that the truth has, so that these tests do not
depend on what the tracer keeps.
"""

import copy
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from equivalence_models import small_task
from nets import held, users_task
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo import ZOO
from zoo.base import WIDTH, Net
from zoo.contexts import Autocast, NoGradBranch, PlainTensorHook, ReverseFunction
from zoo.states import AttributeCounted, BufferAdded, OwnNorm, PythonLayerDrop

from harness.errors import ModelError
from harness.runtime.capture.capture import capture
from harness.runtime.devices.random_sources import seed_all
from harness.runtime.faithfulness.comparison import hold_to_model


def task_of(model, dtype=torch.float64):
    task = ZOO["plain"].task()
    specs = tuple(replace(spec, dtype=dtype) for spec in task.inputs)
    return replace(task, model=model.to(dtype), inputs=specs)


def hold(truth, lie, dtype=torch.float64):
    """Hold the graph of a model to another with equal weights."""
    true_task, false_task = task_of(truth, dtype), task_of(lie, dtype)
    lie.load_state_dict({**lie.state_dict(), **truth.state_dict()}, strict=False)
    hold_to_model(true_task, capture(false_task, 8, "lie"), "lie")


def net(middle=None, prepare=None, base=Net):
    """A net whose middle is a function of the net and its input."""

    class Made(base):
        def middle(self, x):
            return super().middle(x) if middle is None else middle(self, x)

    made = Made()
    if prepare is not None:
        prepare(made)
    return made


def with_norm(made):
    made.norm = nn.BatchNorm1d(WIDTH)
    with_buffer(made.norm)


def with_buffer(made):
    made.register_buffer("seen", torch.zeros(WIDTH))
    made.n_calls = 0


def frozen(made):
    made.first.requires_grad_(False)


def carrying(made, x):
    state = torch.tanh(made.second(x) + (0 if made.last_state is None else made.last_state))
    made.last_state = state.detach().mean(0)
    return state


def freezing(made, x):
    made.second.requires_grad_(False)
    found = torch.tanh(made.second(x))
    made.second.requires_grad_(True)
    return found


def dropping(*, is_on):
    def prepare(made):
        made.drop = nn.Dropout(0.5).train(is_on)

    return net(lambda self, x: torch.tanh(self.second(self.drop(x))), prepare)


LIES = {
    "no_grad": (NoGradBranch, lambda: net(lambda self, x: x + self.second(x)),
                ["gradient of operator 'second' (Linear)", "not in the model", "torch.no_grad"]),
    "reverse": (ReverseFunction, lambda: net(lambda self, x: x.view_as(x) + self.second(x)),
                ["gradient of first.0", "'view_as'", "the autograd function _Reverse"]),
    "tensor hook": (PlainTensorHook, net,
                    ["gradient of operator", "a hook on a tensor (contexts.py:"]),
    "batch size": (lambda: net(lambda self, x: self.second(x) * x.shape[0]),
                   lambda: net(lambda self, x: self.second(x) * 3),
                   ["with 2 samples its loss differs", "the output of operator 'mul'"]),
    "python's random": (PythonLayerDrop, net, ["Python's random"]),
    "buffer": (BufferAdded,
               lambda: net(lambda self, x: self.second(x).tanh() * (1 + self.seen), with_buffer),
               ["buffer seen"]),
    "attribute": (AttributeCounted, net, ["the attribute n_calls, which forward writes"]),
    "state": (lambda: net(carrying, lambda made: setattr(made, "last_state", None)), net,
              ["the attribute last_state, which forward writes"]),
    "frozen in forward": (lambda: net(freezing), net,
                          ["a change of requires_grad (test_faithfulness.py:"]),
    "frozen": (net, lambda: net(prepare=frozen), ["gradient of first.0.weight"]),
    "dropout in eval mode": (lambda: dropping(is_on=False), lambda: dropping(is_on=True),
                             ["random numbers", "(torch)"]),
    "norm": (lambda: net(lambda self, x: self.norm(self.second(x)),
                         lambda made: made.add_module("norm", OwnNorm(WIDTH))),
             lambda: net(lambda self, x: self.second(x)),
             ["the output of operator"]),
}  # fmt: skip


def as_read(made, x):
    found = made.second(x)
    return (900 * found.float() / 7).to(found.dtype).sin()  # large, so that rounding shows


def as_exported(made, x):
    return (900 * made.second(x).float() / 7).to(torch.float32).sin()


def test_a_dtype_that_follows_autocast_is_named_with_its_line():
    truth, lie = (task_of(net(middle), torch.float32) for middle in (as_read, as_exported))
    lie.model.load_state_dict(truth.model.state_dict())
    captured = capture(lie, 8, "lie")
    hold_to_model(truth, captured, "lie")
    with pytest.raises(ModelError) as refused:
        hold_to_model(truth, captured, "lie", "bf16")
    said = str(refused.value)
    assert "does not train in bf16 what the model does" in said
    line = as_read.__code__.co_firstlineno + 2
    read = "a read of a dtype, torch.bfloat16 here and torch.float32 in the graph"
    assert f"the model has {read} ({Path(__file__).name}:{line})" in said
    assert "rewrite that part, use fp32, or train it by PyTorch alone" in said


@pytest.mark.parametrize("name", LIES)
def test_a_lost_construct_is_refused_in_one_line(name):
    truth, lie, words = LIES[name]
    with pytest.raises(ModelError) as refused:
        hold(truth().double(), lie().double())
    said = str(refused.value)
    assert "\n" not in said
    assert "does not train what the model does" in said
    for word in words:
        assert word in said


def test_a_lost_autocast_is_refused_although_float64_has_none():
    with pytest.raises(ModelError, match=r"the output of operator 'second' .* autocast \(contexts"):
        hold(Autocast(), net(lambda self, x: x + torch.tanh(self.second(x))), torch.float32)


class Normed(Net):
    def __init__(self, *, is_checkpointed, momentum=0.1):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
        self.is_checkpointed = is_checkpointed

    def part(self, x):
        return self.norm(self.second(x))

    def middle(self, x):
        return (
            checkpoint(self.part, x, use_reentrant=False) if self.is_checkpointed else self.part(x)
        )


def test_statistics_that_a_checkpoint_counts_twice_are_no_difference():
    hold(Normed(is_checkpointed=True), Normed(is_checkpointed=False))
    with pytest.raises(ModelError, match=r"its buffer norm\.running_mean differs"):
        hold(Normed(is_checkpointed=False, momentum=0.3), Normed(is_checkpointed=False))


@pytest.mark.parametrize("is_of_weight", [False, True])
def test_a_buffer_that_a_hook_of_another_module_writes_is_refused(is_of_weight):
    model = net(lambda self, x: self.second(x).tanh(), with_buffer)

    def count(*_):
        model.seen += 1

    if is_of_weight:
        model.second.weight.register_hook(count)
    else:
        model.second.register_forward_hook(count)
    task = task_of(model)
    with pytest.raises(ModelError, match=r"its buffer seen differs; the model has a .*hook on "):
        hold_to_model(task, capture(task, 8, "hooked"), "hooked")


@pytest.mark.parametrize("name", ["register_forward_hook", "register_full_backward_hook"])
def test_a_hook_that_uses_another_operator_is_refused(name):
    model = net(lambda self, x: self.second(self.norm(x)), with_norm)

    def count(*_):
        model.norm.seen.add_(1)

    getattr(model.second, name)(count)
    task = task_of(model)
    captured = capture(task, 8, "hooked")
    assert not model.norm.seen.any()  # by what capture runs
    message = r"a hook on second of hooked uses norm\.seen, which is not of"
    with pytest.raises(ModelError, match=message):
        hold_to_model(task, captured, "hooked")


def test_a_gradient_that_two_checkpoints_add_to_is_compared_whole():
    """Each of them, being reentrant, ends a backward of its own."""

    def twice(self, x):
        inner = checkpoint(self.second, x, use_reentrant=True)
        return torch.tanh(checkpoint(self.second, inner, use_reentrant=True))

    def plainly(self, x):
        return torch.tanh(self.second(self.second(x)))

    def half(self, x):
        return torch.tanh(self.second(self.second(x).detach()) + 0 * self.second(x))

    hold(net(twice), net(plainly))
    with pytest.raises(ModelError, match=r"gradient of"):
        hold(net(twice), net(half))


def test_sums_in_another_order_are_no_error():
    def halves(self, x):
        weight, k = self.second.weight, WIDTH // 3
        parts = x[:, :k] @ weight[:, :k].t() + x[:, k:] @ weight[:, k:].t()
        return torch.tanh(parts + self.second.bias)

    hold(Net(), net(halves), torch.float32)


def test_an_error_as_small_as_rounding_is_found_in_float64():
    def nearly(self, x):
        return torch.tanh(self.second(x) * (1 + 2e-6))

    with pytest.raises(ModelError, match="the output of operator 'mul'"):
        hold(Net(), net(nearly), torch.float32)


@pytest.mark.parametrize(
    "name", ["vit", "branchy", "lstm_time_first", "tokens", "dlrm_dot", "exported"]
)
def test_graphs_of_real_models_hold(name):
    held(small_task(name, dtype=torch.float32, has_dropout=True), 8)


@pytest.mark.parametrize("name", ["loss_inside", "per_pixel", "doubled_rows"])
def test_what_one_device_refuses_is_refused(name):
    task = ZOO[name].task()
    graph = capture(ZOO["plain"].task(), 8, name)
    with pytest.raises(ModelError, match=r"one device cannot train .* its forward returns"):
        hold_to_model(task, graph, name)


class Frozen(dict):
    """The configuration of a model of diffusers."""

    def clear(self):
        raise TypeError("frozen")

    update = clear


def test_a_frozen_dict_among_the_attributes_is_left_alone():
    held(task_of(net(prepare=lambda made: setattr(made, "config", Frozen(width=WIDTH)))), 8)


class SpoiltBackward(nn.Linear):
    """Changes in place a value that its backward reads."""

    def forward(self, x, labels):
        y = super().forward(x).sigmoid()
        y[:, 0] = 0
        return {"logits": y, "loss": (y - labels).square().mean()}


def test_outputs_of_a_loss_of_its_own_are_not_blamed_for_an_error():
    example = {"x": torch.randn(2, 3), "labels": torch.randn(2, 4)}
    task = users_task(SpoiltBackward(3, 4), example)
    with pytest.raises(ModelError, match=r"one device cannot train .*\): fix its forward first$"):
        held(task, 8)


class ScaledInPlace(nn.Linear):
    def forward(self, x):
        return super().forward(x.mul_(0.5))


def test_a_forward_that_alters_its_inputs_is_held():
    held(users_task(ScaledInPlace(3, 4), torch.rand(2, 3)), 8)


def test_the_length_of_a_cache_is_no_count():
    def prepare(made):
        made.length, made.table = 0, torch.zeros(WIDTH)

    def cached(made, x):
        if made.length < x.shape[1]:
            made.length, made.table = x.shape[1], torch.linspace(0, 1, x.shape[1])
        return x * made.table

    held(task_of(net(cached, prepare)), 8)


SOURCE = torch.Generator()


def drawing(self, x):
    return x + torch.rand(WIDTH, dtype=x.dtype, generator=SOURCE)


def clipping(self, x):
    self.second.weight.data.clamp_(-0.05, 0.05)
    return torch.tanh(self.second(x))


@pytest.mark.parametrize(
    ("middle", "words"),
    [(drawing, "another result each time"), (clipping, "writes its own parameters")],
)
def test_a_model_that_changes_beside_its_buffers_cannot_be_held(middle, words):
    with pytest.raises(ModelError, match=words):
        hold(net(middle), Net())


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("habit_teacher", r"changes the parameter 'teacher\.weight' in place"),
        ("habit_counting", "counts in n_steps and computes otherwise when that is 100 larger"),
        ("habit_countingindict", r"counts in state\.n and computes otherwise"),
        ("list_counted", r"counts in calls\.0 and computes otherwise when that is 10000 larger"),
        ("iterator_counted", "counts in calls and computes otherwise"),
        ("closure_counted", r"counts in count\.n_calls and computes otherwise"),
        ("global_counted", r"counts in GlobalCounted\.count\._n_calls and computes otherwise"),
        ("habit_stateful", "does not train what the model does: with 8 samples"),
        ("habit_kept", "does not train what the model does: with 2 samples"),
        ("habit_function_norm", "gives running statistics to the function instance_norm"),
        ("habit_hyper", "has a member with the name 'code' or 'graph'"),
    ],
)
def test_state_beside_the_graph_is_refused(name, words):
    task = ZOO[name].task()
    with pytest.raises(ModelError, match=words):
        held(task, 8)


def test_a_script_module_is_refused():
    with pytest.raises(ModelError, match="module 'b' is a ScriptModule"):
        ZOO["habit_scripted"].task()


class Moody(BufferAdded):
    """Changes all that a forward can change of its model."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.n_calls, self.history = 0, []

    def middle(self, x):
        self.n_calls += 1
        self.history.append(float(x.detach().sum()))
        self.mean = x.detach().mean(0)
        self.kept = x
        return super().middle(x + torch.rand_like(x))


def test_the_model_is_left_as_it_was():
    model = Moody().double()
    task, lie = task_of(model), capture(task_of(Net().double()), 8, "lie")
    model(torch.ones(2, 10, dtype=torch.float64)).sum().backward()
    model.second.eval()
    before = copy.deepcopy(model.state_dict())
    gradients = {name: p.grad for name, p in model.named_parameters()}
    values = {name: g.clone() for name, g in gradients.items()}
    buffers = {name: id(b) for name, b in model.named_buffers()}
    numbers = model.n_calls, list(model.history), id(model.kept)
    seed_all(3)
    drawn = random.random(), torch.rand(1), np.random.rand()
    seed_all(3)
    with pytest.raises(ModelError):
        hold_to_model(task, lie, "lie")
    assert all(torch.equal(before[name], now) for name, now in model.state_dict().items())
    assert {name: id(b) for name, b in model.named_buffers()} == buffers
    assert all(p.grad is gradients[name] for name, p in model.named_parameters())
    assert all(torch.equal(values[name], p.grad) for name, p in model.named_parameters())
    assert (model.n_calls, model.history, id(model.kept)) == numbers
    assert (model.training, model.second.training) == (True, False)
    assert (random.random(), torch.rand(1), np.random.rand()) == drawn
