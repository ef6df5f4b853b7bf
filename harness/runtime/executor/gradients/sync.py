"""The sums of a strategy's gradients: all-reduces in a step, or sums to owners in a microbatch.

How often backward adds to each gradient tells when it is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from torch import fx, nn

from harness.domain.strategy import Strategy
from harness.measure.recorder import Recorder
from harness.runtime.engines.engine import EngineOptions
from harness.runtime.executor.gradients.deferred import Deferred
from harness.runtime.executor.gradients.sums import GradientSync, Group, SumGroups, sum_buckets
from harness.runtime.executor.gradients.weight_gradients import GradientBuffers
from harness.runtime.executor.program.program import Program
from harness.runtime.executor.sharded.owners import Owners, Sharing, scatter_buckets
from harness.runtime.executor.state.weights import Holders, Weights
from harness.runtime.executor.transport.groups import Groups
from harness.runtime.ranks.world import World


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
    return [_count_uses(programs, each) for each in counts]


def _count_uses(
    programs: Mapping[int, Program], n_of_size: Mapping[int, int]
) -> Counter[nn.Parameter]:
    """Additions by some microbatches, whose number is given by size."""
    uses: Counter[nn.Parameter] = Counter()
    joined: Counter[nn.Parameter] = Counter()
    for size, n in n_of_size.items():
        joined_of_size: Counter[nn.Parameter] = Counter()
        for segments in programs[size].stages.values():
            calls = [backward_calls(one.module) for one in segments if one.is_differentiable]
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


def make_groups(
    holders: Iterable[Group], strategy: Strategy, sharing: Sharing, groups: Groups, rank: int
) -> dict[Group, SumGroups]:
    """This rank's process groups for gradients, by the holders of slices; all ranks must call it.

    Args:
        holders: sets of ranks, in the same order on every rank.
    """
    found: dict[Group, SumGroups] = {}
    for devices in (devices for devices in holders if len(devices) > 1):
        if not strategy.shards_gradients:
            made = groups.for_gradients(devices)
            if rank in devices:
                found[devices] = SumGroups(made)
            continue
        shared = sharing(devices)
        inner = [groups.for_gradients(g, is_scattered=True) if len(g) > 1 else None for g in shared]
        alike = list(zip(*shared, strict=True))
        outer = [groups.for_gradients(g) if len(g) > 1 else None for g in alike]
        for group, made in zip(shared, inner, strict=True):
            if rank in group:
                found[devices] = SumGroups(made, outer[group.index(rank)])
    return found


def make_sync(
    strategy: Strategy,
    programs: Mapping[int, Program],
    weights: Weights,
    holders: Holders,
    owners: Owners,
    groups: Mapping[Group, SumGroups],
    buffers: GradientBuffers,
    world: World,
    recorder: Recorder,
    options: EngineOptions,
) -> GradientSync:
    """The sums over the ranks of this rank's replica.

    Args:
        programs: of this rank, by size of microbatch.
        holders: the replica's.
        groups: by the holders of slices.
        buffers: receive the views of all-reduced buckets.
    """
    is_each, reduce_dtype = strategy.shards_gradients, options.reduce_dtype
    rounds = count_rounds(programs, strategy.microbatch_sizes(), is_each=is_each)
    n_bytes = options.bucket_bytes
    if is_each:
        queues = scatter_buckets(owners.shared, holders.of, n_bytes, world, reduce_dtype)
    else:
        queues = sum_buckets(weights.trainable(), holders.of, n_bytes, buffers, reduce_dtype)
    # Where operators on different devices share a weight, a peer may sum its gradients only
    # after it has got what this backward leads to.
    is_blocking = all(map(holders.is_used_alike, dict(holders.trained())))
    return GradientSync(world, queues, groups, rounds, recorder, is_blocking=is_blocking)
