"""Gradients of weights that we compute ourselves, apart from those of inputs.

Zero-bubble schedules fill the pipeline's bubbles with them (Qi et al., Zero Bubble Pipeline
Parallelism, 2023):

    forward | backward of inputs ... waits on a WeightQueue ... | flush: gradients of weights

Those of large linear layers are computed at once, but straight where they are needed: in the bucket
that is summed over devices, or added by the product itself to what earlier microbatches left.
Autograd would write them to fresh memory first, which on a CPU takes as long as the product does
for small batches.

Where weights are large beside all that a step's microbatches feed them, the microbatches are
joined: what the gradient is computed from is kept, and one product over all of it takes the place
of one for each and of adding them up:

    backward #0 ... kept | backward #1 ... kept | backward #2, then one product over #0, #1, #2
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

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


# From which on one product for all microbatches is worth ours: 1 MiB of fp32.
JOINED_ELEMENTS = 1 << 18
# What may be kept for that, over the weights: it costs copies and memory.
KEPT_SHARE = 1.0


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


def defer(
    module: nn.Module, sink: Sink, homes: GradientHomes, *, n_joined: int = 1
) -> nn.Module | None:
    """The module with its weights' gradients given to `sink`; None if it is of another kind.

    It reads the parameters of `module` whenever it is called. Its backward pass leaves their
    `.grad` alone and calls no hook of theirs.

    Args:
        n_joined: how many calls' gradients are computed together.
    """
    return _Deferred(module, sink, homes, n_joined) if _can_defer(module) else None


def _can_defer(module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    is_single = isinstance(module, ConvShard) and module.is_single
    return is_single or isinstance(module, nn.Linear | LinearShard)


def joined_bytes(device: torch.device) -> float:
    """Bytes of weights from which on the microbatches of a step may be joined; see `in_place_bytes`
    for GPUs."""
    return 4 * JOINED_ELEMENTS if device.type == "cpu" else math.inf


def is_worth_joining(module: nn.Module, n_bytes: int) -> bool:
    """Whether a step's microbatches should be joined for a module's weights.

    Not for those whose gradients are added in place (`is_large_linear`).

    Args:
        n_bytes: of inputs and outputs of all of them.
    """
    if not _can_defer(module) or is_large_linear(module):
        return False
    weight: Tensor = getattr(module, "weight")  # noqa: B009  (nn.Module does not declare it)
    return weight.numel() >= JOINED_ELEMENTS and n_bytes <= KEPT_SHARE * weight.nbytes


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


class Calls(NamedTuple):
    """How a segment's backward reaches its parameters.

    Attributes:
        each: how often in each microbatch. Autograd adds all uses of a parameter up and reaches it
            once; what is computed at once is reached by each call.
        waiting: those on a queue.
        joined: how often in each step.
    """

    each: Counter[nn.Parameter]
    waiting: set[nn.Parameter]
    joined: Counter[nn.Parameter]


def backward_calls(module: fx.GraphModule) -> Calls:
    """How a segment's backward reaches its parameters."""
    found = Calls(Counter(set(_outside(module))), set(), Counter())
    for node in module.graph.nodes:
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(called, _Deferred):
            if called.n_joined > 1:
                found.joined.update(called.parameters())
            elif called.is_at_once:
                found.each.update(called.parameters())
            else:
                found.waiting.update(called.parameters())
    return found


def _outside(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that autograd itself finds gradients for."""
    if not isinstance(module, _Deferred):
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _outside(child)


class _Deferred(nn.Module):
    def __init__(
        self, inner: nn.Module, sink: Sink, homes: GradientHomes, n_joined: int = 1
    ) -> None:
        super().__init__()
        self.inner, self.n_joined = inner, n_joined
        self._sink = sink
        self._homes = homes if is_large_linear(inner) else None
        self._kept: list[tuple[Tensor, Tensor]] = []

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
            self._put(_rows(saved), _rows(gradient), add)

        def add(x: Tensor, gradient: Tensor) -> list[nn.Parameter]:
            return _add_linear(x, gradient, weight, bias, self._homes)

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
            self._put(saved, gradient, add)

        def add(x: Tensor, gradient: Tensor) -> list[nn.Parameter]:
            return _add_conv2d(x, gradient, weight, bias, options)

        apply: Callable[..., Tensor] = _Conv2d.apply
        anchor = _anchor(weight, bias)
        return apply(_autocast(x), _detached(weight), _detached(bias), options, put, anchor)

    def _put(
        self, x: Tensor, gradient: Tensor, add: Callable[[Tensor, Tensor], list[nn.Parameter]]
    ) -> None:
        """Hand a call to the sink, or keep it until those that it is joined with are there."""
        self._kept.append((x, gradient))
        if len(self._kept) < self.n_joined:
            return
        kept, self._kept = self._kept, []

        def pending() -> list[nn.Parameter]:
            if len(kept) == 1:
                return add(*kept[0])
            xs, gradients = zip(*kept, strict=True)
            kept.clear()
            return add(torch.cat(xs), torch.cat(gradients))

        self._sink.put(pending)


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
        rows = _rows(gradient)
        return rows.mm(weight.to(rows.dtype)).view(x.shape), *(None,) * 4


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _add_linear(
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
