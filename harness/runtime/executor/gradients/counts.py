"""Count how often backward adds to each gradient, to know when it is complete."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import fx, nn

from harness.runtime.executor.gradients.deferred import Deferred
from harness.runtime.executor.program.program import Program


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
        if isinstance(called, Deferred):
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
    if not isinstance(module, Deferred):
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _autograd_parameters(child)
