"""Linear layers and convolutions whose weight gradients are computed outside of autograd.

In backward, `multiply` passes the input and the gradient of the output to a callback, from which a
product adds to the gradients of its weights, by the operations that autograd would use.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from harness.runtime.executor.shards.conv import Pair

# Called in backward with a product, its input and the gradient of its output, both detached.
Put = Callable[["Product", Tensor, Tensor], None]
# Memory for the gradients of large weights, reused in every step, such as parts of their buckets.
GradientBuffers = dict[nn.Parameter, Tensor]
# Stride, padding, dilation, groups.
Options = tuple[Pair, Pair, Pair, int]


class Product(ABC):
    """A product of an input and weights.

    An object, because autograd calls the hooks of a parameter that is an argument of its own even
    if the function returns no gradient for it.
    """

    def __init__(self, weight: Any, bias: Any) -> None:
        self.weight, self.bias = weight, bias

    @property
    def wanted(self) -> tuple[bool, bool]:
        """Whether weight and bias are trained."""
        return self.weight.requires_grad, self.bias is not None and self.bias.requires_grad

    def cast_like(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The weights as autocast casts them, without its cache, which other layers would share."""
        return self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype)

    @abstractmethod
    def in_rows(self, x: Tensor) -> Tensor:
        """An input or the gradient of an output with rows first, so that those of several calls can
        be concatenated, whatever their dim of samples."""

    @abstractmethod
    def compute(self, x: Tensor) -> Tensor:
        """The output."""

    @abstractmethod
    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        """The gradient of the input."""

    @abstractmethod
    def add_gradients(
        self, x: Tensor, gradient: Tensor, buffers: GradientBuffers | None
    ) -> list[nn.Parameter]:
        """Add to the gradients of the weights; returns the trained ones.

        Args:
            x, gradient: as `in_rows` gives them.
            buffers: memory of a gradient that the product is written to directly; None: a new one.
        """


class LinearProduct(Product):
    """F.linear."""

    def in_rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, x.shape[-1])

    def compute(self, x: Tensor) -> Tensor:
        found = F.linear(x, *self.cast_like(x))
        # Later operators may change it in place, which autograd forbids for returned views.
        made: Tensor = torch.ops.aten._unsafe_view(found, found.shape)
        return made if found._is_view() else found

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        rows = self.in_rows(gradient)
        return rows.mm(self.weight.to(rows.dtype)).view(x.shape)

    def add_gradients(
        self, x: Tensor, gradient: Tensor, buffers: GradientBuffers | None
    ) -> list[nn.Parameter]:
        found = []
        if self.wanted[0]:
            _add_product(self.weight, gradient.t(), x, buffers)
            found.append(self.weight)
        if self.wanted[1]:
            _accumulate(self.bias, gradient.sum(0))
            found.append(self.bias)
        return found


class ConvProduct(Product):
    """F.conv2d."""

    def __init__(self, weight: Any, bias: Any, *options: Any) -> None:
        super().__init__(weight, bias)
        self._options: Options = options

    def in_rows(self, x: Tensor) -> Tensor:
        return x if x.dim() > 3 else x.unsqueeze(0)

    def compute(self, x: Tensor) -> Tensor:
        weight, bias = self.cast_like(x)
        return F.conv2d(x, weight, bias, *self._options)

    def input_gradient(self, x: Tensor, gradient: Tensor) -> Tensor:
        rows = self.in_rows(x), self.in_rows(gradient)
        return self._backward(*rows, True, False, False)[0].view_as(x)

    def add_gradients(
        self, x: Tensor, gradient: Tensor, buffers: GradientBuffers | None
    ) -> list[nn.Parameter]:
        _, *gradients = self._backward(x, gradient, False, *self.wanted)
        found = []
        for parameter, each, is_wanted in zip(
            (self.weight, self.bias), gradients, self.wanted, strict=True
        ):
            if is_wanted:
                _accumulate(parameter, each)
                found.append(parameter)
        return found

    def _backward(self, x: Tensor, gradient: Tensor, *wanted: bool) -> tuple[Tensor, ...]:
        """Gradients of input, weight and bias, where `wanted` is true."""
        stride, padding, dilation, groups = self._options
        sizes = None if self.bias is None else list(self.bias.shape)
        weight = self.weight.to(gradient.dtype)
        found: tuple[Tensor, ...] = torch.ops.aten.convolution_backward(
            gradient, x, weight, sizes, stride, padding, dilation, False, [0, 0], groups,
            list(wanted),
        )  # fmt: skip
        return found


def multiply(product: Product, x: Tensor, put: Put) -> Tensor:
    """Compute a product; backward passes its input and the gradient of its output to `put`."""
    apply: Callable[..., Tensor] = _Multiply.apply
    if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
        x = x.to(torch.get_autocast_dtype(x.device.type))
    anchor = None
    if any(product.wanted) and not x.requires_grad:
        # Makes the output differentiable although the input is not.
        anchor = torch.empty(0, device=x.device, requires_grad=True)
    return apply(x, product, put, anchor)


class _Multiply(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, product: Product, put: Put, anchor: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, product.weight)  # the weight, so that no change goes unnoticed
        ctx.product, ctx.put = product, put
        return product.compute(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, _ = ctx.saved_tensors
        if any(ctx.product.wanted):
            ctx.put(ctx.product, x.detach(), gradient)
        is_needed = ctx.needs_input_grad[0]
        return ctx.product.input_gradient(x, gradient) if is_needed else None, None, None, None


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient = gradient.detach().to(parameter.dtype)
    if parameter.grad is None and gradient.stride() != parameter.stride():
        # A convolution chooses its own strides; fused optimizers require those of the parameter.
        parameter.grad = torch.empty_like(parameter).copy_(gradient)
    elif parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def _add_product(weight: nn.Parameter, a: Tensor, b: Tensor, out: GradientBuffers | None) -> None:
    """Add a matrix product to a gradient, without a temporary if `out` gives a buffer for it."""
    if out is None or a.dtype != weight.dtype:
        _accumulate(weight, a.mm(b))
    elif weight.grad is None:
        if weight not in out:
            out[weight] = torch.empty_like(weight, requires_grad=False)
        weight.grad = torch.mm(a, b, out=out[weight])
    else:
        weight.grad.addmm_(a, b)
