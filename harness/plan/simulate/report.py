"""A simulation as records like a measured run's, and an explanation in words."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from harness.domain.record import Span, SpanKind
from harness.plan.simulate.simulator import Simulation
from harness.units import format_bandwidth, format_bytes, format_duration

_PASS_KINDS: tuple[SpanKind, ...] = ("forward", "backward", "backward", "forward")
_PASS_PREFIX = ("", "", "weights of ", "recompute ")


class Event(NamedTuple):
    """One task, decoded.

    Attributes:
        task: its number in the simulation's arrays.
        ranks: devices that it keeps busy: one computes, two transfer, a group all-reduces.
        resource: what it uses, in words: a device, a link, a group.
    """

    task: int
    kind: SpanKind
    name: str
    ranks: tuple[int, ...]
    resource: str
    start_s: float
    duration_s: float
    n_bytes: int | None = None


def events(simulation: Simulation) -> Iterator[Event]:
    """Every task that took place, in order of start."""
    start = simulation.outcome.start
    for task in np.argsort(start, kind="stable"):
        if np.isnan(start[task]):
            return
        event = decode(simulation, int(task))
        if event.duration_s or not event.name.startswith("weights of "):
            yield event


def decode(simulation: Simulation, task: int) -> Event:
    """What a task's number stands for."""
    out, simulator = simulation.outcome, simulation.simulator
    operators, names = simulator.graph.operators, simulator.network.names
    n_devices, n_microbatches = len(names), simulation.strategy.n_microbatches
    rows = len(out.rows)
    start = float(out.start[task])
    duration = float(out.finish[task]) - start
    n_compute, n_moves = 4 * n_microbatches * rows, n_microbatches * len(out.edge_bytes)
    if task < n_compute:
        what, rest = divmod(task, n_microbatches * rows)
        microbatch, row = divmod(rest, rows)
        op, device = divmod(int(out.rows[row]), n_devices)
        name = f"{_PASS_PREFIX[what]}{operators[op].name}{_microbatch(microbatch, n_microbatches)}"
        return Event(task, _PASS_KINDS[what], name, (device,), names[device], start, duration)
    if task < n_compute + 2 * n_moves:
        back, rest = divmod(task - n_compute, n_moves)
        microbatch, edge = divmod(rest, len(out.edge_bytes))
        op, a = divmod(int(out.edge_source[edge]), n_devices)
        b = int(out.edge_target[edge]) % n_devices
        a, b = (b, a) if back else (a, b)
        what_name = f"{'gradient of ' if back else ''}{operators[op].name}"
        name = f"{what_name}{_microbatch(microbatch, n_microbatches)} {names[a]} -> {names[b]}"
        n_bytes = round(float(out.edge_bytes[edge]))
        link = f"link {names[a]} -> {names[b]}"
        return Event(task, "communication", name, (a, b), link, start, duration, n_bytes)
    n_sums = len(out.sums)
    k = task - n_compute - 2 * n_moves
    if k < 2 * n_microbatches * n_sums:
        is_back, rest = divmod(k, n_microbatches * n_sums)
        microbatch, c = divmod(rest, n_sums)
        one = out.sums[c]
        name = "statistics of " if one.is_norm else "sum of "
        name += operators[one.operator].name + _microbatch(microbatch, n_microbatches)
        name = f"gradient of {name}" if is_back else name
        n_bytes = one.n_bytes[is_back] * one.n_rounds[is_back]
        where = _group_name(one.group, names)
        return Event(task, "communication", name, one.group, where, start, duration, n_bytes)
    k -= 2 * n_microbatches * n_sums
    group, members = out.buckets.groups[k], out.buckets.members[k]
    last = f" to {operators[members[-1]].name}" if len(members) > 1 else ""
    name = f"all-reduce {operators[members[0]].name}{last}"
    where = _group_name(group, names)
    n_bytes = round(float(out.buckets.n_bytes[k]))
    return Event(task, "communication", name, group, where, start, duration, n_bytes)


def _group_name(group: Sequence[int], names: Sequence[str]) -> str:
    where = "all-reduce over " + ", ".join(names[d] for d in group[:4])
    return where + (f" and {len(group) - 4} more" if len(group) > 4 else "")


def _microbatch(microbatch: int, n_microbatches: int) -> str:
    return f" #{microbatch}" if n_microbatches > 1 else ""


def spans(simulation: Simulation, *, step: int = 0) -> dict[int, list[Span]]:
    """Records of one step by rank, as a measured run writes them.

    Times count from where the first rank begins it.
    """
    found: dict[int, list[Span]] = {rank: [] for rank in range(len(simulation.simulator.limits))}
    for event in events(simulation):
        for rank in event.ranks:
            found[rank].append(
                Span(
                    kind=event.kind,
                    name=event.name,
                    step=step,
                    start_s=event.start_s,
                    duration_s=event.duration_s,
                    n_bytes=event.n_bytes,
                )
            )
    out = simulation.outcome
    for rank, own in found.items():
        start, duration = float(out.device_end_s[rank]), float(out.optimizer_s[rank])
        if duration > 0:
            own.append(Span(kind="optimizer", step=step, start_s=start, duration_s=duration))
        begin = float(out.device_begin_s[rank])
        own.append(Span(kind="step", step=step, start_s=begin, duration_s=out.step_s))
    return found


def device_seconds(simulation: Simulation, device: int) -> dict[str, float]:
    """Where a device's step goes: forward, backward, exposed communication and waiting, optimizer.

    Exposed is what of the step is neither computation nor optimizer.
    """
    totals = {"forward": 0.0, "backward": 0.0}
    for event in events(simulation):
        if event.kind in totals and event.ranks == (device,):
            totals[event.kind] += event.duration_s
    optimizer = float(simulation.outcome.optimizer_s[device])
    exposed = simulation.step_s - sum(totals.values()) - optimizer
    return {**totals, "exposed": max(0.0, exposed), "optimizer": optimizer}


def contention_seconds(simulation: Simulation) -> list[float]:
    """By device, what computing takes longer because transfers take of its processor's time."""
    out = simulation.outcome
    n_rows, n_microbatches = len(out.rows), simulation.strategy.n_microbatches
    n_compute = 4 * n_microbatches * n_rows
    taken = (out.finish - out.start)[:n_compute].reshape(4, n_microbatches, n_rows)
    taken -= out.seconds[:, None, :]
    longer = np.nansum(taken, axis=(0, 1))
    n_devices = len(simulation.simulator.network.names)
    by_device = np.bincount(out.rows % n_devices, weights=longer, minlength=n_devices)
    return [max(0.0, float(seconds)) for seconds in by_device]


def critical_path(simulation: Simulation) -> list[Event]:
    """The chain of tasks that the slowest device's step ends with, first to last.

    It begins with a device that could begin; what that one had to end first is in the step before.
    """
    out = simulation.outcome
    slowest = _slowest(simulation)
    done = np.flatnonzero(out.finish == out.device_end_s[slowest])
    own = [task for task in done if slowest in decode(simulation, int(task)).ranks]
    path: list[Event] = []
    task = int(own[0]) if own else -1
    while task >= 0:
        path.append(decode(simulation, task))
        task = int(out.cause[task])
    return path[::-1]


def binding(simulation: Simulation) -> dict[str, float]:
    """Seconds of the critical path by what they were spent on, largest first; they sum to the step.

    A task counts until the next one's start (a transfer may hand its link on before it has
    arrived). What lies before the slowest device's step does not count; where the path begins
    later, the step before, on the device that it begins with, is what took the time.
    """
    shares: dict[str, float] = defaultdict(float)
    path = critical_path(simulation)
    out, names = simulation.outcome, simulation.simulator.network.names
    slowest = _slowest(simulation)
    begin = float(out.device_begin_s[slowest])
    if path and path[0].start_s > begin:
        last = max(path[0].ranks, key=lambda rank: float(out.device_begin_s[rank]))
        shares[f"the step before on {names[last]}"] = path[0].start_s - begin
    following = [event.start_s for event in path[1:]] + [float(out.device_end_s[slowest])]
    for event, until in zip(path, following, strict=True):
        end = min(event.start_s + event.duration_s, until)
        shares[event.resource] += max(0.0, end - max(event.start_s, begin))
    if out.optimizer_s[slowest] > 0:
        shares[f"optimizer of {names[slowest]}"] = float(out.optimizer_s[slowest])
    return dict(sorted(shares.items(), key=lambda item: -item[1]))


def _slowest(simulation: Simulation) -> int:
    """The device whose step is the longest."""
    out = simulation.outcome
    return int((out.device_end_s + out.optimizer_s - out.device_begin_s).argmax())


def explain(simulation: Simulation) -> list[str]:
    """Lines for people: breakdown of the slowest device, what binds, memory."""
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
    """The busiest link or interface, and the traffic of gradients and activations."""
    out, network = simulation.outcome, simulation.simulator.network
    n_wires = len(out.busy) - network.n_devices
    lines = []
    if n_wires and out.busy[:n_wires].max(initial=0.0) > 0:
        busiest = int(out.busy[:n_wires].argmax())
        share = out.busy[busiest] / (out.step_s or 1.0)
        rate = format_bandwidth(_rate(simulation, busiest))
        lines.append(f"busiest: {network.resource_name(busiest)} ({rate}), {share:.0%} of the step")
    moved = _moved_bytes(simulation)
    synced = float(out.buckets.n_bytes.sum())
    summed = sum(
        n_bytes * n_rounds * simulation.strategy.n_microbatches
        for one in out.sums
        for n_bytes, n_rounds in zip(one.n_bytes, one.n_rounds, strict=True)
    )
    within = f", {format_bytes(summed)} of activations too" if summed else ""
    lines.append(
        f"per step {format_bytes(moved)} of activations and their gradients cross devices and "
        f"{format_bytes(synced)} of gradients are all-reduced{within}"
    )
    return lines


def _moved_bytes(simulation: Simulation) -> float:
    """What travels from device to device in a step, forward and backward."""
    out, n_microbatches = simulation.outcome, simulation.strategy.n_microbatches
    n_edges, n_compute = len(out.edge_bytes), 4 * n_microbatches * len(out.rows)
    start = out.start[n_compute : n_compute + 2 * n_microbatches * n_edges]
    took_place = ~np.isnan(start.reshape(2 * n_microbatches, n_edges))
    return float((took_place * out.edge_bytes).sum())


def _rate(simulation: Simulation, resource: int) -> float:
    network = simulation.simulator.network
    n = network.n_devices
    if resource < n * n:
        return float(network.bandwidth[resource // n, resource % n])
    return float(network.nic[(resource - n * n) % len(network.nic)])
