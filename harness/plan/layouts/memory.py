"""Bytes of activations at the peak of a layout's stage, by the simulator's rules."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from harness.domain.strategy import ShardState
from harness.plan.layouts.group import GroupCosts
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.sharded_state import bucket_memory, fill
from harness.plan.simulate.transfers import Floats


def segment_starts(
    shard_state: ShardState,
    stage: tuple[int, int],
    cuts: Sequence[int],
    costs: GroupCosts,
    options: SimulatorOptions,
    *,
    stays: bool,
) -> list[int]:
    """Where the segments begin that a stage runs again, each as a whole: at its cuts, where its
    devices wait for each other, and, with sharded parameters, with each unit.

    Args:
        stays: operators after the last cut do not run again.
    """
    begin, end = stage
    found = {begin, *(begin + cut for cut in cuts)}
    last = max(found) if stays else end
    waits = begin + 1 + np.flatnonzero(np.diff(costs.segment[begin:end]))
    found.update(waits[waits < last].tolist())
    if shard_state == "parameters":
        weights = costs.weight_bytes[begin:end].tolist()
        found.update(begin + cut for cut in fill(weights, options.bucket_bytes)[:-1])
    return sorted(found)


def active_bytes(
    costs: GroupCosts,
    end: int,
    starts: Sequence[int],
    passed_bytes: Floats,
    entering: float,
    n_microbatches: int,
    n_in_flight: int,
    *,
    recomputes: bool,
    has_alone: bool,
) -> float:
    """The peak of a stage's activations, and of gradients beside those of all its weights.

    Args:
        passed_bytes: by operator, of gradients while its backward runs.
        entering: bytes of values that other stages have sent for a microbatch.
        has_alone: gradients of the group's alone weights are allocated in backward.
    """
    waiting, peak = _activation_bytes(costs, end, starts, passed_bytes, recomputes=recomputes)
    others = (n_in_flight - 1) * (entering + waiting)
    if not has_alone or n_microbatches > n_in_flight:
        return others + entering + peak
    # Most is in flight in the first backward only, which allocates these gradients one by one.
    missing = costs.alone_bytes[starts[0] : end].cumsum()
    passed_bytes = passed_bytes.copy()
    passed_bytes[starts[0] + 1 : end] -= missing[:-1]
    _, first = _activation_bytes(costs, end, starts, passed_bytes, recomputes=recomputes)
    second = peak - entering - waiting if n_microbatches > 1 else 0.0
    return others + entering + max(first, second)


def _activation_bytes(
    costs: GroupCosts, end: int, starts: Sequence[int], passed_bytes: Floats, *, recomputes: bool
) -> tuple[float, float]:
    """Bytes of one microbatch in a stage, without values that other stages have sent: those that
    are kept until its backward begins, and the peak, with gradients.

    Args:
        starts: of the segments, of which one exists at once where the stage recomputes.
    """
    begin, last_reader = starts[0], costs.last_reader
    output, received = costs.output_bytes[begin:end], costs.received_bytes[begin:end]
    kept = np.maximum(costs.kept_bytes[begin:end], output * (last_reader[begin:end] >= end))
    kept = kept + received
    if not recomputes:
        return float(kept.sum()), float((kept.cumsum() + passed_bytes[begin:end]).max())
    waiting = peak = 0.0
    for a, b in pairwise((*starts, end)):
        own = slice(a - begin, b - begin)
        peak = max(peak, waiting + float((kept[own].cumsum() + passed_bytes[a:b]).max()))
        leaves = costs.leaves[a:b] | (last_reader[a:b] >= b)
        waiting += float((received[own] + output[own] * leaves).sum())
    return waiting, peak


def bucket_bytes_at(weights: Floats, n_microbatches: int, options: SimulatorOptions) -> Floats:
    """By operator of a stage, bytes of sharded gradients' buckets while its backward runs, as by
    `sharded_state.passing_bytes`.

    Args:
        weights: bytes of each operator's gradients.
    """
    in_turn = weights[::-1]
    ends = fill(in_turn.tolist(), options.bucket_bytes)
    sizes = [float(in_turn[a:b].sum()) for a, b in pairwise((0, *ends))]
    found = np.full(len(weights), 2 * sizes[-1] * (n_microbatches > 1))
    for begin, n_bytes in zip((0, *ends), bucket_memory(sizes), strict=False):
        found[begin + int((in_turn[begin:] > 0).argmax()) :] = n_bytes
    return found[::-1]
