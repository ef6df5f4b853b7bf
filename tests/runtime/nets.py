"""Small models whose middle is a function, for tests of tracing, and the tasks of models."""

import torch
from torch import nn

from harness.runtime.capture.capture import capture
from harness.runtime.faithfulness.comparison import hold_to_model
from harness.runtime.models import build_task, fit_options
from harness.runtime.models.factory import task_of
from harness.runtime.models.task import InputSpec, ModelOptions, Task


def task_on(model, *shape, n_classes=3, dtype=torch.float32):
    """A task of one input x, of four features by default."""
    inputs = (InputSpec(name="x", shape=shape or (4,), dtype=dtype),)
    return Task(model=model, inputs=inputs, n_classes=n_classes)


def users_task(model, example):
    """The task of a user's model that takes tensors like those of an example."""
    return task_of("m:f", (model, example), ModelOptions())


def built_in(name, **options):
    """The task of a row of MODELS."""
    return build_task(name, fit_options(name, ModelOptions(**options)))


def held(task, batch=4):
    """The captured graph of a task, which trains as its model does."""
    captured = capture(task, batch, "model")
    hold_to_model(task, captured, "model")
    return captured


def function(name, forward, backward):
    """An autograd function."""
    methods = {"forward": staticmethod(forward), "backward": staticmethod(backward)}
    return type(name, (torch.autograd.Function,), methods)


def keep_factor(ctx, x, factor):
    ctx.factor = factor
    return x * 1


Scaled = function("Scaled", keep_factor, lambda ctx, grad: (ctx.factor(grad), None))


class Call(nn.Module):
    """Calls a function, or a module by the name `called`."""

    def __init__(self, called):
        super().__init__()
        self.called = called

    def forward(self, x):
        return self.called(x)


class Heads(nn.Module):
    """An attention over five steps, which is exported."""

    def __init__(self, n_heads):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.n_heads = n_heads

    def forward(self, x):
        if x.sum(1).shape[0] < 0:  # torch.fx cannot follow it
            return x
        sizes = (-1, 5, self.n_heads, 8 // self.n_heads)
        q, k, v = (part(x).view(sizes).transpose(1, 2) for part in (self.q, self.k, self.v))
        made = torch.softmax(q @ k.transpose(2, 3), dim=-1) @ v
        return self.out(made.transpose(1, 2).reshape(-1, 5, 8))


class Net(nn.Module):
    def __init__(self, middle, **parts):
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(4, 4), nn.Linear(4, 3), middle
        for name, part in parts.items():
            self.add_module(name, part)

    def forward(self, x):
        return self.last(self.middle(self, self.first(x)))


def by_closure(net, x):
    return Scaled.apply(x, lambda grad: 2 * grad)


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


def graph_of(middle, **parts):
    return capture(task_on(Net(middle, **parts)), 4, "net").graph
