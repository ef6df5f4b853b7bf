"""Products by weights whose backward leaves the gradients of the weights to somebody else.

`linear` and `conv2d` hand (input, gradient of the output) on; `add_linear` and `add_conv2d` compute
from them what is added to `.grad`, by the operations that autograd would use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.runtime.executor.shards.conv import Pair

# Takes (input, gradient of the output) of one call in backward, without their graphs.
Put = Callable[[Tensor, Tensor], None]
# Weight and bias, in a tuple: given a parameter by itself, autograd calls its hooks also where a
# function has no gradient for it.
Weights = tuple[Tensor, Tensor | None]
# Stride, padding, dilation, groups.
Options = tuple[Pair, Pair, Pair, int]


class GradientHomes:
    """Where the gradients of large weights stay, step after step, instead of in fresh memory."""

    def __init__(self) -> None:
        self._homes: dict[nn.Parameter, Tensor] = {}

    def settle(self, parameter: nn.Parameter, home: Tensor) -> None:
        """Let a gradient be written there, such as into its bucket."""
        self._homes[parameter] = home

    def of(self, parameter: nn.Parameter) -> Tensor:
        if parameter not in self._homes:
            self._homes[parameter] = torch.empty_like(parameter, requires_grad=False)
        return self._homes[parameter]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, put: Put) -> Tensor:
    """A linear layer that gives rows of its input and of its output's gradient to `put`."""
    apply: Callable[..., Tensor] = _Linear.apply
    weights = weight, bias
    return apply(_autocast(x), weights, put, _anchor(x, weights))


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, put: Put) -> Tensor:
    """A convolution that gives its input and its output's gradient to `put`."""
    apply: Callable[..., Tensor] = _Conv2d.apply
    weights = weight, bias
    return apply(_autocast(x), weights, options, put, _anchor(x, weights))


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient = gradient.detach().to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _add_product(weight: nn.Parameter, a: Tensor, b: Tensor, homes: GradientHomes | None) -> None:
    """Add the product of two matrices to a gradient, without a copy of it where it has a home."""
    if homes is None or a.dtype != weight.dtype:
        _accumulate(weight, a.mm(b))
    elif weight.grad is None:
        weight.grad = torch.mm(a, b, out=homes.of(weight))
    else:
        weight.grad.addmm_(a, b)


def _is_trained(weights: Weights) -> bool:
    weight, bias = weights
    return weight.requires_grad or (bias is not None and bias.requires_grad)


def _anchor(x: Tensor, weights: Weights) -> Tensor | None:
    """What makes an output differentiable where its input is not."""
    if x.requires_grad or not _is_trained(weights):
        return None
    return torch.empty(0, device=x.device, requires_grad=True)


def _autocast(x: Tensor) -> Tensor:
    """As autocast would cast the input of a product."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _like(x: Tensor, weights: Weights) -> Weights:
    """Weights as autocast would cast them, but that it would keep them, and hand them to others."""
    weight, bias = weights
    return weight.to(x.dtype), None if bias is None else bias.to(x.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Weights, put: Put, anchor: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weights[0])
        ctx.weights, ctx.put = weights, put
        return _own(F.linear(x, *_like(x, weights)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = _rows(gradient)
        if _is_trained(ctx.weights):
            ctx.put(_rows(x.detach()), rows)
        of_x = None
        if ctx.needs_input_grad[0]:
            of_x = rows.mm(weight.to(rows.dtype)).view(x.shape)
        return of_x, None, None, None


def _own(x: Tensor) -> Tensor:
    """What may be worked on in place, which autograd allows of no view that a function returns."""
    found: Tensor = torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x
    return found


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def add_linear(
    x: Tensor, gradient: Tensor, weight: Any, bias: Any, homes: GradientHomes | None
) -> list[nn.Parameter]:
    found = []
    if weight.requires_grad:
        _add_product(weight, gradient.t(), x, homes)
        found.append(weight)
    if bias is not None and bias.requires_grad:
        _accumulate(bias, gradient.sum(0))
        found.append(bias)
    return found


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: Weights, options: Options, put: Put, anchor: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weights[0])
        ctx.weights, ctx.options, ctx.put = weights, options, put
        weight, bias = _like(x, weights)
        return F.conv2d(x, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if _is_trained(ctx.weights):
            ctx.put(x.detach(), gradient)
        of_x = None
        if ctx.needs_input_grad[0]:
            wanted = [True, False, False]
            of_x = _convolution_backward(x, gradient, weight, None, ctx.options, wanted)[0]
        return of_x, None, None, None, None


def add_conv2d(
    x: Tensor, gradient: Tensor, weight: Any, bias: Any, options: Options
) -> list[nn.Parameter]:
    wanted = [False, weight.requires_grad, bias is not None and bias.requires_grad]
    found = _convolution_backward(x, gradient, weight, bias, options, wanted)
    added = []
    for parameter, of_it, is_wanted in zip([None, weight, bias], found, wanted, strict=True):
        if is_wanted:
            _accumulate(parameter, of_it)
            added.append(parameter)
    return added


def _convolution_backward(
    x: Tensor,
    gradient: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: Options,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias, those that are wanted."""
    stride, padding, dilation, groups = options
    sizes = None if bias is None else list(bias.shape)
    found: tuple[Tensor, Tensor, Tensor] = torch.ops.aten.convolution_backward(
        gradient,
        x,
        weight.to(gradient.dtype),
        sizes,
        stride,
        padding,
        dilation,
        False,
        [0, 0],
        groups,
        wanted,
    )
    return found
