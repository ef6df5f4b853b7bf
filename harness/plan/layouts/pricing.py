"""The step of a layout, stage by stage.

Replicas are alike, and so are the devices of a tensor-parallel group: a stage is one device, and
`flow` says when its last backward ends. Buckets of gradients are summed beside that backward, each
when it is full. Of sharded or tied ones only the total counts: the backward hides a part of it once
the first bucket is full, but not the last bucket. Weights that several stages share are summed
after the last backward of all of these. Rings of a node's devices share its NIC.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from harness.domain.schedule import AHEAD, ScheduleName
from harness.domain.shard_state import ShardState, shards_gradients, shards_parameters
from harness.plan.layouts.degrees import ParallelLayout
from harness.plan.layouts.group import GroupCosts, active_bytes, bucket_bytes_at, segment_starts
from harness.plan.layouts.links import NodeLinks, Rings, queues, transfer_seconds
from harness.plan.layouts.state import StageState, stage_state
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.transfers import Floats, Ints
from harness.units import format_count


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout with its flow, time and memory.

    Attributes:
        segments: most of each stage, each of which runs forward again; 0 keeps all activations.
    """

    layout: ParallelLayout
    n_microbatches: int
    segments: int
    shard_state: ShardState
    step_s: float
    memory_bytes: int
    schedule: ScheduleName = "1f1b"

    @property
    def name(self) -> str:
        name = f"{self.layout.name}, {format_count(self.n_microbatches, 'microbatch')}"
        name += ", recomputed" if self.segments else ""
        name += " in segments" if self.segments > 1 else ""
        name += "" if self.schedule == "1f1b" else f", {self.schedule}"
        return name if self.shard_state == "none" else f"{name}, sharded {self.shard_state}"


class _Stages(NamedTuple):
    """The stages of a layout, and seconds of one microbatch on a device of each.

    Attributes:
        ends: one more than each stage's last operator.
        starts: of each stage, the first operators of its segments.
        again_s: by operator, of the forward that is repeated.
        forward_s, backward_s: without waits.
        repeated_s: of the forward that is repeated, and of that the part before the gradient
            arrives, `ahead_s`.
    """

    ends: Ints
    starts: list[list[int]]
    again_s: Floats
    forward_s: Floats
    backward_s: Floats
    repeated_s: Floats
    ahead_s: Floats

    @property
    def spans(self) -> list[tuple[int, int]]:
        """First operator and end of each."""
        ends: list[int] = self.ends.tolist()
        return list(zip([0, *ends], ends, strict=False))


def price(
    layout: ParallelLayout,
    n_microbatches: int,
    *,
    segments: int,
    segment_cuts: Sequence[Sequence[int]],
    shard_state: ShardState,
    costs: GroupCosts,
    links: NodeLinks,
    options: SimulatorOptions,
) -> Choice:
    """The step and the fullest device's memory.

    Args:
        layout: with its cuts.
        segment_cuts: of each stage into segments, counted from its first operator.
    """
    rings, asked_state = Rings(layout, shard_state, links), shard_state
    if shards_parameters(shard_state) and rings.n_sharing == 1:
        shard_state = "gradients_in_node"  # parameters are not cut
    repeats = costs.again_s * (segments > 0)
    stages = _stages(layout, n_microbatches, repeats, segment_cuts, shard_state, costs, options)
    state = stage_state(
        shard_state,
        n_microbatches,
        ends=stages.ends,
        segment_cuts=segment_cuts,
        costs=costs,
        again_s=stages.again_s,
        rings=rings,
        options=options,
        recomputes=segments > 0,
    )
    pairs, crossing, entering = _crossing(costs, stages.ends)
    nodes = pairs * layout.tp * layout.dp // links.n_each
    sent = transfer_seconds(layout, crossing, links, nodes[0] < nodes[1])
    flow = pairs, crossing[0] > 0, *sent, queues(nodes)
    is_sharded = shards_gradients(shard_state, n_microbatches)
    has_copies = n_microbatches > 1 or layout.dp > 1
    passed = costs.passed_bytes[int(has_copies)].copy()
    for begin, end in stages.spans if is_sharded else ():
        weights = costs.weight_bytes[begin:end]
        passed[begin:end] += bucket_bytes_at(weights, n_microbatches, options)
    in_flight = np.minimum(n_microbatches, layout.pp - np.arange(layout.pp))
    active = [
        active_bytes(
            costs, end, own, passed, entering_bytes, n_microbatches, n,
            recomputes=segments > 0, has_alone=layout.dp == 1,
        )
        for own, end, entering_bytes, n in zip(
            stages.starts, stages.ends.tolist(), entering.tolist(), in_flight.tolist(), strict=True
        )
    ]  # fmt: skip
    fed = [float(costs.fed_bytes[begin:end].max()) * n_microbatches for begin, end in stages.spans]
    memory = state.n_bytes + options.reserved_bytes + np.array(active) + np.array(fed)
    memory += _sums(costs.frozen_bytes, stages.ends)
    if costs.knows_saved:
        memory += _messages_bytes(pairs, crossing[0], in_flight, n_microbatches)
    return Choice(
        layout=layout,
        n_microbatches=n_microbatches,
        segments=segments,
        shard_state=asked_state,
        step_s=_step_s(layout, n_microbatches, stages, state, flow, options),
        memory_bytes=int(np.ceil(memory.max())),
    )


def _stages(
    layout: ParallelLayout,
    n_microbatches: int,
    repeats: Floats,
    segment_cuts: Sequence[Sequence[int]],
    shard_state: ShardState,
    costs: GroupCosts,
    options: SimulatorOptions,
) -> _Stages:
    """Cut the operators into stages.

    Args:
        repeats: seconds by operator of the forward that its backward repeats.
    """
    ends = np.append(np.array(layout.cuts or (), dtype=np.int64), len(costs.forward_s))
    spans = list(zip([0, *ends.tolist()], ends.tolist(), strict=False))
    recomputes_ahead = options.recomputes_ahead and not shards_parameters(shard_state)
    # Where backward follows forward at once, the values of the last segment are still there.
    stays = np.arange(layout.pp) >= (0 if n_microbatches == 1 else layout.pp - 1)
    stays &= recomputes_ahead
    starts = [
        segment_starts(shard_state, stage, cuts, costs, options, stays=stay)
        for stage, cuts, stay in zip(spans, segment_cuts, stays.tolist(), strict=True)
    ]
    for own, (_, end), stay in zip(starts, spans, stays.tolist(), strict=True):
        if stay:
            repeats[own[-1] : end] = 0.0
    every = np.concatenate(starts)  # a frozen segment has no backward to run again for
    repeats *= np.repeat(np.maximum.reduceat(costs.returns, every), np.diff(every, append=ends[-1]))
    forward_s, backward_s = _sums(costs.forward_s, ends), _sums(costs.backward_s, ends)
    forward_s[:-1] -= costs.turn_s[0, ends[:-1] - 1]
    backward_s[1:] -= costs.turn_s[1, ends[:-1]]
    ahead = np.array([repeats[own[-1] : end].sum() for own, end in zip(starts, ends, strict=True)])
    return _Stages(
        ends=ends,
        starts=starts,
        again_s=repeats,
        forward_s=forward_s,
        backward_s=backward_s,
        repeated_s=_sums(repeats, ends),
        ahead_s=ahead * recomputes_ahead,
    )


def _step_s(
    layout: ParallelLayout,
    n_microbatches: int,
    stages: _Stages,
    state: StageState,
    flow: tuple[Ints, Any, Floats, Floats, Ints],
    options: SimulatorOptions,
) -> float:
    """Seconds of a step.

    Args:
        flow: pairs of stages and their transfers, as `last_backwards` takes them.
    """
    from harness.plan.layouts.flow import last_backwards

    backward_s = stages.backward_s + state.wait_s
    microbatch_s = stages.forward_s + stages.repeated_s + backward_s
    window_s = backward_s - state.first_s + (state.n_rounds - 1) * microbatch_s
    after_s = state.sync_s - np.minimum(window_s, state.hideable_s) + state.gather_s
    after_s += state.owned_bytes * float(np.max(options.optimizer_s_per_byte))
    passes = stages.forward_s, stages.ahead_s, stages.repeated_s - stages.ahead_s + backward_s
    step_s, begin_s = 0.0, np.zeros(layout.pp)
    for _ in range(1 + (layout.pp > 1)):  # of two steps the second, as by `Trial.outcome`
        ends_s = last_backwards(n_microbatches, *passes, *flow, begin_s) + after_s
        for users, shared_s in state.shared:
            ends_s[users] = ends_s[users].max() + shared_s
        step_s = float((ends_s - begin_s).max())
        begin_s = ends_s - ends_s.min()
    return step_s


def _crossing(costs: GroupCosts, ends: Ints) -> tuple[Ints, Floats, Floats]:
    """Pairs of stages, the bytes between them (`GroupCosts.sent_bytes`), and those that enter each
    stage. A stage gets an output once."""
    source, reader = np.searchsorted(ends, costs.reads, side="right")
    moved = np.stack([costs.reads[0], reader])[:, source < reader]
    ops, targets = np.unique(moved, axis=1)
    n = len(ends)
    pairs, at = np.unique(
        np.searchsorted(ends, ops, side="right") * n + targets, return_inverse=True
    )
    found = np.zeros((2, 2, len(pairs)))
    for way, bound in np.ndindex(2, 2):
        sent = costs.sent_bytes[bound, way, ops]
        found[bound, way] = np.bincount(at, sent, minlength=len(pairs))
    entering = np.bincount(targets, costs.held_bytes[ops], minlength=n).astype(float)
    return np.stack(np.divmod(pairs, n)), found, entering


def _messages_bytes(
    pairs: Ints, sent_bytes: Floats, in_flight: Ints, n_microbatches: int
) -> Floats:
    """Bytes of messages by stage beside the activations of most microbatches: receives that are
    posted ahead (`domain.schedule.AHEAD`), and a gradient on its way.

    Args:
        pairs: (2, n) stages.
        sent_bytes: (2, n) of outputs and of gradients.
    """
    n = len(in_flight)
    outputs = np.bincount(pairs[1], sent_bytes[0], n)
    gradients, returned = (np.bincount(ends, sent_bytes[1], n) for ends in pairs)
    ahead = gradients * np.minimum(in_flight - 1, AHEAD)
    # While forwards follow, the next output's receive is posted, and one gradient's.
    between = outputs + gradients + returned * (n_microbatches > in_flight + 1)
    is_first = np.arange(n) == 0
    found: Floats = np.where(
        is_first | (n_microbatches <= in_flight), ahead, np.maximum(ahead + returned, between)
    )
    return found


def _sums(values: Floats, ends: Ints) -> Floats:
    return np.diff(np.concatenate([[0.0], values.cumsum()[ends - 1]]))
