"""Weight gradients that the executor computes itself, separately from input gradients.

Zero-bubble schedules fill the pipeline's bubbles with them (Qi et al., Zero Bubble Pipeline
Parallelism, 2023):

    forward | backward of inputs ... pending in a WeightQueue ... | flush: gradients of weights

Gradients of large linear layers are computed in backward, directly into their final memory: into
the bucket of the all-reduce, or added to the gradient of earlier microbatches by the matrix product
itself. Autograd would allocate a temporary first, which on a CPU takes as long as the product for
small batches.

If weights are large compared with the inputs and outputs of all microbatches of a step, the
microbatches are joined: the inputs and output gradients are kept, and one product replaces one
product and one addition per microbatch:

    backward #0 ... kept | backward #1 ... kept | backward #2, then one product over #0, #1, #2
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from harness.domain.routes import LARGE_ELEMENTS
from harness.domain.schedule import SCHEDULES
from harness.runtime.executor.geometry.layout import Layout, Part
from harness.runtime.executor.gradients.weight_gradients import (
    ConvProduct,
    GradientBuffers,
    LinearProduct,
    Product,
    multiply,
)
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.shards.base import has_plain_weights
from harness.runtime.executor.shards.conv import ConvShard
from harness.runtime.executor.shards.dense import LinearShard
from harness.runtime.ranks.world import World

# (input, gradient of the output) of one call of a module.
Call = tuple[Tensor, Tensor]
# Computes gradients and adds them to `.grad`; returns the parameters. Holds the tensors it needs.
Pending = Callable[[], list[nn.Parameter]]

# Fewest elements of a weight for which joining microbatches pays: 1 MiB of fp32.
JOINED_ELEMENTS = 1 << 18
# Largest ratio of kept tensors to weights, in bytes, because keeping costs copies and memory.
KEPT_SHARE = 1.0


class ImmediateSink:
    """Computes gradients as soon as they are put, within backward.

    Args:
        reached: called with each parameter after an addition to its gradient.
    """

    def __init__(self, reached: Callable[[nn.Parameter], None]) -> None:
        self._reached = reached

    def put(self, pending: Pending) -> None:
        for parameter in pending():
            self._reached(parameter)


class WeightQueue:
    """Pending weight gradients by microbatch, in the order of backward."""

    def __init__(self) -> None:
        self._pending: dict[int, list[Pending]] = {}
        self._microbatch = 0

    @contextmanager
    def filling(self, microbatch: int) -> Iterator[None]:
        """Assign gradients that are put within the context to `microbatch`."""
        before, self._microbatch = self._microbatch, microbatch
        try:
            yield
        finally:
            self._microbatch = before

    def put(self, pending: Pending) -> None:
        self._pending.setdefault(self._microbatch, []).append(pending)

    @torch.no_grad()
    def flush(self, microbatch: int | None = None) -> list[nn.Parameter]:
        """Add the gradients of one or all microbatches to `.grad`; return the parameters, once."""
        wanted = list(self._pending) if microbatch is None else [microbatch]
        touched: dict[int, nn.Parameter] = {}
        for key in wanted:
            for pending in self._pending.pop(key, []):
                for parameter in pending():
                    touched[id(parameter)] = parameter
        return list(touched.values())


Sink = ImmediateSink | WeightQueue


def can_defer(module: nn.Module) -> bool:
    # Gradients of complex weights are products with conjugates, which are left to autograd.
    if not has_plain_weights(module) or any(x.is_complex() for x in module.parameters()):
        return False
    if isinstance(module, nn.Conv2d):
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return _is_linear(module) or (isinstance(module, ConvShard) and module.is_single)


def _is_linear(module: nn.Module) -> bool:
    is_shard = isinstance(module, LinearShard) and not module.is_transposed
    return is_shard or isinstance(module, nn.Linear)


def _weight(module: nn.Module) -> Tensor:
    weight: Tensor = getattr(module, "weight")  # noqa: B009  (nn.Module does not declare it)
    return weight


def is_large_linear(module: nn.Module) -> bool:
    """Whether writing the weight's gradient directly into its buffer pays.

    Does not read parametrized weights, because computing them may change buffers.
    """
    is_plain = _is_linear(module) and has_plain_weights(module)
    return is_plain and _weight(module).numel() >= LARGE_ELEMENTS


class Deferred(nn.Module):
    """A module whose weight gradients go to a sink.

    It reads the parameters of `inner` in each call. Its backward pass neither changes their `.grad`
    nor calls their hooks.

    Args:
        buffers: of gradients that stay until the step ends; None: each gets new memory.
        n_joined: number of calls whose gradients are computed together.
        calls: list that keeps them until then, shared by the wrappers of one module for several
            microbatch sizes; a new list by default.
    """

    def __init__(
        self,
        inner: nn.Module,
        sink: Sink,
        buffers: GradientBuffers | None,
        *,
        n_joined: int = 1,
        calls: list[Call] | None = None,
    ) -> None:
        super().__init__()
        self.inner, self.n_joined = inner, n_joined
        self._sink = sink
        self._gradient_buffers = buffers if is_large_linear(inner) else None
        self._calls = [] if calls is None else calls

    @property
    def is_immediate(self) -> bool:
        return isinstance(self._sink, ImmediateSink)

    def forward(self, *inputs: Tensor, **named: Tensor) -> Tensor:
        inner: Any = self.inner
        inputs = *inputs, *named.values()
        if isinstance(inner, LinearShard | ConvShard):
            (x,) = inner.taken(inputs)
            return inner.compute(x, self._multiply)
        if isinstance(inner, nn.Linear):
            return self._multiply(inputs[0], inner.weight, inner.bias)
        arguments = inner.stride, inner.padding, inner.dilation, inner.groups
        return self._multiply(inputs[0], inner.weight, inner.bias, *arguments)

    def _multiply(self, x: Tensor, *weights: Any) -> Tensor:
        """As F.linear or F.conv2d."""
        is_linear = _is_linear(self.inner)
        product = LinearProduct(*weights) if is_linear else ConvProduct(*weights)
        return multiply(product, x, self._put)

    def _put(self, product: Product, x: Tensor, gradient: Tensor) -> None:
        """Pass a call to the sink, or keep it until all calls to join have been made."""
        x, gradient = product.in_rows(x), product.in_rows(gradient)
        if self.n_joined > 1 or not self.is_immediate:
            # A parameter added to the output, such as positions, may have the same memory for its
            # gradient, to which the next microbatch adds.
            gradient = gradient.clone()
        self._calls.append((x, gradient))
        if len(self._calls) < self.n_joined:
            return
        kept = self._calls.copy()
        self._calls.clear()

        def pending() -> list[nn.Parameter]:
            x, gradient = kept[0]
            if len(kept) > 1:
                x, gradient = (torch.cat(each) for each in zip(*kept, strict=True))
                kept.clear()
            return product.add_gradients(x, gradient, self._gradient_buffers)

        self._sink.put(pending)


def _is_called_again(layout: Layout, path: str) -> bool:
    """Whether any device has several tasks that call the model's module at `path`."""
    callers = [
        name
        for name, node in layout.captured.nodes.items()
        if node.op == "call_module" and node.target == path
    ]
    devices = [part.device for name in callers for part in layout.parts[name]]
    return len(set(devices)) < len(devices)


def _io_bytes(layout: Layout, part: Part) -> int:
    """Bytes of a task's inputs and outputs."""
    regions = [(want.value, want.block) for _, want in layout.reads(part)]
    node = layout.captured.nodes[part.operator]
    if node in layout.values.tensors:
        regions.append((node.name, layout.region(node, part)))
    return sum(
        math.prod(layout.sizes_of(value, region)) * layout.tensor(value).dtype.itemsize
        for value, region in regions
    )


class WeightGradients:
    """How this rank computes the weight gradients of each module, and those that are pending.

    Args:
        layout: of the largest microbatch.
        reached: called with each parameter after an addition to its gradient.

    Attributes:
        split: queues of the stages that compute weight gradients in actions of their own: under
            zero bubble all but the first, whose input gradients no stage waits for.
    """

    def __init__(
        self,
        plan: ExecutorPlan,
        layout: Layout,
        world: World,
        reached: Callable[[nn.Parameter], None],
    ) -> None:
        strategy, self._layout, self._reached = plan.strategy, layout, reached
        stages = range(1, len(strategy.stages))
        is_split = SCHEDULES[strategy.schedule].splits_backward
        self.split = {stage: WeightQueue() for stage in stages if is_split}
        # Joined ones are computed after the gradients that the previous stage awaits.
        self._joined = {stage: WeightQueue() for stage in stages if not is_split}
        self._n_microbatches = strategy.n_microbatches
        # Calls of each module that are kept in this step, over all microbatch sizes.
        self._calls: dict[str, list[Call]] = {}
        self.buffers: GradientBuffers = {}
        self._are_kept = not strategy.shards_gradients
        has_copies = world.size > 1 or strategy.n_microbatches > 1
        # On a GPU the overhead of an autograd function in Python exceeds the time of a copy, and it
        # would cut a compiled segment.
        is_faster = world.device.type == "cpu" and not plan.is_compiled
        # Stashed weights have no buckets, and buckets of sharded gradients are packed by owner.
        has_buckets = not (plan.is_asynchronous or strategy.shards_gradients)
        is_immediate = has_copies and is_faster and has_buckets
        self._immediate = ImmediateSink(reached) if is_immediate else None

    def joins(self, module: nn.Module, operator: str, path: str) -> bool:
        """Whether to compute the gradients of all microbatches by one product, of a module that can
        be `Deferred`.

        This depends on the layout only, not on the device, so that devices with the same weights
        have their gradients at the same time.

        Args:
            path: the module's path in its segment; in the model, for modules of the model.
        """
        layout, n = self._layout, self._n_microbatches
        if n == 1 or _is_called_again(layout, path):
            return False
        if is_large_linear(module):  # which is added in place
            return False
        n_bytes = n * max(_io_bytes(layout, p) for p in layout.parts[operator])
        weight = _weight(module)
        return weight.numel() >= JOINED_ELEMENTS and n_bytes <= KEPT_SHARE * weight.nbytes

    def wrap(self, module: nn.Module, stage: int, operator: str | None, path: str) -> nn.Module:
        """The module, wrapped to compute its weight gradients outside of autograd if that pays.

        Args:
            operator: of which it is the module; None for modules that assemble values.
            path: as for `joins`.
        """
        if not can_defer(module):
            return module
        queue, immediate = self.split.get(stage), self._immediate
        buffers = self.buffers if self._are_kept else None
        if immediate and operator and self.joins(module, operator, path):
            sink = queue or self._joined.get(stage) or immediate
            n, calls = self._n_microbatches, self._calls.setdefault(path, [])
            return Deferred(module, sink, buffers, n_joined=n, calls=calls)
        own = queue or (immediate if is_large_linear(module) else None)
        return Deferred(module, own, buffers) if own else module

    def flush(self, stage: int, microbatch: int) -> None:
        """Compute the gradients of a microbatch that a stage has split off."""
        for parameter in self.split[stage].flush(microbatch):
            self._reached(parameter)

    def flush_joined(self, stage: int) -> None:
        """Compute the gradients of a stage whose microbatches have all been joined."""
        for parameter in self._joined[stage].flush() if stage in self._joined else ():
            self._reached(parameter)
