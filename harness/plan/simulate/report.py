"""Convert a simulation to records like a measured run's, and explain it in words."""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from harness.domain.record import Pass, Span, SpanFields, SpanKind
from harness.domain.shard_state import equal_nodes
from harness.plan.simulate.simulator import Simulation
from harness.units import format_bandwidth, format_bytes, format_duration

# Span kind and fields by number of the pass, and then of forward and backward transfers.
_PASSES: tuple[tuple[SpanKind, SpanFields], ...] = (
    ("forward", {}),
    ("backward", {}),
    ("backward", {"pass_": "weights"}),
    ("forward", {"pass_": "recompute"}),
)
_WAYS: tuple[Pass, Pass] = ("forward", "backward")


class Event(NamedTuple):
    """One task, decoded.

    Attributes:
        span: record as in a measured run, without stage, step and peer.
        ranks: busy devices: one computes, two transfer, a group all-reduces.
        resource: name of the device, link or group that it uses.
        ring_share: share of its bytes that each rank sends to the next one of a ring; None
            if the first rank sends all to the second.
    """

    span: Span
    ranks: tuple[int, ...]
    resource: str
    ring_share: float | None

    @property
    def end_s(self) -> float:
        return self.span.start_s + self.span.duration_s


def events(simulation: Simulation) -> Iterator[Event]:
    """All simulated tasks, in order of start."""
    start = simulation.outcome.start
    for task in np.argsort(start, kind="stable"):
        if np.isnan(start[task]):
            return
        event = decode(simulation, int(task))
        is_empty = event.ring_share == 0 or event.span.pass_ in ("weights", "recompute")
        if event.span.duration_s or not is_empty:
            yield event


def decode(simulation: Simulation, task: int) -> Event:
    out = simulation.outcome
    moves, _, sums, _, buckets, _ = out.lowered.begins
    if task < moves:
        kind, fields, ranks, resource, share = _pass(simulation, task)
    elif task < sums:
        kind, fields, ranks, resource, share = _move(simulation, task - moves)
    elif task < buckets:
        kind, fields, ranks, resource, share = _sum(simulation, task - sums)
    else:
        kind, fields, ranks, resource, share = _bucket(simulation, task - buckets)
    start = float(out.start[task])
    duration = float(out.finish[task]) - start
    return Event(
        Span(kind=kind, start_s=start, duration_s=duration, **fields), ranks, resource, share
    )


# An event without its times: kind and fields of its span, ranks, resource and ring_share.
_Work = tuple[SpanKind, SpanFields, tuple[int, ...], str, float | None]


def _fields(simulation: Simulation, operator: int, microbatch: int) -> SpanFields:
    fields: SpanFields = {"operator": simulation.simulator.graph.operators[operator].name}
    return fields | {"microbatch": microbatch} if simulation.strategy.n_microbatches > 1 else fields


def _pass(simulation: Simulation, number: int) -> _Work:
    rows, names = simulation.outcome.lowered.rows, simulation.simulator.network.names
    which, rest = divmod(number, simulation.strategy.n_microbatches * len(rows))
    microbatch, row = divmod(rest, len(rows))
    op, device = divmod(int(rows[row]), len(names))
    kind, more = _PASSES[which]
    return kind, _fields(simulation, op, microbatch) | more, (device,), names[device], None


def _move(simulation: Simulation, number: int) -> _Work:
    lowered, names = simulation.outcome.lowered, simulation.simulator.network.names
    back, rest = divmod(number, simulation.strategy.n_microbatches * len(lowered.work.edge_bytes))
    microbatch, edge = divmod(rest, len(lowered.work.edge_bytes))
    op, a = divmod(int(lowered.edges.source[edge]), len(names))
    b = int(lowered.edges.target[edge]) % len(names)
    a, b = (b, a) if back else (a, b)
    way = f"{names[a]} -> {names[b]}"
    fields = _fields(simulation, op, microbatch)
    fields["name"] = f"{fields['operator']} {way}"
    fields["n_bytes"] = round(float(lowered.work.edge_bytes[edge]))
    fields["pass_"] = _WAYS[back]
    return "communication", fields, (a, b), f"link {way}", None


def _sum(simulation: Simulation, number: int) -> _Work:
    lowered, names = simulation.outcome.lowered, simulation.simulator.network.names
    back, rest = divmod(number, simulation.strategy.n_microbatches * len(lowered.edges.sums))
    microbatch, k = divmod(rest, len(lowered.edges.sums))
    one = lowered.edges.sums[k]
    fields = _fields(simulation, one.operator, microbatch)
    fields["n_bytes"] = int(lowered.sum_bytes[back, k])
    fields["pass_"] = _WAYS[back]
    if one.passes is not None:
        kind, where, share = "keys", _group_name(one.group, names, "keys"), 1.0
    else:
        kind = "statistics" if one.is_collective else "sum"
        where, share = _group_name(one.group, names), 2 * _ring_share(one.group)
    fields["name"] = f"{kind} of {fields['operator']}"
    return "communication", fields, one.group, where, share


def _bucket(simulation: Simulation, number: int) -> _Work:
    lowered, operators = simulation.outcome.lowered, simulation.simulator.graph.operators
    if number >= len(lowered.buckets.groups):
        unit = lowered.gathered[number - len(lowered.buckets.groups)]
        group, members = unit.devices, list(unit.operators)
        share = _gather_share(simulation, unit.devices)
        wire = simulation.simulator.options.wire_bytes_per_fp32_byte
        kind, n_bytes = "all-gather", float(unit.sent_bytes(wire))
    else:
        group, members = lowered.buckets.groups[number], lowered.buckets.members[number]
        kind, n_bytes, share = _bucket_sum(simulation, number)
    last = f" to {operators[members[-1]].name}" if len(members) > 1 else ""
    fields: SpanFields = {
        "name": f"{kind} {operators[members[0]].name}{last}",
        "n_bytes": round(n_bytes),
    }
    where = _group_name(group, simulation.simulator.network.names, kind)
    return "communication", fields, group, where, share


def _bucket_sum(simulation: Simulation, number: int) -> tuple[str, float, float]:
    """What sums a bucket, its bytes, and `ring_share`, of what nodes send to each other."""
    simulator, strategy = simulation.simulator, simulation.strategy
    buckets, every = simulation.outcome.lowered.buckets, simulator.options.sync_every
    n_bytes = float(buckets.n_bytes[number]) * simulator.options.reduce_bytes_per_gradient_byte
    group, n_rounds = buckets.groups[number], buckets.n_rounds[number]
    groups = simulator.sharing(strategy.shard_state)(group)
    if n_rounds == 0:
        share = _ring_share(group if strategy.shard_state == "none" else groups)
        return "average", n_bytes / every, 2 * share
    if n_rounds == 1:
        return "all-reduce", n_bytes, 2 * _ring_share(group) * (every == 1)
    if len(groups) == 1:
        return "reduce-scatter", n_bytes, _gather_share(simulation, group) * (every == 1)
    is_last = buckets.microbatch[number] in (-1, strategy.n_microbatches - 1)
    return "reduce-scatter", n_bytes, 2 * _ring_share(groups) * (is_last and every == 1)


def _gather_share(simulation: Simulation, group: Sequence[int]) -> float:
    """Share of the bytes that a node sends to the next in an all-gather or a reduce-scatter."""
    nodes = equal_nodes(tuple(group), simulation.simulator.network.node_of.tolist())
    return _ring_share(nodes if 1 < len(nodes) < len(group) else group)


def _ring_share(group: Sequence[object]) -> float:
    """Share of the bytes that each rank sends in a reduce-scatter or an all-gather."""
    return (len(group) - 1) / len(group)


def _group_name(group: Sequence[int], names: Sequence[str], kind: str = "all-reduce") -> str:
    where = f"{kind} over " + ", ".join(names[d] for d in group[:4])
    return where + (f" and {len(group) - 4} more" if len(group) > 4 else "")


def spans(simulation: Simulation) -> dict[int, list[Span]]:
    """Records of step 0 by rank, as in a measured run; the first rank starts at 0."""
    found: dict[int, list[Span]] = {rank: [] for rank in range(len(simulation.simulator.limits))}
    for event in events(simulation):
        computed = event.span.operator if event.span.kind != "communication" else None
        stage = None if computed is None else simulation.strategy.operators[computed].stage
        for rank in event.ranks:
            others = [other for other in event.ranks if other != rank]
            peer = others[0] if len(others) == 1 else None
            found[rank].append(replace(event.span, step=0, stage=stage, peer=peer))
    out = simulation.outcome
    for rank, own in found.items():
        start, duration = float(out.device_end_s[rank]), float(out.optimizer_s[rank])
        if duration > 0:
            own.append(Span(kind="optimizer", step=0, start_s=start, duration_s=duration))
        if (gather_s := float(out.gather_s[rank])) > 0:
            name, end = "all-gather of weights", start + duration
            own.append(
                Span(kind="communication", name=name, step=0, start_s=end, duration_s=gather_s)
            )
        begin = float(out.device_begin_s[rank])
        own.append(Span(kind="step", step=0, start_s=begin, duration_s=out.step_s))
    return found


def device_seconds(simulation: Simulation, device: int) -> dict[str, float]:
    """Parts of a device's step: forward, backward, exposed communication and waiting, optimizer.

    The exposed part is the rest of the step.
    """
    totals = {"forward": 0.0, "backward": 0.0}
    for event in events(simulation):
        if event.span.kind in totals and event.ranks == (device,):
            totals[event.span.kind] += event.span.duration_s
    optimizer = float(simulation.outcome.optimizer_s[device])
    exposed = simulation.step_s - sum(totals.values()) - optimizer
    return {**totals, "exposed": max(0.0, exposed), "optimizer": optimizer}


def contention_seconds(simulation: Simulation) -> list[float]:
    """Slowdown of computing by concurrent transfers, by device."""
    out, lowered = simulation.outcome, simulation.outcome.lowered
    n_rows, n_microbatches = len(lowered.rows), simulation.strategy.n_microbatches
    taken = (out.finish - out.start)[: lowered.begins[0]].reshape(4, n_microbatches, n_rows)
    taken -= lowered.work.seconds[:, None, :]
    longer = np.nansum(taken, axis=(0, 1))
    n_devices = len(simulation.simulator.network.names)
    by_device = np.bincount(lowered.rows % n_devices, weights=longer, minlength=n_devices)
    return [max(0.0, float(seconds)) for seconds in by_device]


def sent_bytes(simulation: Simulation) -> list[float]:
    """By device, the bytes that its node sends to other nodes in a step; collectives are rings."""
    node_of = simulation.simulator.network.node_of.tolist()
    sent = dict.fromkeys(node_of, 0.0)

    def send(ring: Sequence[int], n_bytes: float) -> None:
        for a, b in zip(ring, (*ring[1:], ring[0]), strict=True):
            sent[node_of[a]] += n_bytes * (node_of[a] != node_of[b])

    for event in events(simulation):
        n_bytes = event.span.n_bytes or 0.0
        if event.ring_share is not None:
            send(event.ranks, event.ring_share * n_bytes)
        elif len(event.ranks) > 1 and node_of[event.ranks[0]] != node_of[event.ranks[1]]:
            sent[node_of[event.ranks[0]]] += n_bytes
    for group, updated in simulation.outcome.updated.items():
        send(group, _gather_share(simulation, group) * updated)
    return [sent[node] for node in node_of]


def critical_path(simulation: Simulation) -> list[Event]:
    """The chain of dependent tasks that ends the slowest device's step, first to last.

    It begins at a device's start of the step; earlier tasks belong to the step before.
    """
    out = simulation.outcome
    slowest = _slowest(simulation)
    done = np.flatnonzero(out.finish == out.device_end_s[slowest])
    ends = [task for task in done if slowest in decode(simulation, int(task)).ranks]
    path: list[Event] = []
    task = int(ends[0]) if ends else -1
    while task >= 0:
        path.append(decode(simulation, task))
        task = int(out.cause[task])
    return path[::-1]


def binding(simulation: Simulation) -> dict[str, float]:
    """Seconds of the critical path by activity, largest first; they sum to the step.

    A task counts until the next one starts, because a transfer may release its link before it has
    arrived. Time before the slowest device's step does not count. If the path begins later, the
    time until then counts for the previous step of the device where it begins.
    """
    shares: dict[str, float] = defaultdict(float)
    path = critical_path(simulation)
    out, names = simulation.outcome, simulation.simulator.network.names
    slowest = _slowest(simulation)
    begin = float(out.device_begin_s[slowest])
    if path and path[0].span.start_s > begin:
        last = max(path[0].ranks, key=lambda rank: float(out.device_begin_s[rank]))
        shares[f"the step before on {names[last]}"] = path[0].span.start_s - begin
    following = [event.span.start_s for event in path[1:]] + [float(out.device_end_s[slowest])]
    for event, until in zip(path, following, strict=True):
        end = min(event.end_s, until)
        shares[event.resource] += max(0.0, end - max(event.span.start_s, begin))
    if out.gather_s[slowest] > 0:
        shares["all-gather of weights"] = float(out.gather_s[slowest])
    if out.optimizer_s[slowest] > 0:
        shares[f"optimizer of {names[slowest]}"] = float(out.optimizer_s[slowest])
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _slowest(simulation: Simulation) -> int:
    """The device with the longest step."""
    out = simulation.outcome
    return int((out.device_end_s + out.optimizer_s + out.gather_s - out.device_begin_s).argmax())


def explain(simulation: Simulation) -> list[str]:
    """Explain a step in lines: parts of the slowest device's step, critical path, memory."""
    out, simulator = simulation.outcome, simulation.simulator
    step = out.step_s or 1.0
    device = _slowest(simulation)
    parts = device_seconds(simulation, device)
    shares = ", ".join(f"{name} {format_duration(s)} ({s / step:.0%})" for name, s in parts.items())
    lines = [f"step {format_duration(out.step_s)} on {simulator.network.names[device]}: {shares}"]
    bound = list(binding(simulation).items())[:3]
    path = ", ".join(f"{name} {seconds / step:.0%}" for name, seconds in bound)
    lines.append(f"the step is bound by: {path}")
    lines += _network_lines(simulation)
    memory = out.memory_bytes / simulator.limits
    fullest = int(memory.argmax())
    lines.append(
        f"memory: at most {format_bytes(float(out.memory_bytes[fullest]))} of "
        f"{format_bytes(float(simulator.limits[fullest]))}, on {simulator.network.names[fullest]}"
    )
    return lines


def _network_lines(simulation: Simulation) -> list[str]:
    """The busiest link or NIC, and the traffic of gradients and activations."""
    out, network = simulation.outcome, simulation.simulator.network
    n_wires = len(out.busy) - network.n_devices
    lines = []
    if n_wires and out.busy[:n_wires].max(initial=0.0) > 0:
        busiest = int(out.busy[:n_wires].argmax())
        share = out.busy[busiest] / (out.step_s or 1.0)
        n = network.n_devices
        rate = network.nic[(busiest - n * n) % len(network.nic)]
        if busiest < n * n:
            rate = network.bandwidth[busiest // n, busiest % n]
        name = f"{network.resource_name(busiest)} ({format_bandwidth(float(rate))})"
        lines.append(f"busiest: {name}, {share:.0%} of the step")
    edge_bytes, n_microbatches = out.lowered.work.edge_bytes, simulation.strategy.n_microbatches
    start = out.start[out.lowered.begins[0] : out.lowered.begins[2]]
    exists = ~np.isnan(start.reshape(2 * n_microbatches, len(edge_bytes)))
    moved = float((exists * edge_bytes).sum())
    options, buckets = simulation.simulator.options, out.lowered.buckets
    is_averaging = options.sync_every > 1
    synced = float(buckets.n_bytes[(buckets.n_rounds == 0) == is_averaging].sum())
    synced *= options.sent_bytes_per_gradient_byte
    summed = float(out.lowered.sum_bytes.sum()) * n_microbatches
    how = "gradients are summed to the owners of their parts"
    if is_averaging:
        how = "replicas are averaged"
    elif simulation.strategy.shard_state == "none":
        how = "gradients are all-reduced"
    within = f", {format_bytes(summed)} of activations too" if summed else ""
    lines.append(
        f"per step {format_bytes(moved)} of activations and their gradients cross devices and "
        f"{format_bytes(synced)} of {how}{within}"
    )
    units, first = out.lowered.gathered, dict[tuple[int, ...], tuple[int, ...]]()
    for unit in units:  # nodes that gather apart count once
        first.setdefault(unit.operators, unit.devices)
    wire = simulation.simulator.options.wire_bytes_per_fp32_byte
    once = (unit for unit in units if unit.devices == first[unit.operators])
    gathered = sum(unit.sent_bytes(wire) for unit in once)
    if gathered:
        lines.append(f"per step {format_bytes(gathered)} of parameters are gathered before use")
    return lines
