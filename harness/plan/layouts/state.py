"""What the training state of a layout's stages costs: collectives, waits for them, and memory.

With parameters sharded, a stage gathers the next unit while it computes one, and in its backward
also sums the gradients of the unit before:

    compute       |-- unit 0 --|-- unit 1 --|-- unit 2, forward and backward --|-- unit 1 --| ...
    collectives   | gather 1 | | gather 2 | | gather 1 |                       |gather 0|sum 2|

A unit takes the longer of both. The last unit of a pass is the first of the next and stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from harness.domain.routes import first_bucket_bytes
from harness.domain.shard_state import ShardState, shards_gradients, shards_parameters
from harness.plan.layouts.group import GroupCosts, buckets_in_turn, unit_starts
from harness.plan.layouts.links import Rings
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.sharded_state import unit_memory
from harness.plan.simulate.transfers import Floats, Ints


class StageState(NamedTuple):
    """By stage, on one device.

    Attributes:
        wait_s: that both passes of one microbatch wait for collectives.
        sync_s, hideable_s: collectives of gradients of a whole step beside those waits, and the
            part of them that computing may hide, in so many rounds, from `first_s` of a backward
            pass on, when its first bucket is full. Without sharding or tied weights `sync_s` is
            only what follows the backward pass.
        shared: stages with a weight in common, and seconds of its all-reduce.
        gather_s: that all-gathers delay the first microbatch, or follow the optimizer.
        owned_bytes: of the weights that the device updates.
        n_bytes: weights, gradients in no bucket on its way, and optimizer state.
    """

    wait_s: Floats
    sync_s: Floats
    hideable_s: Floats
    n_rounds: int
    first_s: Floats
    shared: list[tuple[Ints, float]]
    gather_s: Floats
    owned_bytes: Floats
    n_bytes: Floats


def stage_state(
    shard_state: ShardState,
    n_microbatches: int,
    *,
    ends: Ints,
    segment_cuts: Sequence[Sequence[int]],
    costs: GroupCosts,
    again_s: Floats,
    rings: Rings,
    options: SimulatorOptions,
    recomputes: bool,
) -> StageState:
    """Price the training state of the stages that end at some operators.

    Args:
        segment_cuts: of each stage into segments, counted from its first operator.
        again_s: by operator, of the forward that its backward repeats.
        recomputes: whether stages run forward again.
    """
    stages = list(pairwise((0, *ends.tolist())))
    n_rounds, is_whole = 1, shard_state == "none"
    weights, own, first_s, shared, tied_s, has_tied = _stage_weights(
        stages, ends, costs, rings, options, is_whole=is_whole
    )
    kept, gradients, wait_s = weights, weights, np.zeros(len(stages))
    reduced = options.sent_bytes_per_gradient_byte
    is_sharded = shards_gradients(shard_state, n_microbatches)
    owned = weights if is_whole else weights / rings.n_sharing
    sync_s = rings.every(own * reduced)
    last_s = sync_s * np.minimum(1.0, options.bucket_bytes / np.maximum(gradients, 1.0))
    is_freeing = shards_parameters(shard_state)
    units = [
        unit_starts(
            costs.weight_bytes[a:b],
            cuts if cuts or (recomputes and not is_freeing) else None,
            options,
            is_freeing=is_freeing,
        )
        for (a, b), cuts in zip(stages, segment_cuts, strict=True)
        if not is_whole
    ]
    gather_s = np.zeros(len(stages))
    if not (is_whole or is_freeing):
        is_ahead = options.sync_every == 1
        gather_s = (
            _ahead_s(stages, units, costs, rings) if is_ahead else rings.part("all_gather", own)
        )
        gather_s += tied_s
    if is_whole and reduced < 1 and sync_s.any():
        gradients = gradients * (1 + reduced)  # rounded copies
    if not is_whole:
        n_rounds = n_microbatches if is_sharded else 1
        last_share = last_s / np.maximum(sync_s, 1e-30)
        round_s = rings.part("reduce_scatter", own * reduced)
        outer_s = rings.outer(own * reduced)
        sync_s, last_s = n_rounds * round_s + outer_s, (round_s + outer_s) * last_share
        for users, each_s in shared:
            sync_s[users] += (n_rounds - 1) * each_s
        gradients = owned if is_sharded else gradients + owned
    if is_freeing:
        kept = owned + [
            unit_memory(np.add.reduceat(costs.weight_bytes[a:b], starts).tolist())
            for (a, b), starts in zip(stages, units, strict=True)
        ]
        wait_s, gather_s, end_s = _waits(stages, units, costs, again_s, rings, options)
        if options.overlap:
            sync_s, last_s, n_rounds = end_s, end_s, 1
    hideable_s = (sync_s - last_s) * options.overlap
    if is_whole and options.overlap:
        for stage in np.flatnonzero(~has_tied).tolist():
            sync_s[stage] = _sums_after_s(costs, *stages[stage], rings, options)
            hideable_s[stage] = 0.0
    return StageState(
        wait_s=wait_s,
        sync_s=sync_s,
        hideable_s=hideable_s,
        n_rounds=n_rounds,
        first_s=first_s,
        shared=shared,
        gather_s=gather_s,
        owned_bytes=owned,
        n_bytes=kept + gradients + owned * options.n_states,
    )


class _StageWeights(NamedTuple):
    """By stage.

    Attributes:
        n_bytes, own: of its weights, and of those that no other stage has.
        first_s, shared: see `StageState`.
        tied_s: of gathering weights that other stages have, too.
        has_tied: whether several of its operators, or another stage, have one of its weights.
    """

    n_bytes: Floats
    own: Floats
    first_s: Floats
    shared: list[tuple[Ints, float]]
    tied_s: Floats
    has_tied: NDArray[np.bool_]


def _stage_weights(
    stages: list[tuple[int, int]],
    ends: Ints,
    costs: GroupCosts,
    rings: Rings,
    options: SimulatorOptions,
    *,
    is_whole: bool,
) -> _StageWeights:
    weights = np.array([costs.weight_bytes[a:b].sum() for a, b in stages])
    first_s = np.array([_first_bucket_s(costs, a, b, options) for a, b in stages])
    none = np.zeros(len(stages))
    found = _StageWeights(weights, weights.copy(), first_s, [], none, none.astype(bool))
    for ops, n_bytes in costs.tied:
        users = np.unique(np.searchsorted(ends, ops, side="right"))
        found.has_tied[users] = True
        if len(users) == 1:  # the first bucket waits for the weight's first operator
            first_s[users] = [costs.backward_s[slice(*stages[users[0]])].sum()]
            continue
        found.own[users[0]] -= n_bytes
        weights[users[1:]] += n_bytes
        # Of gradients, and of weights one way.
        sent = n_bytes * np.array([options.sent_bytes_per_gradient_byte, 0.5])
        summed_s, gathered_s = rings.every(sent, len(users)).tolist()
        found.shared.append((users, summed_s / (1 if is_whole else 2)))
        found.tied_s[users] += gathered_s
    return found


def _first_bucket_s(costs: GroupCosts, begin: int, end: int, options: SimulatorOptions) -> float:
    """Seconds of a stage's backward until its first bucket is full."""
    n_bytes = costs.weight_bytes[begin:end][::-1].cumsum()
    n = np.searchsorted(n_bytes, first_bucket_bytes(options.bucket_bytes)) + 1
    return float(costs.backward_s[begin:end][::-1][:n].sum())


def _sums_after_s(
    costs: GroupCosts, begin: int, end: int, rings: Rings, options: SimulatorOptions
) -> float:
    """Seconds of a stage's all-reduces after its last backward: each bucket is summed once it is
    full, after the one before."""
    backward_s = costs.backward_s[begin:end][::-1].cumsum()
    ends, sizes = buckets_in_turn(costs.weight_bytes[begin:end], options)
    summed_s = rings.every(np.array(sizes) * options.sent_bytes_per_gradient_byte)
    end_s = 0.0
    for ready_s, each_s in zip(backward_s[np.array(ends, int) - 1], summed_s, strict=True):
        end_s = max(end_s, ready_s) + each_s
    return max(0.0, float(end_s - backward_s[-1]))


def _ahead_s(
    stages: list[tuple[int, int]], units: list[list[int]], costs: GroupCosts, rings: Rings
) -> Floats:
    """By stage, seconds by which gathers of new weights delay the first forward: each unit is
    gathered after the one before, and beside its forward."""
    found = []
    for (begin, end), starts in zip(stages, units, strict=True):
        n_bytes = np.add.reduceat(costs.weight_bytes[begin:end], starts)
        gathered_s = rings.part("all_gather", n_bytes).cumsum()
        forward_s = np.add.reduceat(costs.forward_s[begin:end], starts)
        end_s = 0.0
        for arrival_s, each_s in zip(gathered_s.tolist(), forward_s.tolist(), strict=True):
            end_s = max(end_s, arrival_s) + each_s
        found.append(end_s - float(forward_s.sum()))
    return np.array(found)


def _waits(
    stages: list[tuple[int, int]],
    units: list[list[int]],
    costs: GroupCosts,
    again_s: Floats,
    rings: Rings,
    options: SimulatorOptions,
) -> tuple[Floats, Floats, Floats]:
    """By stage: waits of both passes of a microbatch, the step's first all-gather, and what the
    step's last sums of gradients add."""
    found = []
    for (begin, end), starts in zip(stages, units, strict=True):
        n_bytes = np.add.reduceat(costs.weight_bytes[begin:end], starts)
        gathered = np.add.reduceat(costs.gathered_bytes[begin:end], starts)
        gather_s = rings.part("all_gather", gathered)
        last = sum(buckets_in_turn(costs.weight_bytes[begin:end], options)[1][-1:])
        sent = np.append(n_bytes, last) * options.sent_bytes_per_gradient_byte
        *sum_s, last_s = rings.part("reduce_scatter", sent) * options.overlap
        *outer_s, last_outer_s = rings.outer(sent) * options.overlap
        forward_s = np.add.reduceat(costs.forward_s[begin:end], starts)
        backward_s = np.add.reduceat((costs.backward_s + again_s)[begin:end], starts)
        wait_s = more_s = 0.0
        if len(starts) > 1:
            wait_s = _wait_s(forward_s, backward_s, gather_s, sum_s)
            all_s = [a + b for a, b in zip(sum_s, outer_s, strict=True)]
            more_s = _wait_s(forward_s, backward_s, gather_s, all_s) - wait_s
        found.append((wait_s, float(gather_s[0]), float(last_s + last_outer_s + more_s)))
    waits_s, first_s, lasts_s = np.array(found).T
    return waits_s, np.full(len(stages), first_s[0]), lasts_s


def _wait_s(
    forward_s: Floats, backward_s: Floats, gather_s: Floats, sum_s: Sequence[float]
) -> float:
    """Of the units of one stage in a microbatch, forward from the first and back to it. Both units
    at the turns stay for both passes."""
    last = len(forward_s) - 1
    computed = [*forward_s[1:last], forward_s[last] + backward_s[last], *backward_s[1:last][::-1]]
    computed.append(backward_s[0] + forward_s[0])
    gathered = [*gather_s[2:], *gather_s[:last][::-1], gather_s[1]]
    summed = [*[0.0] * last, *sum_s[2:][::-1], sum_s[1] + sum_s[0]]
    beside_s = np.array(gathered) + np.array(summed)
    return float(np.maximum(0.0, beside_s - np.array(computed)).sum())
