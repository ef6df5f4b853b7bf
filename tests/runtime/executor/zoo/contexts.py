"""Contexts, autograd functions and hooks: what a tracer can lose without a word."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from zoo.base import WIDTH, Net, ZooModel, named


class NoGradBranch(Net):
    def middle(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            y = self.second(x)
        return x + y


class NoGradEncoder(Net):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.first(x)
        return self.last(self.middle(x))


class NoGradMethod(Net):
    @torch.no_grad()
    def teacher(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(x))

    def middle(self, x: Tensor) -> Tensor:
        return x * self.teacher(x)


class GradSwitched(Net):
    def middle(self, x: Tensor) -> Tensor:
        with torch.set_grad_enabled(False):
            y = self.second(x)
            with torch.enable_grad():
                z = torch.tanh(self.second(x))
        return x + y + z


class Detach(Net):
    def middle(self, x: Tensor) -> Tensor:
        return x + self.second(x).detach()


class Autocast(Net):
    def __init__(self, *, is_on: bool = True) -> None:
        super().__init__()
        self.is_on = is_on

    def middle(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.is_on):
            y = torch.tanh(self.second(x))
        return x + y.to(x.dtype)


class _Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -0.5 * gradient


class ReverseFunction(Net):
    def middle(self, x: Tensor) -> Tensor:
        return _Reverse.apply(x) + self.second(x)


class _Round(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.round(4 * x) / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class StraightThrough(Net):
    def middle(self, x: Tensor) -> Tensor:
        return self.second(_Round.apply(x))


class _Relu(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clamp(min=0)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (x > 0) + 0.1 * gradient * (x <= 0)


class OwnRelu(Net):
    def middle(self, x: Tensor) -> Tensor:
        return _Relu.apply(self.second(x))


class _Pair(torch.autograd.Function):
    """Two outputs, and an argument that is no tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, factor: float) -> tuple[Tensor, Tensor]:
        ctx.factor = factor
        return x + y, x - y

    @staticmethod
    def backward(ctx: Any, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor, None]:
        return ctx.factor * (a + b), a - b, None


class PairFunction(Net):
    def middle(self, x: Tensor) -> Tensor:
        a, b = _Pair.apply(x, self.second(x), 0.3)
        return torch.tanh(a) * b


class Surrogate(Net):
    """The straight-through estimator without a function of its own."""

    def middle(self, x: Tensor) -> Tensor:
        y = self.second(x)
        return y + (torch.round(y) - y).detach()


class TensorHook(Net):
    def middle(self, x: Tensor) -> Tensor:
        y = self.second(x)
        if y.requires_grad:
            y.register_hook(lambda gradient: 0.3 * gradient)
        return torch.tanh(y)


class PlainTensorHook(Net):
    def middle(self, x: Tensor) -> Tensor:
        y = self.second(x)
        y.register_hook(lambda gradient: 0.3 * gradient)
        return torch.tanh(y)


class HookedWeights(Net):
    """Hooks on a weight that is used twice, one of them with a state, and on one that is never
    used."""

    def __init__(self) -> None:
        super().__init__()
        self.n_calls = 0
        self.never = nn.Parameter(torch.ones(3))
        self.second.weight.register_hook(self._grown)
        self.second.weight.register_hook(lambda gradient: gradient / gradient.norm())
        self.second.bias.register_hook(lambda gradient: None)
        self.never.register_hook(lambda gradient: gradient * float("nan"))

    def _grown(self, gradient: Tensor) -> Tensor:
        self.n_calls += 1
        return gradient * self.n_calls

    def middle(self, x: Tensor) -> Tensor:
        return torch.tanh(self.second(self.second(x)))


class HookedModule(Net):
    """A hook on a container, which sees the gradients of a whole batch and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
        self.n_calls = 0
        self.body.register_full_backward_hook(self._shrunk)

    def _shrunk(self, module: nn.Module, given: Any, taken: Any) -> tuple[Tensor, ...]:
        self.n_calls += 1
        return tuple(gradient / (given[0].norm() + self.n_calls) for gradient in given)

    def middle(self, x: Tensor) -> Tensor:
        return self.body(x) + self.second(x)


def _hooked(hook: Callable[[Net], object]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        net = Net()
        hook(net)
        return net

    return build


def parameter_clamp_hook(net: Net) -> None:
    net.second.weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))


def parameter_mask_hook(net: Net) -> None:
    mask = torch.arange(WIDTH).remainder(2).double()[:, None]
    net.second.weight.register_hook(lambda gradient: gradient * mask)


def accumulate_hook(net: Net) -> None:
    def halve(parameter: Tensor) -> None:
        assert parameter.grad is not None
        parameter.grad.mul_(0.5)

    net.second.weight.register_post_accumulate_grad_hook(halve)


def container_backward_hook(net: Net) -> None:
    net.first.register_full_backward_pre_hook(lambda module, given: (0.5 * given[0],))


def forward_hook(net: Net) -> None:
    net.second.register_forward_hook(lambda module, given, output: 2 * output)


def container_forward_hook(net: Net) -> None:
    net.first.register_forward_hook(lambda module, given, output: output + given[0].sum(1)[:, None])


def forward_pre_hook(net: Net) -> None:
    net.second.register_forward_pre_hook(lambda module, given: (given[0] * 0.5,))


class Checkpointed(Net):
    def __init__(self, *, is_reentrant: bool) -> None:
        super().__init__()
        self.is_reentrant = is_reentrant

    def middle(self, x: Tensor) -> Tensor:
        return F.silu(checkpoint(self.second, x, use_reentrant=self.is_reentrant))


CONTEXTS: dict[str, ZooModel] = {
    **named(
        NoGradBranch, NoGradEncoder, NoGradMethod, GradSwitched, Detach, ReverseFunction,
        StraightThrough, OwnRelu, PairFunction, Surrogate, TensorHook, PlainTensorHook,
        HookedWeights, HookedModule,
    ),
    "autocast": ZooModel(build=Autocast, without=lambda: Autocast(is_on=False)),
    **{
        hook.__name__: ZooModel(build=_hooked(hook))
        for hook in (
            parameter_clamp_hook, parameter_mask_hook, accumulate_hook, container_backward_hook,
            forward_hook, container_forward_hook, forward_pre_hook,
        )
    },
    "checkpoint": ZooModel(build=lambda: Checkpointed(is_reentrant=False)),
    "checkpoint_reentrant": ZooModel(build=lambda: Checkpointed(is_reentrant=True)),
}  # fmt: skip
