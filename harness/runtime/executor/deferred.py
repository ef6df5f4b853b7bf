"""Gradients of weights that we compute ourselves, apart from those of inputs.

Zero-bubble schedules fill the pipeline's bubbles with them (Qi et al., Zero Bubble Pipeline
Parallelism, 2023):

    forward | backward of inputs ... waits on a WeightQueue ... | flush: gradients of weights

Those of large linear layers are computed at once, but straight where they are needed: in the bucket
that is summed over devices, or added by the product itself to what earlier microbatches left.
Autograd would write them to fresh memory first, which on a CPU takes as long as the product does
for small batches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable

from harness.runtime.executor.shards_conv import ConvShard, Pair
from harness.runtime.executor.shards_dense import LinearShard

# Computes gradients of parameters and adds them to `.grad`; keeps alive what it computes them from.
Pending = Callable[[], list[nn.Parameter]]
# Takes (input, gradient of the output) of one call in backward.
_Put = Callable[[Tensor, Tensor], None]

# Elements from which on a weight's gradient is worth an autograd function of ours: 4 MiB of fp32,
# more than the cache of a core. At 1 MiB that function takes longer than the copies that it saves.
LARGE_ELEMENTS = 1 << 20


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


class Sink(Protocol):
    """What becomes of gradients that wait to be computed."""

    def put(self, pending: Pending) -> None: ...


class AtOnce:
    """Computes them in backward.

    Args:
        reached: called with each parameter whose gradient a call has been added to.
    """

    def __init__(self, reached: Callable[[nn.Parameter], None]) -> None:
        self._reached = reached

    def put(self, pending: Pending) -> None:
        for parameter in pending():
            self._reached(parameter)


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

    @torch.no_grad()
    def flush(self, microbatch: int | None = None) -> list[nn.Parameter]:
        """Add the gradients of one microbatch, or of all, to `.grad`; the parameters, each once."""
        wanted = list(self._pending) if microbatch is None else [microbatch]
        touched: dict[int, nn.Parameter] = {}
        for key in wanted:
            for pending in self._pending.pop(key, []):
                for parameter in pending():
                    touched[id(parameter)] = parameter
        return list(touched.values())


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


def defer(module: nn.Module, sink: Sink, homes: GradientHomes) -> nn.Module | None:
    """The module with its weights' gradients given to `sink`; None if it is of another kind.

    It reads the parameters of `module` whenever it is called. Its backward pass leaves their
    `.grad` alone and calls no hook of theirs.
    """
    if isinstance(module, nn.Linear | LinearShard):
        return _Deferred(module, sink, homes)
    if isinstance(module, ConvShard) and module.is_single:
        return _Deferred(module, sink, homes)
    if isinstance(module, nn.Conv2d):
        is_plain = module.padding_mode == "zeros" and not isinstance(module.padding, str)
        return _Deferred(module, sink, homes) if is_plain else None
    return None


def in_place_bytes(device: torch.device) -> float:
    """Bytes of a linear layer's weights from which on their gradients are written in place.

    On a GPU memory is fast, and the time of an autograd function in Python would show.
    """
    return 4 * LARGE_ELEMENTS if device.type == "cpu" else math.inf


def is_large_linear(module: nn.Module) -> bool:
    """Whether its weight's gradient is worth writing where it stays."""
    return isinstance(module, nn.Linear | LinearShard) and module.weight.numel() >= LARGE_ELEMENTS


def in_place(module: nn.Module, *, is_added: bool) -> nn.Module | None:
    """A large linear layer as it trains where its gradient has a home; None for any other module.

    Args:
        is_added: to the gradient of earlier microbatches, from the second call on; otherwise no
            gradient is there yet, however often it is called.
    """

    def forget(parameter: nn.Parameter) -> None:
        if not is_added:
            parameter.grad = None

    return defer(module, AtOnce(forget), GradientHomes()) if is_large_linear(module) else None


def backward_calls(module: fx.GraphModule) -> tuple[Counter[nn.Parameter], set[nn.Parameter]]:
    """How often backward reaches each parameter of a segment, and those that wait on a queue.

    Autograd adds all uses of a parameter up and reaches it once; what is computed at once is
    reached by each call.
    """
    found: Counter[nn.Parameter] = Counter(set(_outside(module)))
    waiting: set[nn.Parameter] = set()
    for node in module.graph.nodes:
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(called, _Deferred):
            (found if called.is_at_once else waiting).update(called.parameters())
    return found, waiting


def _outside(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that autograd itself finds gradients for."""
    if not isinstance(module, _Deferred):
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _outside(child)


class _Deferred(nn.Module):
    def __init__(self, inner: nn.Module, sink: Sink, homes: GradientHomes) -> None:
        super().__init__()
        self.inner = inner
        self._sink = sink
        self._homes = homes if is_large_linear(inner) else None

    @property
    def is_at_once(self) -> bool:
        return isinstance(self._sink, AtOnce)

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
            self._sink.put(lambda: _add_linear(saved, gradient, weight, bias, self._homes))

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
            self._sink.put(lambda: _add_conv2d(saved, gradient, weight, bias, options))

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


def _add_linear(
    x: Tensor, gradient: Tensor, weight: Any, bias: Any, homes: GradientHomes | None
) -> list[nn.Parameter]:
    rows = gradient.reshape(-1, gradient.shape[-1])
    found = []
    if weight.requires_grad:
        _add_product(weight, rows.t(), x.reshape(-1, x.shape[-1]), homes)
        found.append(weight)
    if bias is not None and bias.requires_grad:
        _accumulate(bias, rows.sum(0))
        found.append(bias)
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


def _add_conv2d(
    x: Tensor, gradient: Tensor, weight: Any, bias: Any, options: _Options
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
