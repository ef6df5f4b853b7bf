"""The sums of a strategy's gradients, once a step or a microbatch: all-reduces, or to owners.

How often backward adds to each gradient tells when it is complete.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import fx, nn

from harness.domain.shard_state import Group, equal_nodes
from harness.domain.strategy import Strategy
from harness.measure.recorder import Recorder
from harness.runtime.engines.engine import EngineOptions
from harness.runtime.executor.gradients.deferred import Deferred
from harness.runtime.executor.gradients.sums import GradientSync, SumGroups, sum_buckets
from harness.runtime.executor.gradients.weight_gradients import GradientBuffers
from harness.runtime.executor.program.program import Program
from harness.runtime.executor.sharded.owners import Owners
from harness.runtime.executor.sharded.replicas import Replicas
from harness.runtime.executor.sharded.scatters import scatter_buckets
from harness.runtime.executor.shards.base import called_module
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
    counted = Calls(Counter(set(_autograd_parameters(module))), set(), Counter())
    for node in module.graph.nodes:
        called = called_module(node, module)
        if isinstance(called, Deferred):
            if called.n_joined > 1:
                counted.joined.update(called.parameters())
            elif called.is_immediate:
                counted.each.update(called.parameters())
            else:
                counted.waiting.update(called.parameters())
    return counted


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
            calls = [backward_calls(s.module) for s in segments if s.is_differentiable]
            for counted in calls:
                uses.update({parameter: n * k for parameter, k in counted.each.items()})
                joined_of_size.update(counted.joined)
            waiting: set[nn.Parameter] = set().union(*(counted.waiting for counted in calls))
            uses.update(dict.fromkeys(waiting, n))
        joined |= joined_of_size  # because all sizes are joined together
    return uses + joined


def _autograd_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters whose gradients autograd computes."""
    if not isinstance(module, Deferred):
        yield from module.parameters(recurse=False)
        for child in module.children():
            yield from _autograd_parameters(child)


def may_block(holders: Holders) -> bool:
    """Whether backward may wait for sums: not where operators on different devices share a weight,
    of whose gradients a peer may have its own only after it has got what this backward leads to."""
    return all(map(holders.is_used_alike, dict(holders.trained())))


def make_groups(
    holders: Holders, replicas: Replicas, groups: Groups, world: World, reduce_dtype: str
) -> dict[Group, SumGroups]:
    """This rank's process groups for gradients, by the holders of slices; all ranks must make
    them."""
    is_scattered = replicas.is_sharded
    # Else waiting for sums between nodes could wait for this rank.
    is_apart = world.backend == "nccl" or may_block(holders)

    def made(group: Group, *, is_scattered: bool) -> Any:
        if len(group) == 1:
            return None
        is_quantized = reduce_dtype == "int8"
        return groups.for_gradients(group, is_scattered=is_scattered, is_quantized=is_quantized)

    parts = {part for group in holders.groups() for part in replicas.split(group)}
    groups_of: dict[Group, SumGroups] = {}
    for devices in sorted(part for part in parts if len(part) > 1):
        shared = rows = replicas.sharing_groups(devices) if is_scattered else [devices]
        if len(shared) == 1 and is_scattered and is_apart:
            nodes = equal_nodes(devices, world.hostnames)
            rows = nodes if len(nodes[0]) > 1 else rows
        columns = list(zip(*rows, strict=True)) if len(rows) > 1 else []
        inner = [made(row, is_scattered=is_scattered) for row in rows]
        outer = [made(column, is_scattered=len(shared) == 1) for column in columns]
        for row, group in zip(rows, inner, strict=True):
            if world.rank in row:
                between = outer[row.index(world.rank)] if outer else None
                groups_of[devices] = SumGroups(group, between, rows if len(shared) == 1 else [row])
    return groups_of


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
    sizes, n_bytes = strategy.microbatch_sizes(), options.bucket_bytes
    rounds = count_rounds(programs, sizes, is_each=strategy.shards_gradients)
    reduce_dtype = options.reduce_dtype
    if owners.is_sharded:
        queues = scatter_buckets(owners.shared, holders.of, groups, n_bytes, world, reduce_dtype)
    else:
        queues = sum_buckets(weights.trainable(), holders.of, n_bytes, buffers, reduce_dtype)
    return GradientSync(world, queues, groups, rounds, recorder, is_blocking=may_block(holders))
