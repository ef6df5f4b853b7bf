"""What sharded state costs and saves: parts of each device, rounds of gradients, all-gathers.

A reduce-scatter and an all-gather take what was measured, else each half of an all-reduce;
`layouts.state` prices whole layouts by the same rules. Sharded parameters are gathered in units
(`domain.weight_units`), the next one from then on that a unit is in use; weights that are not freed
are gathered once a step, from the optimizer of the last one on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from harness.domain.checkpoints import segment_numbers
from harness.domain.graph import Graph, Operator
from harness.domain.shard_state import SHARD_STATES, Group, ShardState, shards_in_nodes
from harness.domain.weight_units import (
    ROUNDED_KINDS,
    SharedWeight,
    Unit,
    plan_units,
    plan_visits,
    starts_segment,
)
from harness.plan.simulate.network import Network
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.passes import ACTIONS, NONE
from harness.plan.simulate.tables import Buckets, Flow, Tables, ends_of
from harness.plan.simulate.transfers import Floats, Ints

Slice = tuple[int, Group]
# The groups of some holders that each keep a slice in parts.
Sharing = Callable[[Group], Sequence[Group]]

# Where memory needs no sharded state, a plan shards the optimizer's if that makes its step so many
# times as fast; a search compares so many of its fastest plans. With less gain it stays whole,
# because whole state outlives a lost rank.
SHARDING_GAIN = 1.02
MOST_COMPARED = 8


def useful_states(
    n_holders: int, options: SimulatorOptions, n_in_node: int = 1
) -> tuple[ShardState, ...]:
    """The states that free memory where so many devices hold a weight.

    Args:
        n_in_node: of the holders, equal in all nodes.
    """
    if n_holders == 1:
        return ()
    is_split, has_state = 1 < n_in_node < n_holders, options.n_optimizer_states > 0
    known = (state for state in SHARD_STATES[1:] if is_split or not shards_in_nodes(state))
    return tuple(state for state in known if has_state or not state.startswith("optimizer"))


def may_shard_for_speed(graph: Graph, options: SimulatorOptions) -> bool:
    """Whether training accepts a sharded optimizer that memory does not need, and may gain by it:
    each device updates a part of the weights, and gathers the others beside the next forward.

    Averaged replicas gather them at once, asynchronous training updates all, and a hook may need
    the whole gradient of a parameter.
    """
    is_hooked = any(map(_may_have_hooks, graph.operators))
    return not (is_hooked or options.sync_every > 1 or options.updates_each_microbatch)


def _may_have_hooks(operator: Operator) -> bool:
    """Whether parameters of an operator may have hooks: those of one that a capture leaves whole,
    without saying why."""
    has_parameters = bool(operator.weight_bytes or operator.attrs.get("parameters"))
    is_whole = operator.kind == "other" and operator.attrs.get("is_repeatable") is False
    return is_whole and has_parameters


def bucket_memory(sizes: Sequence[float], *, is_repeated: bool) -> list[float]:
    """Bytes of one group's buckets of gradients that are in memory while backward fills each one:
    it, and the one before, which is on its way and so both sent and received. If it is repeated
    for several microbatches, the last bucket stays on its way until the next one's first is full.
    """
    last = sizes[-1:] if is_repeated else [0.0]
    return [size + 2 * before for size, before in zip(sizes, (*last, *sizes), strict=False)]


def unit_memory(sizes: Sequence[float]) -> float:
    """Bytes of one group's units of weights that are in memory at once: that in use, and the
    next."""
    return max(sum(sizes[k : k + 2]) for k in range(len(sizes)))


def shared_slices(slices: Iterable[Slice], sharing: Sharing) -> list[Slice]:
    """Each slice once for each group of its holders that keeps it in parts."""
    return [(n_bytes, group) for n_bytes, holders in slices for group in sharing(holders)]


def owned_bytes(slices: Iterable[Slice], n_devices: int) -> Floats:
    """(n_devices,) bytes of the weights that each device updates: its part of each slice."""
    owned = np.zeros(n_devices)
    for n_bytes, holders in slices:
        owned[list(holders)] += n_bytes / len(holders)
    return owned


def shared_bytes(slices: Iterable[Slice], gathered: Iterable[Unit] = ()) -> dict[Group, int]:
    """Bytes of weights that each group of several devices holds, without units that are gathered
    before use."""
    total: dict[Group, int] = defaultdict(int)
    for n_bytes, holders in slices:
        if len(holders) > 1:
            total[holders] += n_bytes
    for unit in set(gathered):
        total[unit.devices] -= unit.n_bytes
    return {group: n_bytes for group, n_bytes in sorted(total.items()) if n_bytes > 0}


def gather_seconds(network: Network, shared: Mapping[Group, int], ready: Floats) -> Floats:
    """(n_devices,) seconds from the end of each device's optimizer, when it is ready, to its last
    new weights; groups whose rings use one interface share it."""
    done, gathers = ready.copy(), {g: network.priced("all_gather", g, n) for g, n in shared.items()}
    busy: dict[int, float] = defaultdict(float)
    for gather in gathers.values():
        for resource, seconds in gather.occupied:
            busy[resource] += seconds * network.is_interface(resource)
    for group, gather in gathers.items():
        members = list(group)
        slowest = max((busy[resource] for resource, _ in gather.occupied), default=0.0)
        done[members] = done[members].max() + max(gather.duration_s, slowest)
    return done - ready


def passing_bytes(tables: Tables, n_rounds: int) -> tuple[Floats, Floats]:
    """(n_ops, n_devices) bytes of buckets of gradients that are summed to their owners, in memory
    while forward, and while backward, of each operator runs."""
    buckets = tables.buckets()
    own_of: dict[Group, list[int]] = defaultdict(list)
    for number, group in enumerate(buckets.groups):
        own_of[group].append(number)
    forward, backward = np.zeros(tables.active.shape), np.zeros(tables.active.shape)
    for group, numbers in own_of.items():
        devices = list(group)
        sizes = buckets.n_bytes[numbers].tolist()
        last = 2 * sizes[-1] * (n_rounds > 1)
        filling = bucket_memory(sizes, is_repeated=n_rounds > 1)
        now = np.full(tables.n_ops, last)  # by operator, in the order of backward
        for number, n_bytes in zip(numbers, filling, strict=True):
            now[: max(buckets.members[number]) + 1] = n_bytes
        forward[:, devices] += last
        backward[:, devices] += now[:, None]
    return forward, backward


def scattered(buckets: Buckets, n_rounds: int) -> Buckets:
    """Reduce-scatters of the buckets: in one round after the step's last backward, or in one after
    that of each microbatch."""
    n, rounds = len(buckets.groups), np.arange(n_rounds)
    groups, n_ends = buckets.groups * n_rounds, len(buckets.ends.device)
    return replace(
        buckets,
        n_bytes=np.tile(buckets.n_bytes, n_rounds),
        members=buckets.members * n_rounds,
        groups=groups,
        n_rounds=np.full(n * n_rounds, 0.5),
        microbatch=np.repeat(rounds if n_rounds > 1 else [-1], n),
        ends=ends_of(groups),
        trigger_place=np.tile(buckets.trigger_place, n_rounds),
        trigger_end=(buckets.trigger_end + n_ends * rounds[:, None]).ravel(),
    )


class Gathers(NamedTuple):
    """The all-gathers of a step.

    Attributes:
        triggers: (gather, task) that it waits for.
        after: (gather, task) that waits for it.
    """

    units: list[Unit]
    triggers: list[tuple[int, int]]
    after: list[tuple[int, int]]


def shared_weights(tables: Tables, flow: Flow, sharing: Sharing) -> list[SharedWeight]:
    """The weights that several devices share, and use in the same operators."""
    weights: list[SharedWeight] = []
    for op in tables.parameterised:
        if tables.last_user.get(op, op) != op:
            continue  # with the last operator that uses its weights
        operators, slices = tuple(tables.tied.get(op, (op,))), tables.slices[op]
        if any(tables.slices[user] != slices for user in operators):
            continue
        stages = frozenset(flow.stage_of[list(operators)].tolist())
        kinds = {tables.costs.graph.operators[user].kind for user in operators}
        weights += [
            SharedWeight(group, operators, stages, n_bytes, is_rounded=kinds <= ROUNDED_KINDS)
            for n_bytes, group in shared_slices(slices, sharing)
            if len(group) > 1
        ]
    return weights


def find_units(
    tables: Tables, flow: Flow, weights: Sequence[SharedWeight], *, is_freeing: bool
) -> list[Unit]:
    """The units of shared weights, in the order of their first use."""
    segments: dict[int, int] = {}
    for ops, numbers in _recomputed(tables, flow):
        if any(numbers):
            segments |= zip(ops, numbers, strict=True)
    return plan_units(
        weights,
        tables.options.bucket_bytes,
        segments=segments,
        recomputes=flow.recompute.tolist(),
        is_freeing=is_freeing,
    )


def _recomputed(tables: Tables, flow: Flow) -> Iterator[tuple[list[int], list[int]]]:
    """The operators of each stage, and the segment of each that recomputation runs as a whole."""
    bounds = pairwise(flow.stage_ptr.tolist())
    for n_segments, (begin, end) in zip(flow.segments.tolist(), bounds, strict=True):
        ops = flow.stage_ops[begin:end].tolist()
        key = tuple(ops), n_segments
        if key not in tables.costs.segments:
            tables.costs.segments[key] = segment_numbers(tables.costs.graph, ops, n_segments)
        yield ops, tables.costs.segments[key]


def cut_segments(tables: Tables, flow: Flow, units: Sequence[Unit]) -> Ints:
    """(n_ops,) number of each operator's segment in its stage. A segment is recomputed as a whole;
    units of freed weights begin segments too."""
    segment_of = np.zeros(tables.n_ops, dtype=np.int64)
    if not units and flow.segments.max() == 1:
        return segment_of
    units_of: dict[int, set[int]] = defaultdict(set)
    for number, unit in enumerate(units):
        for op in unit.operators:
            units_of[op].add(number)
    for ops, numbers in _recomputed(tables, flow):
        used: set[int] = set()
        segment = 0
        for op, before, number in zip(ops, [0, *numbers], numbers, strict=False):
            if number > before or starts_segment(units_of[op], used):
                segment, used = segment + 1, set()
            used |= units_of[op]
            segment_of[op] = segment
    return segment_of


def saved_bytes(weights: Sequence[SharedWeight], units: Sequence[Unit], n_devices: int) -> Floats:
    """(n_devices,) bytes of freed weights, at the peak: without two units of each group, the one in
    use and the next."""
    saved = np.zeros(n_devices)
    for weight in weights:
        saved[list(weight.devices)] += weight.n_bytes * (1 - 1 / len(weight.devices))
    sizes: dict[Group, list[int]] = defaultdict(list)
    for unit in units:
        sizes[unit.devices].append(unit.n_bytes)
    for group, unit_sizes in sizes.items():
        saved[list(group)] -= unit_memory(unit_sizes)
    return saved


def plan_gathers(
    tables: Tables,
    flow: Flow,
    units: Sequence[Unit],
    row_at: Ints,
    n_rows: int,
    following: Ints,
    *,
    is_freeing: bool,
) -> Gathers:
    """The all-gathers of a step and the tasks that they wait for and that wait for them. Weights
    that are not freed are gathered once, from the last step's optimizer on."""
    preceding = np.full(len(following), NONE, dtype=np.int64)
    known = np.flatnonzero(following != NONE)
    preceding[following[known]] = known
    gathers = Gathers([], [], [])
    by_group: dict[Group, dict[int, Unit]] = defaultdict(dict)
    for number, unit in enumerate(units):
        by_group[unit.devices][number] = unit
    for group, group_units in by_group.items():
        actions = flow.actions_of(group[0])
        if not is_freeing:
            actions = [a for a in actions if a.kind == "forward" and a.microbatch == 0]
        gathered = set[int]()
        before: list[int] = []  # first task on each device of the group's last gather
        for visit in plan_visits(actions, group_units):
            if not is_freeing and visit.unit in gathered:
                continue
            gathered.add(visit.unit)
            unit, action = group_units[visit.unit], actions[visit.first]
            ops = [op for op in unit.operators if flow.stage_of[op] == action.stage]
            op = ops[0] if action.kind == "forward" else ops[-1]
            which = ACTIONS.index(action.kind)
            first_task = (which * flow.n_microbatches + action.microbatch) * n_rows
            first = [first_task + int(row_at[op * tables.n_devices + device]) for device in group]
            number = len(gathers.units)
            gathers.units.append(unit)
            gathers.after.extend((number, task) for task in first)
            if is_freeing:
                earlier = [int(preceding[task]) for task in before]
                gathers.triggers.extend((number, task) for task in earlier if task != NONE)
                before = first
    return gathers
