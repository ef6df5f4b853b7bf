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

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn

from harness.runtime.executor.gradients.weight_gradients import (
    GradientHomes,
    add_conv2d,
    add_linear,
    conv2d,
    linear,
)
from harness.runtime.executor.shards.base import has_plain_weights
from harness.runtime.executor.shards.conv import ConvShard, Pair
from harness.runtime.executor.shards.dense import LinearShard

# Input and gradient of the output of a call.
Call = tuple[Tensor, Tensor]
# Computes gradients of parameters and adds them to `.grad`; keeps alive what it computes them from.
Pending = Callable[[], list[nn.Parameter]]

# Elements from which on a weight's gradient is worth an autograd function of ours: 4 MiB of fp32,
# more than the cache of a core. At 1 MiB that function takes longer than the copies that it saves.
LARGE_ELEMENTS = 1 << 20
# From which on one product for all microbatches is worth ours: 1 MiB of fp32.
JOINED_ELEMENTS = 1 << 18
# What may be kept for that, over the weights: it costs copies and memory.
KEPT_SHARE = 1.0


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


def defer(
    module: nn.Module,
    sink: Sink,
    homes: GradientHomes,
    *,
    n_joined: int = 1,
    calls: list[Call] | None = None,
) -> nn.Module | None:
    """The module with its weights' gradients given to `sink`; None if it is of another kind.

    It reads the parameters of `module` whenever it is called. Its backward pass leaves their
    `.grad` alone and calls no hook of theirs.

    Args:
        n_joined: how many calls' gradients are computed together.
        calls: where these are kept meanwhile, shared by modules that stand for one at several sizes
            of microbatch; its own by default.
    """
    if not _can_defer(module):
        return None
    return _Deferred(module, sink, homes, n_joined, [] if calls is None else calls)


def _can_defer(module: nn.Module) -> bool:
    if not has_plain_weights(module):
        return False
    if isinstance(module, nn.Conv2d):
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    is_single = isinstance(module, ConvShard) and module.is_single
    return is_single or isinstance(module, nn.Linear | LinearShard)


def is_worth_joining(module: nn.Module, n_bytes: int) -> bool:
    """Whether a step's microbatches should be joined for a module's weights.

    Not for those whose gradients are added in place (`is_large_linear`).

    Args:
        n_bytes: of inputs and outputs of all of them.
    """
    if not _can_defer(module) or is_large_linear(module):
        return False
    weight = _weight(module)
    return weight.numel() >= JOINED_ELEMENTS and n_bytes <= KEPT_SHARE * weight.nbytes


def _weight(module: nn.Module) -> Tensor:
    weight: Tensor = getattr(module, "weight")  # noqa: B009  (nn.Module does not declare it)
    return weight


def is_large_linear(module: nn.Module) -> bool:
    """Whether its weight's gradient is worth writing where it stays.

    A weight that is computed from others is not even looked at: that may change buffers.
    """
    is_plain = isinstance(module, nn.Linear | LinearShard) and has_plain_weights(module)
    return is_plain and _weight(module).numel() >= LARGE_ELEMENTS


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


def count_uses(
    sizes: Iterable[tuple[int, Iterable[Iterable[fx.GraphModule]]]],
) -> Counter[nn.Parameter]:
    """How often a step's backward reaches each parameter.

    Args:
        sizes: for each size of microbatch, how many there are and the segments of each stage.
    """
    uses: Counter[nn.Parameter] = Counter()
    joined: Counter[nn.Parameter] = Counter()
    for n, stages in sizes:
        own: Counter[nn.Parameter] = Counter()
        for modules in stages:
            calls = [backward_calls(module) for module in modules]
            for one in calls:
                uses.update({parameter: n * k for parameter, k in one.each.items()})
                own.update(one.joined)
            waiting: set[nn.Parameter] = set().union(*(one.waiting for one in calls))
            uses.update(dict.fromkeys(waiting, n))
        joined |= own  # of all sizes together
    return uses + joined


def _outside(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters that autograd itself finds gradients for."""
    if not isinstance(module, _Deferred):
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _outside(child)


class _Deferred(nn.Module):
    def __init__(
        self,
        inner: nn.Module,
        sink: Sink,
        homes: GradientHomes,
        n_joined: int,
        calls: list[Call],
    ) -> None:
        super().__init__()
        self.inner, self.n_joined = inner, n_joined
        self._sink = sink
        self._homes = homes if is_large_linear(inner) else None
        self._calls = calls

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
        def add(x: Tensor, gradient: Tensor) -> list[nn.Parameter]:
            return add_linear(x, gradient, weight, bias, self._homes)

        return linear(x, weight, bias, lambda x, gradient: self._put(x, gradient, add))

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

        def add(x: Tensor, gradient: Tensor) -> list[nn.Parameter]:
            return add_conv2d(x, gradient, weight, bias, options)

        return conv2d(x, weight, bias, options, lambda x, gradient: self._put(x, gradient, add))

    def _put(
        self, x: Tensor, gradient: Tensor, add: Callable[[Tensor, Tensor], list[nn.Parameter]]
    ) -> None:
        """Hand a call to the sink, or keep it until those that it is joined with are there."""
        self._calls.append((x, gradient))
        if len(self._calls) < self.n_joined:
            return
        kept = self._calls.copy()
        self._calls.clear()

        def pending() -> list[nn.Parameter]:
            if len(kept) == 1:
                return add(*kept[0])
            xs, gradients = zip(*kept, strict=True)
            kept.clear()
            return add(torch.cat(xs), torch.cat(gradients))

        self._sink.put(pending)
