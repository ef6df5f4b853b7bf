"""Simulate a strategy: lower it to tables and run the events.

`Simulator.simulate` prices one strategy from scratch. A search keeps a `Trial` and changes one
operator's plan at a time (`Trial.replace`). `Trial.outcome` then prices again only the affected
values, and its result equals that of `simulate` exactly.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import pairwise
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.shard_state import ShardState, shards_gradients, sharing_groups
from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Strategy, validate
from harness.errors import PlanError
from harness.plan.simulate.activations import readers_of
from harness.plan.simulate.block_times import is_product, needs_gradient
from harness.plan.simulate.costs import Costs, check_profile
from harness.plan.simulate.network import Network
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.sharded_state import (
    Sharing,
    Slice,
    gather_seconds,
    owned_bytes,
    shared_bytes,
    shared_slices,
)
from harness.plan.simulate.tables import Flow, Tables, flow_of
from harness.plan.simulate.transfers import Floats, Ints
from harness.units import format_bytes

if TYPE_CHECKING:
    from harness.plan.simulate.lowering import Lowered


@dataclass(frozen=True)
class EventTimes:
    """Result of the event loop for one of a sequence of steps, in arrays. Tasks are numbered as in
    `work`; times count from the first device's start.

    Attributes:
        step_s: longest time of a device from its start to the end of its optimizer.
        device_begin_s: (n_devices,) end of each device's previous step.
        memory_bytes: (n_devices,) peak: weights, gradients, optimizer state, activations.
        static_bytes: (n_devices,) of weights, gradients and optimizer state.
        device_end_s: (n_devices,) earliest start of each device's optimizer.
        optimizer_s: (n_devices,) seconds of the optimizer.
        gather_s: (n_devices,) seconds until the device has all new weights after its optimizer.
        updated: bytes of weights that are gathered after the optimizer, by group.
        lowered: the tasks, with their durations without contention.
    """

    step_s: float
    device_begin_s: Floats
    memory_bytes: Floats
    static_bytes: Floats
    device_end_s: Floats
    optimizer_s: Floats
    gather_s: Floats
    start: Floats
    finish: Floats
    cause: Ints
    busy: Floats
    updated: dict[tuple[int, ...], int]
    lowered: Lowered


class Simulator:
    """Prices strategies of one graph on one cluster.

    Raises:
        PlanError: the profile is for another graph, or lacks a device kind or an operator, or the
            graph has no batch.
        ClusterError: two devices have no link.
    """

    def __init__(
        self,
        graph: Graph,
        profile: Profile,
        cluster: Cluster,
        *,
        options: SimulatorOptions | None = None,
        memory_bytes: int | None = None,
    ) -> None:
        check_profile(graph, profile)
        if graph.batch is None:
            raise PlanError(
                f"graph {graph.name!r} does not say for how many samples its times and bytes hold: "
                "set its batch"
            )
        self.graph, self.profile, self.cluster = graph, profile, cluster
        self.options = options or SimulatorOptions()
        self.network = Network(cluster, self.options.all_reduce)
        self.limits: Floats = np.array(
            [memory_bytes or device.memory_bytes for device in cluster.devices], dtype=np.float64
        )
        self.speeds: Floats = np.array([device.speed for device in cluster.devices])
        index = graph.index()
        self.alike = [(index[first], index[other]) for first, other in graph.planned_alike()]
        self.placed = [i for i, op in enumerate(graph.operators) if has_tasks(op)]
        frozen = self.options.frozen
        self.returns = needs_gradient(graph, frozen)
        self.readers = readers_of(graph, self.returns)
        self.is_product = np.array(
            [is_product(op) and op.name not in frozen for op in graph.operators]
        )
        self._costs: dict[int, Costs] = {}
        self.operator_seconds: dict[tuple[int, int], Floats] = {}  # by batch and microbatches
        self._segments: dict[tuple[tuple[int, ...], int], list[int]] = {}  # of any batch

    def costs(self, samples: int) -> Costs:
        """Prices at one size of microbatch, cached."""
        if samples not in self._costs:
            self._costs[samples] = Costs(
                self.graph, self.profile, self.cluster, samples, self.options
            )
            self._costs[samples].segments = self._segments
        return self._costs[samples]

    def sharing(self, shard_state: ShardState) -> Sharing:
        """The groups of some holders that each keep a slice in parts; of averaged replicas, the
        holders in each."""
        if self.options.sync_every > 1 and shard_state != "none":
            return self.network.replicas
        return partial(sharing_groups, shard_state, node_of=self.network.node_of.tolist())

    def simulate(self, strategy: Strategy) -> Simulation:
        """Price one strategy.

        Raises:
            StrategyError: it does not fit the graph or the cluster.
        """
        validate(strategy, self.graph, self.cluster)
        return Simulation(self, strategy, Trial(self, strategy).outcome())

    def by_name(self, plans: Mapping[int, OperatorPlan]) -> dict[str, OperatorPlan]:
        """Plans by the operators' names, in the order of the graph."""
        return {self.graph.operators[op].name: plans[op] for op in sorted(plans)}

    def step_s(self, strategy: Strategy) -> float:
        """Seconds of a step; infinite if it does not fit into memory."""
        simulation = self.simulate(strategy)
        return simulation.step_s if simulation.fits else np.inf

    def fastest(self, strategies: Sequence[Strategy]) -> Strategy:
        """The fastest that fits into memory, or, if none does, the fastest."""
        if len(strategies) == 1:
            return strategies[0]
        simulations = [self.simulate(strategy) for strategy in strategies]
        return min(simulations, key=lambda each: (not each.fits, each.step_s)).strategy


class Trial:
    """A strategy under change: tables, plans by operator's position, and the flow.

    `replace` does not validate, because the search proposes only valid plans.

    Args:
        strategy: with the plans of the beginning.
    """

    def __init__(self, simulator: Simulator, strategy: Strategy) -> None:
        self.simulator, self.strategy = simulator, strategy
        batch, n_microbatches = strategy.batch, strategy.n_microbatches
        samples = -(-batch // n_microbatches)
        n_smaller = n_microbatches * samples - batch
        position = simulator.graph.index()
        self.tables = Tables(
            simulator.costs(samples),
            simulator.options,
            {position[name]: plan for name, plan in strategy.operators.items()},
            (simulator.costs(samples - 1), n_smaller / n_microbatches) if n_smaller else None,
            # The executor leaves gradients to autograd where it neither sends nor adds them up.
            keeps_large=simulator.cluster.n_devices > 1 or n_microbatches > 1,
        )
        self._flow: Flow | None = None
        self._stage_key: object = None

    def current(self, name: str) -> Strategy:
        """The strategy with the plans of now, under another name."""
        operators = self.simulator.by_name(self.tables.plans)
        return msgspec.structs.replace(self.strategy, name=name, operators=operators)

    def replace(self, op: int, plan: OperatorPlan) -> None:
        self.tables.replace(op, plan)

    def current_flow(self) -> Flow:
        """Recompute the flow if the operators' stages or the stages' devices have changed."""
        plans, n_devices = self.tables.plans, self.tables.n_devices
        stages = self.strategy.stages
        if self._flow is not None and len(stages) == 1:
            return self._flow
        stage_of = [plans[op].stage if op in plans else -1 for op in range(self.tables.n_ops)]
        devices = [tuple(range(n_devices))]
        if len(stages) > 1:
            sets: list[set[int]] = [set() for _ in stages]
            for plan in plans.values():
                sets[plan.stage].update(plan.devices)
            devices = [tuple(sorted(used)) for used in sets]
        key = (tuple(stage_of), tuple(devices))
        if self._flow is None or key != self._stage_key:
            self._flow = flow_of(
                stage_of,
                stages,
                devices,
                self.strategy.schedule,
                self.strategy.n_microbatches,
                n_devices,
                options=self.simulator.options,
            )
            self._stage_key = key
        return self._flow

    def lowered(self) -> Lowered:
        """The step's tasks with their durations."""
        from harness.plan.simulate import lowering

        return lowering.lower(
            self.simulator, self.tables, self.current_flow(), self.strategy.shard_state
        )

    def slices(self) -> list[Slice]:
        """The slices of all operators' weights with the devices that share each, those of tied
        ones once."""
        held = (piece for op in self.tables.plans for piece in self.tables.held(op))
        return shared_slices(held, self.simulator.sharing(self.strategy.shard_state))

    def outcome(self) -> EventTimes:
        """Run the events of a step.

        For a pipeline the result is the second of two steps. Each device begins it as soon as it
        has ended its part of the first, as the executor's ranks do, so that a step fills the
        pipeline while the previous one drains. Devices of a single stage exchange so much that they
        stay synchronised.
        """
        tables, simulator, lowered = self.tables, self.simulator, self.lowered()
        weights = tables.weight_bytes.sum(axis=0)
        slices = self.slices() if self.strategy.shard_state != "none" else []
        owned = owned_bytes(slices, tables.n_devices) if slices else weights
        optimizer = owned * np.asarray(simulator.options.optimizer_s_per_byte) / simulator.speeds
        shared = shared_bytes(slices, lowered.gathered)
        begin: Floats = np.zeros(tables.n_devices)
        start, finish, cause, busy, end = _run(lowered, begin)
        if len(self.strategy.stages) > 1:
            works = lowered.work.first >= 0
            done = end + optimizer
            done += gather_seconds(simulator.network, shared, done)
            begin = np.where(works, done - done[works].min(), 0.0)
            start, finish, cause, busy, end = _run(lowered, begin)
        options = simulator.options
        is_sharded = shards_gradients(self.strategy.shard_state, self.strategy.n_microbatches)
        summed = np.zeros(tables.n_devices) if is_sharded else weights
        if self.strategy.shard_state != "none":
            summed = summed + owned
        elif options.reduce_bytes_per_gradient_byte < 1:
            sent = tables.shared_bytes.sum(axis=0)  # rounded copies
            summed = summed + sent * options.sent_bytes_per_gradient_byte
        static = (
            weights
            - lowered.saved
            + summed
            + owned * options.n_states
            + tables.frozen_bytes.sum(axis=0)
            + tables.step_input_bytes(self.strategy.n_microbatches)
            + options.reserved_bytes
        )
        ready = end + optimizer
        gather = gather_seconds(simulator.network, shared, ready)
        return EventTimes(
            step_s=float((ready + gather - begin).max()),
            device_begin_s=begin,
            memory_bytes=static - lowered.alone + lowered.peak,
            static_bytes=static,
            device_end_s=end,
            optimizer_s=optimizer,
            gather_s=gather,
            start=start,
            finish=finish,
            cause=cause,
            busy=busy,
            updated=shared,
            lowered=lowered,
        )


def _run(lowered: Lowered, begin: Floats) -> tuple[Floats, Floats, Ints, Floats, Floats]:
    """Run the events with given start times of devices: `start` to `busy` of `EventTimes`, and
    `device_end_s`."""
    from harness.plan.simulate import kernels

    start, finish, cause, busy = kernels.run_events(lowered.work, lowered.dependents, begin)
    buckets = lowered.buckets
    complete = np.where(lowered.last >= 0, finish[lowered.last], 0.0)  # of each device's gradients
    np.maximum.at(complete, buckets.ends.device, finish[lowered.begins[4] + buckets.ends.bucket])
    ends = np.maximum(begin, complete)
    assert not np.isnan(ends).any(), "a device waits for ever: the schedule has a cycle"
    return start, finish, cause, busy, ends


@dataclass(frozen=True)
class Simulation:
    """One strategy's outcome; `harness.plan.simulate.report` converts it to records and words."""

    simulator: Simulator
    strategy: Strategy
    outcome: EventTimes

    @property
    def step_s(self) -> float:
        return self.outcome.step_s

    @cached_property
    def memory_bytes(self) -> dict[str, int]:
        """Predicted peak by device name."""
        names = self.simulator.network.names
        return {name: round(n) for name, n in zip(names, self.outcome.memory_bytes, strict=True)}

    @property
    def fits(self) -> bool:
        """Whether every device has enough memory."""
        return bool((self.outcome.memory_bytes <= self.simulator.limits).all())

    def check_memory(self) -> None:
        """Refuse a strategy that would run out of memory."""
        excess = self.outcome.memory_bytes - self.simulator.limits
        worst = int(excess.argmax())
        if excess[worst] > 0:
            needed, limit = self.outcome.memory_bytes[worst], self.simulator.limits[worst]
            raise PlanError(
                f"strategy {self.strategy.name!r} needs {format_bytes(needed)} on device "
                f"{self.simulator.network.names[worst]}, which has {format_bytes(limit)}: use more "
                "devices, microbatches or recomputation"
            )


def operator_seconds(simulator: Simulator, batch: int, n_microbatches: int = 1) -> Floats:
    """(n_devices, n_placed) seconds of forward plus backward of a microbatch, for each whole
    operator on each device; cached."""
    if (known := simulator.operator_seconds.get((batch, n_microbatches))) is not None:
        return known
    devices, rates = simulator.cluster.devices, np.asarray(simulator.options.stream_s_per_byte)
    by_kind: dict[object, Floats] = {}
    by_device = []
    for k, (device, rate) in enumerate(
        zip(devices, np.broadcast_to(rates, len(devices)), strict=True)
    ):
        key = device.kind, device.speed, float(rate)
        if key not in by_kind:
            plans = simulator.by_name(dict.fromkeys(simulator.placed, OperatorPlan({}, [k])))
            whole = Strategy(
                name="whole", batch=batch, operators=plans, n_microbatches=n_microbatches
            )
            lowered = Trial(simulator, whole).lowered()
            ops = (lowered.rows // len(devices)).tolist()
            by_op = dict(zip(ops, lowered.work.seconds[:3].sum(axis=0), strict=True))
            by_kind[key] = np.array([by_op[op] for op in simulator.placed])
        by_device.append(by_kind[key])
    seconds = simulator.operator_seconds[batch, n_microbatches] = np.stack(by_device)
    return seconds


def crossing_seconds(
    simulator: Simulator, batch: int, n_microbatches: int, devices: Sequence[int]
) -> list[float]:
    """By placed operator, seconds of what crosses a cut before it, there and back, over the slowest
    link from one of these devices to the next."""
    network = simulator.network
    if len(devices) == 1:
        return []
    costs = simulator.costs(-(-batch // n_microbatches))
    place = {op: k for k, op in enumerate(simulator.placed)}
    n_bytes = np.zeros(len(place))
    for op, readers in enumerate(simulator.graph.consumers()):
        last = max((place[reader] for reader in readers if reader in place), default=-1)
        if op in place:
            ways = 1 + bool(simulator.returns[op])
            n_bytes[place[op] + 1 : last + 1] += ways * costs.wire_bytes(op)
    a, b = max(pairwise(devices), key=lambda pair: network.transfer_s(pair[0], pair[1], 1 << 20))
    return [network.transfer_s(a, b, amount) for amount in n_bytes.tolist()]
