"""Small models with constructs that tracing can lose, for `equivalence_models`."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N_CLASSES = 6


class Reverse(torch.autograd.Function):
    """Reverses gradients, as domain adaptation does (Ganin and Lempitsky, 2015)."""

    @staticmethod
    def forward(ctx, x, strength):
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.strength * grad, None


class Rounded(torch.autograd.Function):
    """A straight-through estimator."""

    @staticmethod
    def forward(ctx, x):
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx, grad):
        return grad


# Taken before anything is traced, as people do at import.
rounded = Rounded.apply


class OwnLinear(torch.autograd.Function):
    """A linear layer with a gate, of several inputs and outputs."""

    @staticmethod
    def forward(x, weight, bias):
        y = x @ weight.t() + bias
        return y.relu(), y.sigmoid()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight, _ = inputs
        ctx.save_for_backward(x, weight, *output)

    @staticmethod
    def backward(ctx, grad_relu, grad_gate):
        x, weight, relu, gate = ctx.saved_tensors
        grad = grad_relu * (relu > 0) + grad_gate * gate * (1 - gate)
        return grad @ weight, grad.t() @ x, grad.sum(0)


class Net(nn.Module):
    """Three linear layers; subclasses say what happens between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.bias = nn.Parameter(torch.ones(8))
        self.last = nn.Linear(8, N_CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(torch.tanh(self.first(x))))

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x))


class Functions(Net):
    def middle(self, x):
        y, gate = OwnLinear.apply(rounded(x), self.weight, self.bias)
        return Reverse.apply(y, 0.5) * gate + self.second(x)


class NoGrad(Net):
    def middle(self, x):
        with torch.no_grad():
            y = self.second(x)
            a, b = (y * 2).chunk(2, dim=1)
        return x + y + torch.cat([b, a], dim=1)


def _clamp(parameter):
    parameter.grad.clamp_(-0.01, 0.01)


class HookedWeights(Net):
    """Hooks on a weight that is used twice, on a bias, and on one that is never used."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[int] = []
        self.never = nn.Parameter(torch.ones(3))
        self.second.weight.register_hook(self._grown)
        self.second.weight.register_hook(lambda grad: grad / grad.norm())
        self.bias.register_hook(lambda grad: None)
        self.bias.register_post_accumulate_grad_hook(_clamp)
        self.never.register_hook(lambda grad: grad * float("nan"))

    def _grown(self, grad):
        self.calls.append(1)
        return grad * len(self.calls)

    def middle(self, x):
        return F.linear(self.second(self.second(x)), self.weight, self.bias)


class HookedModule(Net):
    """A hook on a container, which sees the gradients of a whole batch and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.n_calls = 0
        self.body.register_full_backward_hook(self._halve)

    def _halve(self, module, given, taken):
        self.n_calls += 1
        return tuple(grad / (given[0].norm() + self.n_calls) for grad in given)

    def middle(self, x):
        return self.body(x) + self.second(x)


class BufferWriter(Net):
    """Buffers that are assigned, added to and filled, read before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("largest", torch.ones(8))
        self.register_buffer("queue", torch.zeros(16, 8))

    def middle(self, x):
        y = torch.tanh(self.second(x - self.mean)) + self.largest
        with torch.no_grad():
            self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            self.largest.mul_(0.9).add_(x.abs().mean(0))
            self.queue.copy_(torch.cat([x.mean(0, keepdim=True), self.queue[:-1]]))
        return y * self.largest + self.queue.mean(0)


CONSTRUCTS: dict[str, Callable[[], nn.Module]] = {
    "functions": Functions,
    "no_grad": NoGrad,
    "hooked_weights": HookedWeights,
    "hooked_module": HookedModule,
    "buffer_writer": BufferWriter,
}
