"""Lower tables and flow to the arrays of the event loop. Import lazily: it imports numba."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.domain.shard_state import ShardState, shards_gradients, shards_parameters
from harness.domain.weight_units import SharedWeight, Unit
from harness.plan.simulate.activations import (
    Flags,
    Segments,
    find_segments,
    gradients_passed,
    held_outputs,
    received_bytes,
)
from harness.plan.simulate.passes import BACKWARD, FORWARD, WEIGHT
from harness.plan.simulate.reductions import reduction_columns, with_averages
from harness.plan.simulate.sharded_state import (
    Gathers,
    cut_segments,
    find_units,
    passing_bytes,
    plan_gathers,
    saved_bytes,
    scattered,
    shared_weights,
)
from harness.plan.simulate.tables import Buckets, Flow, Tables, pointers
from harness.plan.simulate.transfers import ADDS, AVERAGES, COPIES, ROUNDS, Edges, Floats, Ints
from harness.plan.simulate.work import (
    Dependents,
    Received,
    RowBytes,
    TaskOrder,
    Work,
    find_dependents,
    last_tasks,
    offsets,
    order_tasks,
)

if TYPE_CHECKING:
    from harness.plan.simulate.simulator import Simulator


@dataclass(frozen=True)
class Lowered:
    """Input of the event loop, and results that need no events.

    Attributes:
        begins: first numbers of tasks, see `work.offsets`.
        rows: (n_rows,) operator * n_devices + device of each row.
        last: (n_devices,) last task of each device.
        peak: (n_devices,) most bytes of activations, and of gradients that backward allocates.
        alone: (n_devices,) bytes of these gradients.
        sum_bytes: (2, n_sums) bytes of each sum forward and backward, of the mean microbatch.
        saved: (n_devices,) bytes of weights that are freed between their uses.
        gathered: units of weights, by the last of the buckets' numbers.
    """

    work: Work
    dependents: Dependents
    begins: tuple[int, ...]
    edges: Edges
    buckets: Buckets
    rows: Ints
    last: Ints
    peak: Floats
    alone: Floats
    sum_bytes: Floats
    saved: Floats
    gathered: list[Unit]


def lower(
    simulator: Simulator, tables: Tables, flow: Flow, shard_state: ShardState = "none"
) -> Lowered:
    rows, options, n_devices = _Rows(simulator, tables, flow), simulator.options, tables.n_devices
    buckets, network = tables.buckets(), simulator.network
    is_sharded = shards_gradients(shard_state, flow.n_microbatches)
    n_rounds = flow.n_microbatches if is_sharded else 1
    is_freeing = shards_parameters(shard_state)
    weights, units = _gathered(simulator, tables, flow, shard_state)
    freed = units if is_freeing else []
    segment_of = cut_segments(tables, flow, freed)
    segments = find_segments(tables, flow, segment_of, simulator.returns)
    repeats = rows.repeats(segments.number)
    if repeats.any() and options.recomputes_ahead and not freed:
        repeats &= ~_stays(flow, segment_of)[rows.ops]
    alone = np.zeros(tables.active.shape) if is_sharded else buckets.alone
    passing = rows.gradients_passed()
    if is_sharded:
        passing += [rows.of(n_bytes) for n_bytes in passing_bytes(tables, n_rounds)]
    order = rows.order(segments, repeats, rows.of(alone), passing)
    if shard_state != "none":
        buckets = scattered(buckets, n_rounds)
    buckets, triggers = rows.triggered(buckets, order)
    gathers = plan_gathers(
        tables, flow, units, rows.row_at, rows.n, order.following, is_freeing=is_freeing
    )
    # Freed weights are gathered once for a unit's second forward and its backward.
    recomputes_ahead = options.recomputes_ahead and not (freed and segment_of.any())
    n_summed = flow.n_microbatches // n_rounds
    seconds = rows.seconds(n_summed, repeats, recomputes_ahead=recomputes_ahead)
    edges = rows.edges
    crosses = flow.stage_of[edges.source // n_devices] != flow.stage_of[edges.target // n_devices]
    sent_shares = np.where(crosses, options.activation_share, 1.0)
    sums = rows.sum_columns()
    sum_bytes = np.array(
        [[s.size(way, tables.mean_size) * s.n_rounds[way] for s in edges.sums] for way in (0, 1)]
    ) * [sums["sum_goes"], sums["sum_returns"]]
    work = Work(
        n_microbatches=flow.n_microbatches,
        device_of=rows.devices,
        seconds=seconds + tables.mean_size * rows.assembling_seconds(),
        following=order.following,
        first=order.first,
        edge_source=rows.row_at[edges.source],
        edge_target=rows.row_at[edges.target],
        edge_bytes=edges.n_bytes * tables.mean_size * sent_shares,
        edge_goes=edges.goes,
        edge_returns=rows.returns,
        **_bucket_columns(buckets, triggers, gathers),
        n_resources=network.n_resources,
        latency=network.latency_s,
        bandwidth=network.bandwidth,
        nic=network.nic,
        node_of=network.node_of,
        shares_links=options.overlap,
        host_s_per_byte=np.array([device.host_s_per_byte for device in simulator.cluster.devices]),
        **sums,
        **reduction_columns(simulator, tables, buckets, gathers.units, shard_state),
    )
    return Lowered(
        work=work,
        dependents=find_dependents(work),
        begins=offsets(work),
        edges=edges,
        buckets=buckets,
        rows=rows.places,
        last=order.last,
        peak=order.peak,
        alone=alone.sum(axis=0),
        sum_bytes=sum_bytes,
        saved=saved_bytes(weights if is_freeing else [], freed, n_devices),
        gathered=gathers.units,
    )


def _gathered(
    simulator: Simulator, tables: Tables, flow: Flow, shard_state: ShardState
) -> tuple[list[SharedWeight], list[Unit]]:
    """The weights that are gathered beside computing, and their units. Averaged replicas gather new
    ones at once, because averages change them too."""
    is_freeing = shards_parameters(shard_state)
    if shard_state == "none" or not (is_freeing or simulator.options.sync_every == 1):
        return [], []
    weights = shared_weights(tables, flow, simulator.sharing(shard_state))
    return weights, find_units(tables, flow, weights, is_freeing=is_freeing) if weights else []


class _Rows:
    """The rows of a strategy: operators on devices that have a block of them.

    Attributes:
        places: (n_rows,) operator * n_devices + device, ascending.
        row_at: by place, the row or -1.
        returns: of each edge, whether a gradient comes back.
        is_deferred: (n_rows,) whether weight passes compute the weights' gradients: for products
            under zero bubble, on all stages but the first, whose input gradients no stage needs.
        stream_rates: (n_rows,) seconds per byte of memory traffic.
    """

    def __init__(self, simulator: Simulator, tables: Tables, flow: Flow) -> None:
        self._simulator, self._tables, self._flow = simulator, tables, flow
        self.places, self.edges = np.flatnonzero(tables.active), tables.edge_rows()
        self.n, n_devices = len(self.places), tables.n_devices
        self.ops, self.devices = self.places // n_devices, self.places % n_devices
        self.row_at = np.full(tables.active.size, -1, dtype=np.int64)
        self.row_at[self.places] = np.arange(self.n)
        self.returns = self.edges.returns & simulator.returns[self.edges.source // n_devices]
        is_late = simulator.is_product[self.ops] & (flow.stage_of[self.ops] > 0)
        self.is_deferred = is_late & flow.split_weight
        rates = np.asarray(simulator.options.stream_s_per_byte) / simulator.speeds
        self.stream_rates: Floats = rates[self.devices]

    def of(self, table: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(n_rows,) of a table by operator and device."""
        return table.ravel()[self.places]

    def gradients_passed(self) -> Floats:
        """(2, n_rows) bytes of gradients while forward, and while backward, of a row runs."""
        passing = np.zeros((2, self.n))
        if self._tables.costs.knows_saved:
            n, returns = self._flow.n_microbatches, self._simulator.returns
            passing[BACKWARD] = self.of(gradients_passed(self._tables, n, returns))
        return passing

    def repeats(self, numbers: Ints) -> Flags:
        """(n_rows,) whether a row runs forward again, by the numbers of its device's segments: a
        frozen segment has no backward to do it for."""
        recomputes = self._flow.recompute[self._flow.stage_of[self.ops]]
        if not recomputes.any():
            return recomputes
        segment = self.of(numbers) * self._tables.n_devices + self.devices
        has_backward = np.bincount(segment, self._simulator.returns[self.ops]) > 0
        return recomputes & has_backward[segment]

    def order(
        self, segments: Segments, repeats: Flags, gradient_bytes: Floats, passing: Floats
    ) -> TaskOrder:
        """The order of each device's tasks.

        Args:
            repeats: (n_rows,) whether a row runs forward again.
            gradient_bytes: (n_rows,) that its first backward allocates.
        """
        simulator, tables, flow = self._simulator, self._tables, self._flow
        number, leaving = segments
        held = held_outputs(tables, flow, simulator.returns, simulator.readers, leaving)
        received = received_bytes(tables)
        order: TaskOrder = order_tasks(
            flow,
            self.row_at.reshape(-1, tables.n_devices),
            RowBytes(
                kept=self.of(held.kept + received),
                outside=self.of(leaving + received),
                brief=self.of(held.brief),
                passing=passing,
                gradients=gradient_bytes,
            ),
            self.of(number),
            repeats,
            self._received(),
        )
        return order

    def _received(self) -> Received:
        """What rows get from other stages, and send back to them."""
        edges, flow, n_devices = self.edges, self._flow, self._tables.n_devices
        from_stage = flow.stage_of[edges.source // n_devices]
        to_stage = flow.stage_of[edges.target // n_devices]
        crosses = (from_stage != to_stage) & self._tables.costs.knows_saved
        n_bytes, stage = np.zeros((2, self.n)), np.zeros((2, self.n), dtype=np.int64)
        from_row, to_row = self.row_at[edges.source], self.row_at[edges.target]
        sent, returned = (
            edges.n_bytes * (crosses & edges.goes),
            edges.n_bytes * (crosses & self.returns),
        )
        n_bytes[FORWARD] = np.bincount(to_row, sent, self.n)
        n_bytes[BACKWARD] = np.bincount(from_row, returned, self.n)
        np.maximum.at(stage[FORWARD], to_row[crosses], from_stage[crosses])
        stage[BACKWARD] = len(flow.recompute)
        np.minimum.at(stage[BACKWARD], from_row[crosses], to_stage[crosses])
        return Received(n_bytes, stage, np.bincount(to_row, returned, self.n))

    def triggered(self, buckets: Buckets, order: TaskOrder) -> tuple[Buckets, Ints]:
        """All buckets, with averages of replicas, and the task after which each end starts."""
        triggers: Ints = order.last[buckets.ends.device]
        if self._simulator.options.overlap:
            triggers = self._triggers(buckets, order.position)
        if self._simulator.options.sync_every > 1:
            buckets = with_averages(buckets, self._tables.buckets())
            # Of what the step before has left.
            averages = buckets.ends.device[len(triggers) :]
            triggers = np.concatenate([triggers, order.first[averages]])
        return buckets, triggers

    def _triggers(self, buckets: Buckets, position: Ints) -> Ints:
        """(n_ends,) the compute task on each device of a bucket after which the bucket starts: the
        last one with a gradient of the last microbatch for it, or for an earlier bucket of its
        devices."""
        rows, n = self.row_at[buckets.trigger_place], self._flow.n_microbatches
        which = np.where(self.is_deferred[rows], WEIGHT, BACKWARD)
        microbatch = buckets.microbatch[buckets.ends.bucket[buckets.trigger_end]] % n
        tasks = (which * n + microbatch) * self.n + rows
        triggers: Ints = last_tasks(position, tasks, buckets.trigger_end, buckets.ends.before)
        return triggers

    def sum_columns(self) -> dict[str, Any]:
        """Fields of `Work` about all-reduces within a microbatch."""
        sums, has_backward = self.edges.sums, self._simulator.returns
        producers = self._tables.producers
        sources, targets = [total.sources for total in sums], [total.targets for total in sums]
        returns = [
            total.n_rounds[1] > 0
            # Those of statistics, of the gradient of a batch norm's input.
            and has_backward[producers[k] if total.is_statistics else k].any()
            for total in sums
            for k in (total.operator,)
        ]
        return {
            "sum_is_collective": np.array([total.is_collective for total in sums], dtype=np.bool_),
            "sum_goes": np.array([total.n_rounds[0] > 0 for total in sums], dtype=np.bool_),
            "sum_returns": np.array(returns, dtype=np.bool_),
            "sum_source_ptr": pointers(sources),
            "sum_source": self.row_at[np.array([*chain(*sources)], dtype=np.int64)],
            "sum_target_ptr": pointers(targets),
            "sum_target": self.row_at[np.array([*chain(*targets)], dtype=np.int64)],
        }

    def assembling_seconds(self) -> Floats:
        """(4, n_rows) seconds of assembling received outputs (forward) and gradients (backward).

        A single gradient that covers a whole block needs no assembling.
        """
        edges, tables = self.edges, self._tables
        from_row, to_row = self.row_at[edges.source], self.row_at[edges.target]
        ops = edges.source // tables.n_devices
        arriving = np.bincount(to_row, weights=edges.n_streamed, minlength=self.n)
        sent = tables.output_bytes.ravel()[edges.source] * tables.costs.wire_share[ops]
        is_part = edges.n_bytes < sent
        is_part |= np.bincount(from_row, weights=edges.returns, minlength=self.n)[from_row] > 1
        is_part |= ~edges.goes  # added to the gradient of the same device
        n_added = edges.n_bytes * (is_part & self.returns)
        added = ADDS * np.bincount(from_row, weights=n_added, minlength=self.n)
        none = np.zeros(self.n)
        return np.stack([arriving, added, none, none]) * self.stream_rates

    def seconds(self, n_summed: int, repeats: Flags, *, recomputes_ahead: bool) -> Floats:
        """(4, n_rows) seconds of forward, backward, weight pass and recomputation.

        Accumulating gradients, from the second microbatch on, is spread evenly over all
        microbatches. The input gradients of a product take as long as its forward pass, which has
        as many FLOPs.

        Args:
            n_summed: microbatches whose gradients are added up before other devices' are.
            repeats: (n_rows,) whether a row runs forward again.
            recomputes_ahead: a stage runs forward again before its first backward, not layer by
                layer.
        """
        tables, options = self._tables, self._simulator.options
        forward, backward = self.of(tables.forward_s), self.of(tables.backward_s)
        to_inputs = np.minimum(forward, backward)
        n_summed = 1 if options.updates_each_microbatch else n_summed
        streamed = ADDS * self.of(tables.weight_bytes) * (n_summed - 1) / n_summed
        rounds = ROUNDS * (options.reduce_bytes_per_gradient_byte < 1)
        copies = (AVERAGES if options.sync_every > 1 else COPIES) + rounds
        streamed += copies / options.sync_every * self.of(tables.shared_bytes) / n_summed
        stream_s = streamed * self.stream_rates
        weight = np.where(self.is_deferred, backward - to_inputs + stream_s, 0.0)
        backward = np.where(self.is_deferred, to_inputs, backward + stream_s)
        if options.updates_each_microbatch:
            weight = weight + update_seconds(self._simulator, tables, self.places).sum(axis=0)
        again = forward * repeats
        if not recomputes_ahead:
            backward, again = backward + again, np.zeros(self.n)
        return np.stack([forward, backward, weight, again])


def _bucket_columns(buckets: Buckets, triggers: Ints, gathers: Gathers) -> dict[str, Any]:
    """Fields of `Work` about what buckets, and then gathers of weights, wait for and free."""
    n = len(buckets.groups)
    waited = np.array(gathers.triggers, dtype=np.int64).reshape(-1, 2)
    after = np.array(gathers.after, dtype=np.int64).reshape(-1, 2)
    counts = np.bincount(after[:, 0] + n, minlength=n + len(gathers.units))
    return {
        "trigger_task": np.concatenate([triggers, waited[:, 1]]),
        "trigger_bucket": np.concatenate([buckets.ends.bucket, waited[:, 0] + n]),
        "after_ptr": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        "after_task": after[:, 1].copy(),
    }


def _stays(flow: Flow, segment_of: Ints) -> Flags:
    """(n_ops,) whether an operator is of its stage's last segment, and the stage's forwards are all
    followed by their backwards at once, so that the executor does not run it again."""
    stays = np.zeros(len(segment_of), dtype=np.bool_)
    for stage, (begin, end) in enumerate(pairwise(flow.stage_ptr.tolist())):
        at = np.flatnonzero((flow.actions[:, 0] == FORWARD) & (flow.actions[:, 2] == stage))
        following = flow.actions[np.minimum(at + 1, len(flow.actions) - 1)]
        expected = flow.actions[at] + [BACKWARD - FORWARD, 0, 0]
        if np.array_equal(following, expected):
            ops = flow.stage_ops[begin:end]
            stays[ops] = segment_of[ops] == segment_of[ops].max(initial=0)
    return stays


def update_seconds(simulator: Simulator, tables: Tables, rows: Ints) -> Floats:
    """(2, n_rows) seconds: all-reducing a row's gradients, updating and copying weights."""
    devices, options = rows % tables.n_devices, simulator.options
    rates = np.asarray(options.optimizer_s_per_byte) + COPIES * np.asarray(
        options.stream_s_per_byte
    )
    updates = tables.weight_bytes.ravel()[rows] * (rates / simulator.speeds)[devices]
    summed, buckets = np.zeros(tables.active.size), tables.buckets()
    sent = buckets.n_bytes * options.sent_bytes_per_gradient_byte
    for members, group, n_bytes in zip(buckets.members, buckets.groups, sent, strict=True):
        seconds = simulator.network.all_reduce(group, int(n_bytes)).duration_s
        places = [op * tables.n_devices + device for op in members for device in group]
        summed[places] += seconds / len(members)
    return np.stack([summed[rows], updates])
