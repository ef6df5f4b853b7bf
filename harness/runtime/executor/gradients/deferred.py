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

Decide which weight gradients join the microbatches of a step.

The decision depends on the layout only, not on the device, so that devices with the same weights
have their gradients at the same time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx, nn

from harness.runtime.executor.geometry.layout import Layout, Part
from harness.runtime.executor.gradients.weight_gradients import (
    ConvProduct,
    GradientBuffers,
    LinearProduct,
    Product,
    multiply,
)
from harness.runtime.executor.options import ExecutorPlan
from harness.runtime.executor.program.program import Program
from harness.runtime.executor.shards.base import has_plain_weights
from harness.runtime.executor.shards.conv import ConvShard
from harness.runtime.executor.shards.dense import LinearShard
from harness.runtime.ranks.world import World

# (input, gradient of the output) of one call of a module.
Call = tuple[Tensor, Tensor]
# Computes gradients and adds them to `.grad`; returns the parameters. Holds the tensors it needs.
Pending = Callable[[], list[nn.Parameter]]

# Fewest elements of a weight whose gradient pays for an autograd function in Python: 4 MiB of fp32,
# more than the cache of a core. At 1 MiB the function takes longer than the copies that it saves.
LARGE_ELEMENTS = 1 << 20
# Fewest elements of a weight for which joining microbatches pays: 1 MiB of fp32.
JOINED_ELEMENTS = 1 << 18
# Largest ratio of kept tensors to weights, in bytes, because keeping costs copies and memory.
KEPT_SHARE = 1.0


class Sink(Protocol):
    """Receives pending gradients."""

    def put(self, pending: Pending) -> None: ...


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


def immediate_sink(
    world: World, plan: ExecutorPlan, reached: Callable[[nn.Parameter], None]
) -> ImmediateSink | None:
    """A sink that writes gradients directly into buckets; None if that saves no copies.

    Asynchronous training uses none, because stashed weights have no buckets, nor do sharded
    gradients, whose buckets are packed by owner.
    """
    has_copies = world.size > 1 or plan.strategy.n_microbatches > 1
    # On a GPU the overhead of an autograd function in Python exceeds the time of a copy.
    is_faster = world.device.type == "cpu"
    has_buckets = not (plan.is_asynchronous or plan.strategy.shards_gradients)
    return ImmediateSink(reached) if has_copies and is_faster and has_buckets else None


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


def defer(
    module: nn.Module,
    sink: Sink,
    buffers: GradientBuffers,
    *,
    n_joined: int = 1,
    calls: list[Call] | None = None,
) -> nn.Module | None:
    """Wrap a module so that its weight gradients go to `sink`; None for unsupported modules.

    The wrapper reads the parameters of `module` in each call. Its backward pass neither changes
    their `.grad` nor calls their hooks.

    Args:
        n_joined: number of calls whose gradients are computed together.
        calls: list that keeps them until then, shared by the wrappers of one module for several
            microbatch sizes; a new list by default.
    """
    if not _can_defer(module):
        return None
    return _Deferred(module, sink, buffers, n_joined, [] if calls is None else calls)


def _can_defer(module: nn.Module) -> bool:
    if not has_plain_weights(module):
        return False
    if isinstance(module, nn.Conv2d):
        return module.padding_mode == "zeros" and not isinstance(module.padding, str)
    return _is_linear(module) or (isinstance(module, ConvShard) and module.is_single)


def _is_linear(module: nn.Module) -> bool:
    is_shard = isinstance(module, LinearShard) and not module.is_transposed
    return is_shard or isinstance(module, nn.Linear)


def is_worth_joining(module: nn.Module, n_bytes: int) -> bool:
    """Whether to join a step's microbatches for a module's weights.

    False if their gradients are added in place (`is_large_linear`).

    Args:
        n_bytes: inputs and outputs of all microbatches.
    """
    if not _can_defer(module) or is_large_linear(module):
        return False
    weight = _weight(module)
    return weight.numel() >= JOINED_ELEMENTS and n_bytes <= KEPT_SHARE * weight.nbytes


def _weight(module: nn.Module) -> Tensor:
    weight: Tensor = getattr(module, "weight")  # noqa: B009  (nn.Module does not declare it)
    return weight


def is_large_linear(module: nn.Module) -> bool:
    """Whether writing the weight's gradient directly into its buffer pays.

    Does not read parametrized weights, because computing them may change buffers.
    """
    is_plain = _is_linear(module) and has_plain_weights(module)
    return is_plain and _weight(module).numel() >= LARGE_ELEMENTS


class Calls(NamedTuple):
    """How often a segment's backward adds to the gradient of each parameter.

    Attributes:
        each: additions per microbatch: one by autograd, which sums all uses of a parameter, or one
            per call of a module with an `ImmediateSink`.
        waiting: parameters whose gradients wait in a queue.
        joined: additions per step.
    """

    each: Counter[nn.Parameter]
    waiting: set[nn.Parameter]
    joined: Counter[nn.Parameter]


def backward_calls(module: fx.GraphModule) -> Calls:
    """Count the additions of a segment's backward to its gradients."""
    found = Calls(Counter(set(_autograd_parameters(module))), set(), Counter())
    for node in module.graph.nodes:
        called = module.get_submodule(str(node.target)) if node.op == "call_module" else None
        if isinstance(called, _Deferred):
            if called.n_joined > 1:
                found.joined.update(called.parameters())
            elif called.is_immediate:
                found.each.update(called.parameters())
            else:
                found.waiting.update(called.parameters())
    return found


def count_rounds(
    programs: Mapping[int, Program], sizes: Sequence[int], *, is_each: bool
) -> list[Counter[nn.Parameter]]:
    """How often backward adds to the gradient of each parameter before each sum over devices.

    Args:
        programs: by microbatch size.
        sizes: of a step's microbatches.
        is_each: gradients are summed after each microbatch, not once a step.
    """
    counts = [Counter([size]) for size in sizes] if is_each else [Counter(sizes)]
    return [
        _count_uses((n, programs[size].differentiable_modules()) for size, n in each.items())
        for each in counts
    ]


def _count_uses(
    sizes: Iterable[tuple[int, Iterable[Iterable[fx.GraphModule]]]],
) -> Counter[nn.Parameter]:
    """Additions by some microbatches: for each size, their number and the segments by stage."""
    uses: Counter[nn.Parameter] = Counter()
    joined: Counter[nn.Parameter] = Counter()
    for n, stages in sizes:
        joined_of_size: Counter[nn.Parameter] = Counter()
        for modules in stages:
            calls = [backward_calls(module) for module in modules]
            for one in calls:
                uses.update({parameter: n * k for parameter, k in one.each.items()})
                joined_of_size.update(one.joined)
            waiting: set[nn.Parameter] = set().union(*(one.waiting for one in calls))
            uses.update(dict.fromkeys(waiting, n))
        joined |= joined_of_size  # because all sizes are joined together
    return uses + joined


def _autograd_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters whose gradients autograd computes."""
    if not isinstance(module, _Deferred):
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _autograd_parameters(child)


class _Deferred(nn.Module):
    def __init__(
        self,
        inner: nn.Module,
        sink: Sink,
        buffers: GradientBuffers,
        n_joined: int,
        calls: list[Call],
    ) -> None:
        super().__init__()
        self.inner, self.n_joined = inner, n_joined
        self._sink = sink
        self._gradient_buffers = buffers if is_large_linear(inner) else None
        self._calls = calls

    @property
    def is_immediate(self) -> bool:
        return isinstance(self._sink, ImmediateSink)

    def forward(self, *inputs: Tensor) -> Tensor:
        inner: Any = self.inner
        if isinstance(inner, LinearShard | ConvShard):
            return inner.compute(inputs, self._multiply)
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


class Joining:
    """The joined calls of a step, over all microbatch sizes.

    Args:
        layout: layout of the largest microbatch.
        n_microbatches: microbatches per step.
    """

    def __init__(self, layout: Layout, n_microbatches: int) -> None:
        self._layout, self.n_microbatches = layout, n_microbatches
        self._calls: dict[str, list[Call]] = {}

    def includes(self, operator: str, path: str, module: nn.Module) -> bool:
        """Whether to compute the module's gradients of all microbatches by one product.

        Args:
            path: the module's path in its segment; in the model, for modules of the model.
        """
        if self.n_microbatches == 1 or _is_called_again(self._layout, path):
            return False
        largest = max(_io_bytes(self._layout, part) for part in self._layout.parts[operator])
        return is_worth_joining(module, self.n_microbatches * largest)

    def calls(self, path: str) -> list[Call]:
        """The list of calls kept so far in this step, of all microbatch sizes."""
        return self._calls.setdefault(path, [])


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
