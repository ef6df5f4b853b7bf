"""Lower tables and flow to the arrays of the event loop. Import lazily: it imports numba."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from harness.domain.schedule import RECEIVES_AHEAD, RECEIVES_AT_FIRST
from harness.domain.shard_state import ShardState, shards_gradients, shards_parameters
from harness.domain.weight_units import Unit
from harness.plan.simulate.activations import (
    find_segments,
    gradients_passed,
    held_outputs,
    received_bytes,
)
from harness.plan.simulate.passes import BACKWARD, FORWARD, N_PASSES, WEIGHT
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
from harness.plan.simulate.transfers import ADDS, AVERAGES, COPIES, ROUNDS, Edges, Floats, Ints, Sum
from harness.plan.simulate.work import (
    Dependents,
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
    saved: Floats
    gathered: list[Unit]


def lower(
    simulator: Simulator, tables: Tables, flow: Flow, shard_state: ShardState = "none"
) -> Lowered:
    """Lower a strategy."""
    n_devices, edges, buckets = tables.n_devices, tables.edge_rows(), tables.buckets()
    network, rows = simulator.network, np.flatnonzero(tables.active)
    row_at = np.full(tables.active.size, -1, dtype=np.int64)  # -1: no row
    row_at[rows] = np.arange(len(rows))
    crosses = flow.stage_of[edges.source // n_devices] != flow.stage_of[edges.target // n_devices]
    sent_shares = np.where(crosses, simulator.options.activation_share, 1.0)
    returns = edges.returns & simulator.returns[edges.source // n_devices]
    sharing = simulator.sharing(shard_state)
    is_sharded = shards_gradients(shard_state, flow.n_microbatches)
    n_rounds = flow.n_microbatches if is_sharded else 1
    alone = np.zeros(tables.active.shape) if is_sharded else buckets.alone
    is_freeing = shards_parameters(shard_state)
    # Averaged replicas gather new weights at once, because averages change them too.
    is_gathered = shard_state != "none" and (is_freeing or simulator.options.sync_every == 1)
    weights = shared_weights(tables, flow, sharing) if is_gathered else []
    units = find_units(tables, flow, weights, is_freeing=is_freeing) if weights else []
    freed = units if is_freeing else []
    segment_of = cut_segments(tables, flow, freed)
    passing = np.zeros((2, len(rows)))
    if tables.costs.knows_saved:
        alive = gradients_passed(tables, flow.n_microbatches, simulator.returns)
        passing[BACKWARD] = alive.ravel()[rows]
    if is_sharded:
        passing += [p.ravel()[rows] for p in passing_bytes(tables, n_rounds)]
    repeats = _recomputes(simulator, flow)[flow.stage_of]
    if repeats.any() and simulator.options.recomputes_ahead and not freed:
        repeats &= ~_stays(flow, segment_of)
    own = row_at, returns, passing, alone.ravel()[rows], segment_of, repeats[rows // n_devices]
    following, position, first, last, gate, peak = _ordered(simulator, tables, flow, rows, *own)
    is_deferred = _defers_weights(simulator, tables, flow, rows)
    if shard_state != "none":
        buckets = scattered(buckets, n_rounds)
    if simulator.options.overlap:
        triggers = _triggers(buckets, flow, position, row_at, is_deferred)
    else:
        triggers = last[buckets.end_device]
    if simulator.options.sync_every > 1:
        buckets = with_averages(buckets, tables.buckets())
        # Of what the step before has left.
        averages = buckets.end_device[len(triggers) :]
        triggers = np.concatenate([triggers, first[averages]])
    rows_of = row_at, len(rows), following
    gathers = plan_gathers(tables, flow, units, *rows_of, is_freeing=is_freeing)
    n_summed = flow.n_microbatches // n_rounds
    # Freed weights are gathered once for a unit's second forward and its backward.
    recomputes_ahead = simulator.options.recomputes_ahead and not (freed and segment_of.any())
    seconds = _seconds(
        simulator, tables, rows, is_deferred, n_summed, repeats[rows // n_devices], recomputes_ahead
    )
    seconds += tables.mean_size * _streams(simulator, tables, rows, row_at)
    found = Work(
        n_microbatches=flow.n_microbatches,
        device_of=rows % n_devices,
        seconds=seconds,
        following=following,
        first=first,
        gate=gate,
        edge_source=row_at[edges.source],
        edge_target=row_at[edges.target],
        edge_bytes=edges.n_bytes * tables.mean_size * sent_shares,
        edge_goes=edges.goes,
        edge_returns=returns,
        **_bucket_columns(buckets, triggers, gathers),
        n_resources=network.n_resources,
        latency=network.latency_s,
        bandwidth=network.bandwidth,
        nic=network.nic,
        node_of=network.node_of,
        host_s_per_byte=np.array([one.host_s_per_byte for one in simulator.cluster.devices]),
        **_sum_columns(simulator, edges.sums, row_at),
        **reduction_columns(simulator, tables, buckets, gathers.units, shard_state),
    )
    return Lowered(
        work=found,
        dependents=find_dependents(found),
        begins=offsets(found),
        edges=edges,
        buckets=buckets,
        rows=rows,
        last=last,
        peak=peak,
        alone=alone.sum(axis=0),
        saved=saved_bytes(weights if is_freeing else [], freed, n_devices),
        gathered=gathers.units,
    )


def _bucket_columns(buckets: Buckets, triggers: Ints, gathers: Gathers) -> dict[str, Any]:
    """Fields of `Work` about what buckets, and then gathers of weights, wait for and free."""
    n = len(buckets.groups)
    waited = np.array(gathers.triggers, dtype=np.int64).reshape(-1, 2)
    after = np.array(gathers.after, dtype=np.int64).reshape(-1, 2)
    counts = np.bincount(after[:, 0] + n, minlength=n + len(gathers.units))
    return {
        "trigger_task": np.concatenate([triggers, waited[:, 1]]),
        "trigger_bucket": np.concatenate([buckets.end_bucket, waited[:, 0] + n]),
        "after_ptr": np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        "after_task": after[:, 1].copy(),
    }


def _ordered(
    simulator: Simulator,
    tables: Tables,
    flow: Flow,
    rows: Ints,
    row_at: Ints,
    returns: npt.NDArray[np.bool_],
    passing: Floats,
    gradient_bytes: Floats,
    segment_of: Ints,
    repeats: npt.NDArray[np.bool_],
) -> tuple[Any, ...]:
    """Call `order_tasks` and return its result."""
    edges, received = tables.edge_rows(), received_bytes(tables)
    receives = np.zeros((N_PASSES, len(rows)), dtype=np.bool_)
    receives[FORWARD, row_at[edges.target[edges.goes]]] = True
    receives[BACKWARD, row_at[edges.source[returns]]] = True
    segments = find_segments(tables, flow, segment_of, simulator.returns)
    leaving = segments.leaving_bytes
    held = held_outputs(tables, flow, simulator.returns, simulator.readers, leaving)
    found: tuple[Any, ...] = order_tasks(
        flow.n_microbatches,
        row_at.reshape(-1, tables.n_devices),
        receives,
        RECEIVES_AT_FIRST,
        RECEIVES_AHEAD,
        (held.kept + received).ravel()[rows],
        (leaving + received).ravel()[rows],
        held.brief.ravel()[rows],
        passing,
        gradient_bytes,
        flow.stage_ptr,
        flow.stage_ops,
        segments.number.ravel()[rows],
        repeats,
        flow.rank_of,
        flow.action_ptr,
        flow.actions,
        flow.split_weight,
    )
    return found


def _sum_columns(simulator: Simulator, sums: Sequence[Sum], row_at: Ints) -> dict[str, Any]:
    """Fields of `Work` about all-reduces within a microbatch."""
    sources, targets = [one.sources for one in sums], [one.targets for one in sums]
    returns = [
        one.n_rounds[1] > 0
        and bool(simulator.returns[one.operator] or (one.is_collective and one.passes is None))
        for one in sums
    ]
    return {
        "sum_is_collective": np.array([one.is_collective for one in sums], dtype=np.bool_),
        "sum_goes": np.array([one.n_rounds[0] > 0 for one in sums], dtype=np.bool_),
        "sum_returns": np.array(returns, dtype=np.bool_),
        "sum_source_ptr": pointers(sources),
        "sum_source": row_at[_flat(sources)],
        "sum_target_ptr": pointers(targets),
        "sum_target": row_at[_flat(targets)],
    }


def _streams(simulator: Simulator, tables: Tables, rows: Ints, row_at: Ints) -> Floats:
    """(4, n_rows) seconds of assembling received outputs (forward) and gradients (backward).

    A single gradient that covers a whole block needs no assembling.
    """
    edges, n_rows = tables.edge_rows(), len(rows)
    from_row, to_row = row_at[edges.source], row_at[edges.target]
    ops = edges.source // tables.n_devices
    arriving = np.bincount(to_row, weights=edges.n_streamed, minlength=n_rows)
    sent = tables.output_bytes.ravel()[edges.source] * tables.costs.wire_share[ops]
    is_part = edges.n_bytes < sent
    is_part |= np.bincount(from_row, weights=edges.returns, minlength=n_rows)[from_row] > 1
    is_part |= ~edges.goes  # added to the gradient of the same device
    is_added = is_part & edges.returns & simulator.returns[ops]
    added = ADDS * np.bincount(from_row, weights=edges.n_bytes * is_added, minlength=n_rows)
    none = np.zeros(n_rows)
    return np.stack([arriving, added, none, none]) * _stream_rates(simulator, rows)


def _seconds(
    simulator: Simulator,
    tables: Tables,
    rows: Ints,
    is_deferred: npt.NDArray[np.bool_],
    n_summed: int,
    repeats: npt.NDArray[np.bool_],
    recomputes_ahead: bool,
) -> Floats:
    """(4, n_rows) seconds of forward, backward, weight pass and recomputation.

    Accumulating gradients, from the second microbatch on, is spread evenly over all microbatches.
    The input gradients of a product take as long as its forward pass, which has as many FLOPs.

    Args:
        n_summed: microbatches whose gradients are added up before other devices' are.
        repeats: (n_rows,) whether a row runs forward again.
        recomputes_ahead: a stage runs forward again before its first backward, not layer by layer.
    """
    forward, backward = tables.forward_s.ravel()[rows], tables.backward_s.ravel()[rows]
    to_inputs = np.minimum(forward, backward)
    weight_bytes = tables.weight_bytes.ravel()[rows]
    n_summed = 1 if simulator.options.updates_each_microbatch else n_summed
    streamed = ADDS * weight_bytes * (n_summed - 1) / n_summed
    options = simulator.options
    rounds = ROUNDS * (options.reduce_bytes_per_gradient_byte < 1)
    copies = (AVERAGES if options.sync_every > 1 else COPIES) + rounds
    streamed += copies / options.sync_every * tables.shared_bytes.ravel()[rows] / n_summed
    stream_s = streamed * _stream_rates(simulator, rows)
    weight = np.where(is_deferred, backward - to_inputs + stream_s, 0.0)
    backward = np.where(is_deferred, to_inputs, backward + stream_s)
    if simulator.options.updates_each_microbatch:
        weight = weight + update_seconds(simulator, tables, rows).sum(axis=0)
    again = forward * repeats
    if not recomputes_ahead:
        backward, again = backward + again, np.zeros(len(rows))
    return np.stack([forward, backward, weight, again])


def _recomputes(simulator: Simulator, flow: Flow) -> npt.NDArray[np.bool_]:
    """(n_stages,) whether a stage runs forward again; a frozen one has no backward to do it for."""
    stages = np.arange(len(flow.recompute))
    return flow.recompute & np.isin(stages, flow.stage_of[simulator.returns])


def _stays(flow: Flow, segment_of: Ints) -> npt.NDArray[np.bool_]:
    """(n_ops,) whether an operator is of its stage's last segment, and the stage's forwards are all
    followed by their backwards at once, so that the executor does not run it again."""
    found = np.zeros(len(segment_of), dtype=np.bool_)
    for stage, (begin, end) in enumerate(pairwise(flow.stage_ptr.tolist())):
        at = np.flatnonzero((flow.actions[:, 0] == FORWARD) & (flow.actions[:, 2] == stage))
        following = flow.actions[np.minimum(at + 1, len(flow.actions) - 1)]
        expected = flow.actions[at] + [BACKWARD - FORWARD, 0, 0]
        if np.array_equal(following, expected):
            ops = flow.stage_ops[begin:end]
            found[ops] = segment_of[ops] == segment_of[ops].max(initial=0)
    return found


def _stream_rates(simulator: Simulator, rows: Ints) -> Floats:
    """(n_rows,) seconds per byte of memory traffic."""
    rates = np.asarray(simulator.options.stream_s_per_byte) / simulator.speeds
    return rates[rows % len(rates)]


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


def _defers_weights(
    simulator: Simulator, tables: Tables, flow: Flow, rows: Ints
) -> npt.NDArray[np.bool_]:
    """(n_rows,) whether weight passes compute the weights' gradients: for products under zero
    bubble, on all stages but the first, whose input gradients no stage needs."""
    ops = rows // tables.n_devices
    found: npt.NDArray[np.bool_] = simulator.is_product[ops] & (flow.stage_of[ops] > 0)
    return found & flow.split_weight


def _triggers(
    buckets: Buckets, flow: Flow, position: Ints, row_at: Ints, is_deferred: npt.NDArray[np.bool_]
) -> Ints:
    """(n_ends,) the compute task on each device of a bucket after which the bucket starts: the last
    one with a gradient of the last microbatch for it, or for an earlier bucket of its devices."""
    rows = row_at[buckets.trigger_place]
    which = np.where(is_deferred[rows], WEIGHT, BACKWARD)
    microbatch = buckets.microbatch[buckets.end_bucket[buckets.trigger_end]] % flow.n_microbatches
    tasks = (which * flow.n_microbatches + microbatch) * len(is_deferred) + rows
    found: Ints = last_tasks(position, tasks, buckets.trigger_end, buckets.end_before)
    return found


def _flat(lists: Iterable[Iterable[int]]) -> Ints:
    return np.array([item for own in lists for item in own], dtype=np.int64)
