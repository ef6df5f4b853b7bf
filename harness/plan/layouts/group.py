"""Costs of a tensor-parallel group's operators, and bytes of activations at the peak of its stages.

All groups of a layout on equal nodes are alike, so `Group` simulates one of them, on the first
devices of a node. An operator's seconds last from its start to that of the next one, and so contain
the all-reduces that it waits for.
"""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.routes import first_bucket_bytes
from harness.domain.shard_state import ShardState, shards_parameters
from harness.domain.strategy import OperatorPlan
from harness.domain.weight_units import ROUNDED_KINDS, unit_ends
from harness.plan.layouts.degrees import ParallelLayout, layout_strategy
from harness.plan.simulate.activations import find_segments, gradients_passed, received_bytes
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.sharded_state import bucket_memory
from harness.plan.simulate.simulator import Simulator, Trial
from harness.plan.simulate.tables import Tables
from harness.plan.simulate.transfers import Floats, Ints


class GroupCosts(NamedTuple):
    """By operator that is placed, on one device of the group.

    Attributes:
        again_s: of its forward in a stage that recomputes, where values from others have stayed.
        turn_s: (2, operators) that are waits after its forward and its backward, for what the next
            operator needs. A stage's last pass does not wait, because the next one is elsewhere.
        alone_bytes: of gradients that only one device of the group has, and its backward allocates.
        fed_bytes: of the inputs of a microbatch, where the operator reads one or is the loss.
        kept_bytes, received_bytes: that forward keeps for backward, own and assembled from others'.
        passed_bytes: (2, operators) of gradients while its backward runs, of one microbatch a step
            and of several or in replicas.
        returns: whether it has a backward.
        weight_bytes, frozen_bytes: of its trained and its frozen weights.
        gathered_bytes: of trained weights, as they travel where they are gathered before each use.
        output_bytes: of the output, as it is sent.
        leaves: whether the output is read after its segment.
        segment: number of the segment, which runs without waiting for the group.
        last_reader: position of the output's last reader, -1 for none.
        sent_bytes: (2, 2, operators) of the output that another group reads, and of its gradient:
            those of a device, and between the two devices that exchange most.
        crossing_bytes: the same of all outputs that cross a cut before the operator.
        held_bytes: of the output, on a device of another group that reads it.
        reads: (2, reads) positions of an operator and of a reader of its output.
        tied: positions of operators that share weights, and bytes of these, of which
            `weight_bytes` counts the first operator's.
        knows_saved: whether the graph says what autograd saves.
    """

    forward_s: Floats
    again_s: Floats
    backward_s: Floats
    turn_s: Floats
    returns: npt.NDArray[np.bool_]
    weight_bytes: Floats
    frozen_bytes: Floats
    gathered_bytes: Floats
    fed_bytes: Floats
    alone_bytes: Floats
    kept_bytes: Floats
    received_bytes: Floats
    passed_bytes: Floats
    output_bytes: Floats
    leaves: npt.NDArray[np.bool_]
    segment: Ints
    last_reader: Ints
    crossing_bytes: Floats
    sent_bytes: Floats
    held_bytes: Floats
    reads: Ints
    tied: list[tuple[list[int], float]]
    knows_saved: bool


class Group:
    """Groups of one size, by the first devices of the first node."""

    def __init__(
        self, graph: Graph, profile: Profile, cluster: Cluster, tp: int, options: SimulatorOptions
    ) -> None:
        self._graph, self._tp = graph, tp
        own = cluster.part(range(tp))
        curves = cluster.curves(spans_nodes=False)
        self._cluster = msgspec.structs.replace(own, collectives=curves)
        self._simulator = Simulator(graph, profile, self._cluster, options=options)
        self._known: dict[int, GroupCosts] = {}
        kind = cluster.devices[0].kind
        two = Cluster.uniform(1, 2 * tp, inside_bytes_per_s=1.0, memory_bytes=1, kind=kind)
        self._two = Simulator(graph, profile, two, options=options)

    def costs(self, samples: int) -> GroupCosts:
        """For a microbatch of so many samples.

        Raises:
            StrategyError: the group cannot share the operators.
        """
        if samples not in self._known:
            self._known[samples] = self._simulate(samples)
        return self._known[samples]

    def _simulate(self, samples: int) -> GroupCosts:
        layout = ParallelLayout(tp=self._tp)
        strategy = layout_strategy(layout, self._graph, self._cluster, samples, schedule="gpipe")
        trial = Trial(self._simulator, strategy)
        found, tables, placed = trial.outcome(), trial.tables, self._simulator.placed
        costs, returns = self._simulator.costs(samples), self._simulator.returns
        rows = found.lowered.rows
        first = np.flatnonzero(rows % self._tp == 0)
        ops, end_s = rows[first] // self._tp, float(found.finish[first].max())
        backward = found.start[first + len(rows)]
        passed = [gradients_passed(tables, n, returns) for n in (1, 2)]
        together = np.zeros(tables.n_ops, dtype=np.int64)
        segments = find_segments(tables, trial.current_flow(), together, returns)
        kept = np.maximum(tables.output_bytes + tables.saved_bytes, segments.leaving_bytes)
        at = {op: k for k, op in enumerate(placed)}
        readers = [[c for c in found if c in at] for found in self._graph.consumers()]
        last_reader = [max((at[c] for c in readers[op]), default=-1) for op in placed]
        crossing, sent = np.zeros((2, 2, 2, len(placed)))
        held = np.zeros(len(placed))
        for k, last in enumerate(last_reader):
            if last > k:
                sent[:, :, k], held[k] = self._sent_bytes(
                    placed[k], readers[placed[k]], tables.plans, samples
                )
                crossing[:, :, k + 1 : last + 1] += sent[:, :, k, None]
        passes = (
            _seconds(found.start[first], ops, placed, end_s),
            _seconds(backward[::-1], ops[::-1], placed, float(found.device_end_s[0])),
        )
        again_s = tables.forward_s[placed].max(axis=1)
        turns = (passes[0] - again_s, passes[1] - tables.backward_s[placed].max(axis=1))
        return GroupCosts(
            passes[0],
            again_s,
            passes[1],
            np.maximum(0.0, turns),
            returns[placed],
            tables.weight_bytes[placed].max(axis=1),
            tables.frozen_bytes[placed].max(axis=1),
            (tables.weight_bytes[placed].T * self._gathered_shares(tables, placed)).max(axis=0),
            tables.fed_bytes[placed].max(axis=1),
            tables.buckets().alone[placed].max(axis=1),
            kept[placed].max(axis=1),
            received_bytes(tables)[placed].max(axis=1),
            np.array([one[placed].max(axis=1) for one in passed]) * costs.knows_saved,
            (tables.output_bytes * costs.wire_share[:, None])[placed].max(axis=1),
            segments.leaving_bytes[placed].max(axis=1) > 0,
            segments.number[placed, 0],
            np.array(last_reader),
            crossing,
            sent,
            held,
            np.array([(at[op], at[c]) for op in placed for c in readers[op]], int).reshape(-1, 2).T,
            [
                ([at[op] for op in ops], float(tables.weight_bytes[ops[0]].max()))
                for ops in tables.tied.values()
            ],
            costs.knows_saved,
        )

    def _gathered_shares(self, tables: Tables, placed: list[int]) -> list[float]:
        """By operator, bytes that travel per byte of weights that are gathered before each use."""
        operators, wire = self._graph.operators, self._simulator.options.wire_bytes_per_fp32_byte
        tied = {op: members for members in tables.tied.values() for op in members}
        kinds = [{operators[user].kind for user in tied.get(op, (op,))} for op in placed]
        return [wire if own <= ROUNDED_KINDS else 1.0 for own in kinds]

    def _sent_bytes(
        self, op: int, readers: list[int], plans: dict[int, OperatorPlan], samples: int
    ) -> tuple[Floats, float]:
        """`GroupCosts.sent_bytes` and `GroupCosts.held_bytes` of one operator."""
        moved = [
            (c, msgspec.structs.replace(plans[c], devices=[self._tp + k for k in plans[c].devices]))
            for c in readers
        ]
        costs, n = self._two.costs(samples), 2 * self._tp
        edges = costs.transfers(op, plans[op], moved, syncs_norms=False)
        if edges.sums:  # each device adds to all of it
            return np.full((2, 2), costs.wire_bytes(op)), costs.wire_bytes(op)
        pairs = edges.source % n * n + edges.target % n
        ways = (edges.goes, edges.returns & self._simulator.returns[op])
        found = [np.bincount(pairs, edges.n_bytes * way, minlength=1) for way in ways]
        sent = np.array([[one.sum() / self._tp for one in found], [one.max() for one in found]])
        return sent, float(edges.n_held.sum()) / self._tp


def _seconds(start: Floats, ops: Ints, placed: list[int], end_s: float) -> Floats:
    """By placed operator: from its start to the next one's, 0 where it has no task.

    Args:
        start, ops: in the order in which the group runs them, which parts equal starts.
    """
    runs = np.flatnonzero(~np.isnan(start))
    order = runs[np.argsort(start[runs], kind="stable")]
    found = dict.fromkeys(placed, 0.0)
    ends = [*start[order[1:]].tolist(), end_s]
    for op, begin, end in zip(ops[order].tolist(), start[order].tolist(), ends, strict=True):
        found[op] += max(0.0, end - begin)
    return np.array([found[op] for op in placed])


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
    devices wait for each other, and, with sharded parameters, with each unit. What follows the last
    cut may stay, and so does not run again."""
    begin, end = stage
    found = {begin, *(begin + cut for cut in cuts)}
    last = max(found) if stays else end
    waits = begin + 1 + np.flatnonzero(np.diff(costs.segment[begin:end]))
    found.update(waits[waits < last].tolist())
    if shards_parameters(shard_state):
        weights = costs.weight_bytes[begin:end]
        units = unit_starts(weights, cuts or None, options, is_freeing=True)
        found.update(begin + at for at in units)
    return sorted(found)


def unit_starts(
    weights: Floats, cuts: Sequence[int] | None, options: SimulatorOptions, *, is_freeing: bool
) -> list[int]:
    """Where the units of a stage's sharded parameters begin, by bytes of each operator's weights;
    its segments begin at the cuts."""
    ends = unit_ends(weights.tolist(), options.bucket_bytes, cuts, is_freeing=is_freeing)
    return [0, *ends[:-1]]


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


def buckets_in_turn(weights: Floats, options: SimulatorOptions) -> tuple[list[int], list[float]]:
    """The ends of a stage's buckets of gradients and their bytes, from its last operator on, by
    bytes of each operator's gradients."""
    ends: list[int] = []
    sizes: list[float] = []
    limit = float(first_bucket_bytes(options.bucket_bytes))
    for end, n_bytes in enumerate(weights[::-1].tolist(), 1):
        if not n_bytes:
            continue
        if not ends or sizes[-1] >= limit:
            limit = options.bucket_bytes if ends else limit
            ends, sizes = [*ends, end], [*sizes, 0.0]
        ends[-1] = end
        sizes[-1] += n_bytes
    return ends, sizes


def bucket_bytes_at(weights: Floats, n_microbatches: int, options: SimulatorOptions) -> Floats:
    """By operator of a stage, bytes of sharded gradients' buckets while its backward runs, as by
    `sharded_state.passing_bytes`, by bytes of each operator's gradients."""
    in_turn = weights[::-1]
    ends, sizes = buckets_in_turn(weights, options)
    filling = bucket_memory(sizes, is_repeated=n_microbatches > 1)
    found = np.full(len(weights), 2 * sum(sizes[-1:]) * (n_microbatches > 1))
    for begin, n_bytes in zip((0, *ends), filling, strict=False):
        found[begin + int((in_turn[begin:] > 0).argmax()) :] = n_bytes
    return found[::-1]
