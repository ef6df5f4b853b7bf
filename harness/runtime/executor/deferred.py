"""Backward passes in two halves: inputs' gradients at once, weights' gradients when there is time.

Zero-bubble schedules fill the pipeline's bubbles with the second half (Qi et al., Zero Bubble
Pipeline Parallelism, 2023):

    forward | backward of inputs ... waits on a WeightQueue ... | flush: gradients of weights
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from harness.runtime.executor.shards_conv import ConvShard, Pair
from harness.runtime.executor.shards_dense import LinearShard

# Computes gradients of parameters, and keeps alive what it computes them from.
Pending = Callable[[], list[tuple[nn.Parameter, Tensor]]]
# Takes (input, gradient of the output) of one call in backward.
_Put = Callable[[Tensor, Tensor], None]


class WeightQueue:
    """Gradients of weights that are yet to be computed, by microbatch, in the order of backward."""

    def __init__(self) -> None:
        self._pending: dict[int, list[Pending]] = {}
        self._microbatch = 0

    @contextmanager
    def filling(self, microbatch: int) -> Iterator[None]:
        """File what is put within under `microbatch`."""
        before, self._microbatch = self._microbatch, microbatch
        try:
            yield
        finally:
            self._microbatch = before

    def put(self, pending: Pending) -> None:
        self._pending.setdefault(self._microbatch, []).append(pending)

    def flush(self, microbatch: int | None = None) -> list[nn.Parameter]:
        """Add the gradients of one microbatch, or of all, to `.grad`; the parameters, each once."""
        wanted = list(self._pending) if microbatch is None else [microbatch]
        touched: dict[int, nn.Parameter] = {}
        for key in wanted:
            for pending in self._pending.pop(key, []):
                for parameter, gradient in pending():
                    _accumulate(parameter, gradient)
                    touched[id(parameter)] = parameter
        return list(touched.values())


def _accumulate(parameter: nn.Parameter, gradient: Tensor) -> None:
    gradient = gradient.detach().to(parameter.dtype)
    if parameter.grad is None:
        parameter.grad = gradient
    else:
        parameter.grad.add_(gradient)


def defer(module: nn.Module, queue: WeightQueue) -> nn.Module | None:
    """The module with its weights' gradients put on `queue`; None if it is of another kind.

    It reads the parameters of `module` whenever it is called. Its backward pass leaves their
    `.grad` alone and calls no hook of theirs.
    """
    if isinstance(module, nn.Linear | LinearShard):
        return _Deferred(module, queue)
    if isinstance(module, ConvShard) and module.is_single:
        return _Deferred(module, queue)
    if isinstance(module, nn.Conv2d):
        is_plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return _Deferred(module, queue) if is_plain else None
    return None


def deferred_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters within a module whose gradients go to a queue."""
    return {p for m in module.modules() if isinstance(m, _Deferred) for p in m.parameters()}


class _Deferred(nn.Module):
    def __init__(self, inner: nn.Module, queue: WeightQueue) -> None:
        super().__init__()
        self.inner = inner
        self._queue = queue

    def forward(self, *inputs: Tensor) -> Tensor:
        inner: Any = self.inner
        if isinstance(inner, LinearShard):
            return inner.compute(inputs, self._linear)
        if isinstance(inner, ConvShard):
            return inner.compute(inputs, self._conv2d)
        if isinstance(inner, nn.Linear):
            return self._linear(inputs[0], inner.weight, inner.bias)
        arguments = inner.stride, inner.padding, inner.dilation, inner.groups
        return self._conv2d(inputs[0], inner.weight, inner.bias, *arguments)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        def put(saved: Tensor, gradient: Tensor) -> None:
            self._queue.put(lambda: _of_linear(saved, gradient, weight, bias))

        apply: Callable[..., Tensor] = _Linear.apply
        return apply(_autocast(x), _detached(weight), _detached(bias), put, _anchor(weight, bias))

    def _conv2d(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Pair,
        padding: Pair,
        dilation: Pair,
        groups: int,
    ) -> Tensor:
        options = stride, padding, dilation, groups

        def put(saved: Tensor, gradient: Tensor) -> None:
            self._queue.put(lambda: _of_conv2d(saved, gradient, weight, bias, options))

        apply: Callable[..., Tensor] = _Conv2d.apply
        anchor = _anchor(weight, bias)
        return apply(_autocast(x), _detached(weight), _detached(bias), options, put, anchor)


def _detached(parameter: Tensor | None) -> Tensor | None:
    """Autograd calls a parameter's hooks even where a function gives it no gradient."""
    return None if parameter is None else parameter.detach()


def _anchor(*parameters: Tensor | None) -> Tensor:
    """What makes an output differentiable in place of its parameters."""
    first = next(p for p in parameters if p is not None)
    is_trained = any(p is not None and p.requires_grad for p in parameters)
    return torch.empty(0, device=first.device, requires_grad=is_trained)


def _autocast(x: Tensor) -> Tensor:
    """As autocast would cast the input of a product."""
    kind = x.device.type
    if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
        return x.to(torch.get_autocast_dtype(kind))
    return x


def _like(x: Tensor, *tensors: Tensor | None) -> list[Tensor | None]:
    return [None if tensor is None else tensor.to(x.dtype) for tensor in tensors]


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, put: _Put, anchor: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.put = put
        # Autocast would keep casts of weights that carry no gradient, and hand them to others.
        with torch.autocast(x.device.type, enabled=False):
            own_weight, own_bias = _like(x, weight, bias)
            assert own_weight is not None
            return F.linear(x, own_weight, own_bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[4]:
            ctx.put(x, gradient)
        if not ctx.needs_input_grad[0]:
            return (None,) * 5
        rows = gradient.reshape(-1, gradient.shape[-1])
        return rows.mm(weight.to(rows.dtype)).view(x.shape), *(None,) * 4


def _of_linear(
    x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None
) -> list[tuple[nn.Parameter, Tensor]]:
    rows = gradient.reshape(-1, gradient.shape[-1])
    found: list[tuple[Any, Tensor]] = []
    if weight.requires_grad:
        found.append((weight, rows.t().mm(x.reshape(-1, x.shape[-1]))))
    if bias is not None and bias.requires_grad:
        found.append((bias, rows.sum(0)))
    return found


_Options = tuple[Pair, Pair, Pair, int]


class _Conv2d(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        options: _Options,
        put: _Put,
        anchor: Tensor,
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.options, ctx.put = options, put
        with torch.autocast(x.device.type, enabled=False):
            own_weight, own_bias = _like(x, weight, bias)
            assert own_weight is not None
            return F.conv2d(x, own_weight, own_bias, *options)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        if ctx.needs_input_grad[5]:
            ctx.put(x, gradient)
        if not ctx.needs_input_grad[0]:
            return (None,) * 6
        wanted = [True, False, False]
        of_x = _convolution_backward(x, gradient, weight, None, ctx.options, wanted)[0]
        return of_x, *(None,) * 5


def _of_conv2d(
    x: Tensor, gradient: Tensor, weight: Tensor, bias: Tensor | None, options: _Options
) -> list[tuple[nn.Parameter, Tensor]]:
    wanted = [False, weight.requires_grad, bias is not None and bias.requires_grad]
    found = _convolution_backward(x, gradient, weight, bias, options, wanted)
    parameters: list[Any] = [None, weight, bias]
    pairs = zip(parameters, found, wanted, strict=True)
    return [(parameter, of_it) for parameter, of_it, is_wanted in pairs if is_wanted]


def _convolution_backward(
    x: Tensor,
    gradient: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    options: _Options,
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
