"""The sums of a strategy's gradients: all-reduces in a step, or sums to owners in a microbatch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from harness.domain.strategy import Strategy
from harness.measure.recorder import Recorder
from harness.runtime.engines.engine import EngineOptions
from harness.runtime.executor.gradients.counts import count_rounds
from harness.runtime.executor.gradients.sums import GradientSync, Group, sum_buckets
from harness.runtime.executor.gradients.weight_gradients import GradientBuffers
from harness.runtime.executor.program.program import Program
from harness.runtime.executor.sharded.owners import Owners, scatter_buckets
from harness.runtime.executor.state.weights import Holders, Weights
from harness.runtime.ranks.world import World


def make_sync(
    strategy: Strategy,
    programs: Mapping[int, Program],
    weights: Weights,
    holders: Holders,
    owners: Owners,
    groups: Mapping[Group, Any],
    buffers: GradientBuffers,
    world: World,
    recorder: Recorder,
    options: EngineOptions,
) -> GradientSync:
    """The sums over the ranks of this rank's replica.

    Args:
        programs: of this rank, by size of microbatch.
        holders: the replica's.
        groups: process groups by their ranks.
        buffers: receive the views of all-reduced buckets.
    """
    is_each, reduce_dtype = strategy.shards_gradients, options.reduce_dtype
    rounds = count_rounds(programs, strategy.microbatch_sizes(), is_each=is_each)
    if is_each:
        queues = scatter_buckets(owners.shared, options.bucket_bytes, world, reduce_dtype)
    else:
        trained, devices_of = weights.trainable(), holders.of
        queues = sum_buckets(trained, devices_of, options.bucket_bytes, buffers, reduce_dtype)
    # Where operators on different devices share a weight, a peer may sum its gradients only
    # after it has got what this backward leads to.
    is_blocking = all(map(holders.is_used_alike, dict(holders.trained())))
    return GradientSync(world, queues, groups, rounds, recorder, is_blocking=is_blocking)
