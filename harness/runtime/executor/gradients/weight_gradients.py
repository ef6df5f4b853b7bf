"""Linear layers and convolutions whose weight gradients are computed outside of autograd.

In backward, `linear` and `conv2d` pass (input, gradient of the output) to a callback; `add_linear`
and `add_conv2d` compute the weight gradients from them, by the operations that autograd would use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.runtime.executor.shards.conv import Pair

# Called in backward with (input, gradient of the output) of one call, both detached.
Put = Callable[[Tensor, Tensor], None]
# Weight and bias in a tuple, because autograd calls the hooks of a parameter that is an argument of
# its own even if the function returns no gradient for it.
Weights = tuple[Tensor, Tensor | None]
# Stride, padding, dilation, groups.
Options = tuple[Pair, Pair, Pair, int]


class GradientBuffers:
    """Memory for the gradients of large weights, reused in every step.

    Args:
        are_kept: false if gradients are freed within the step, so that each needs new memory.
    """

    def __init__(self, *, are_kept: bool = True) -> None:
        self._are_kept = are_kept
        self._gradient_buffers: dict[nn.Parameter, Tensor] = {}

    def assign(self, parameter: nn.Parameter, buffer: Tensor) -> None:
        """Store a parameter's gradient in this tensor, such as a part of its bucket."""
        self._gradient_buffers[parameter] = buffer

    def of(self, parameter: nn.Parameter) -> Tensor:
        if not self._are_kept:
            return torch.empty_like(parameter, requires_grad=False)
        if parameter not in self._gradient_buffers:
            self._gradient_buffers[parameter] = torch.empty_like(parameter, requires_grad=False)
        return self._gradient_buffers[parameter]


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, put: Put) -> Tensor:
    """Apply a linear layer; backward passes its input and output gradient to `put`, as rows."""
    apply: Callable[..., Tensor] = _Linear.apply
    weights = weight, bias
    return apply(_autocast(x), weights, put, _anchor(x, weights))


def conv2d(x: Tensor, weight: Tensor, bias: Tensor | None, options: Options, put: Put) -> Tensor:
    """Apply a convolution; backward passes its input and its output's gradient to `put`."""
    apply: Callable[..., Tensor] = _Conv2d.apply
    weights = weight, bias
    return apply(_autocast(x), weights, options, put, _anchor(x, weights))


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient = gradient.detach().to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _add_product(weight: nn.Parameter, a: Tensor, b: Tensor, out: GradientBuffers | None) -> None:
    """Add a matrix product to a gradient, without a temporary if `out` gives a buffer for it."""
    if out is None or a.dtype != weight.dtype:
        _accumulate(weight, a.mm(b))
    elif weight.grad is None:
        weight.grad = torch.mm(a, b, out=out.of(weight))
    else:
        weight.grad.addmm_(a, b)


def _is_trained(weights: Weights) -> bool:
    weight, bias = weights
    return weight.requires_grad or (bias is not None and bias.requires_grad)


def _anchor(x: Tensor, weights: Weights) -> Tensor | None:
    """A tensor that makes the output differentiable although the input is not; None if needless."""
    if x.requires_grad or not _is_trained(weights):
        return None
    return torch.empty(0, device=x.device, requires_grad=True)


def _autocast(x: Tensor) -> Tensor:
    """Cast an input as autocast does."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _cast_like(x: Tensor, weights: Weights) -> Weights:
    """Cast weights as autocast does, but without its cache, which other layers would share."""
    weight, bias = weights
    return weight.to(x.dtype), None if bias is None else bias.to(x.dtype)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Weights, put: Put, anchor: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weights[0])
        ctx.weights, ctx.put = weights, put
        return _writable(F.linear(x, *_cast_like(x, weights)))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = _rows(gradient)
        if _is_trained(ctx.weights):
            ctx.put(_rows(x.detach()), rows)
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = rows.mm(weight.to(rows.dtype)).view(x.shape)
        return grad_input, None, None, None


def _writable(x: Tensor) -> Tensor:
    """A tensor that later operators may change in place; autograd forbids it for returned views."""
    found: Tensor = torch.ops.aten._unsafe_view(x, x.shape) if x._is_view() else x
    return found


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def add_linear(
    x: Tensor, gradient: Tensor, weight: Any, bias: Any, buffers: GradientBuffers | None
) -> list[nn.Parameter]:
    found = []
    if weight.requires_grad:
        _add_product(weight, gradient.t(), x, buffers)
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
        weight, bias = _cast_like(x, weights)
        return F.conv2d(x, weight, bias, *options)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if _is_trained(ctx.weights):
            ctx.put(x.detach(), gradient)
        grad_input = None
        if ctx.needs_input_grad[0]:
            wanted = [True, False, False]
            grad_input = _convolution_backward(x, gradient, weight, None, ctx.options, wanted)[0]
        return grad_input, None, None, None, None


def add_conv2d(
    x: Tensor, gradient: Tensor, weight: Any, bias: Any, options: Options
) -> list[nn.Parameter]:
    wanted = [False, weight.requires_grad, bias is not None and bias.requires_grad]
    found = _convolution_backward(x, gradient, weight, bias, options, wanted)
    added = []
    for parameter, grad, is_wanted in zip([None, weight, bias], found, wanted, strict=True):
        if is_wanted:
            _accumulate(parameter, grad)
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
    """Gradients of input, weight and bias, where `wanted` is true."""
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
