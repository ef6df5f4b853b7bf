"""Small models whose middle is a function, for tests of tracing."""

import torch
from torch import nn

from harness.runtime.capture.capture import capture
from harness.runtime.models.task import InputSpec, Task


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x * 1

    @staticmethod
    def backward(ctx, grad):
        return ctx.factor(grad), None


class Net(nn.Module):
    def __init__(self, middle):
        super().__init__()
        self.first, self.last, self.middle = nn.Linear(4, 4), nn.Linear(4, 3), middle

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


def graph_of(middle, batch=4):
    task = Task(model=Net(middle), inputs=(InputSpec(name="x", shape=(4,)),), n_classes=3)
    return capture(task, batch, "net").graph
