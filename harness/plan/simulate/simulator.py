"""Simulate a strategy: lower it to tables, run the events, say when everything happens.

`Simulator.simulate` prices one strategy from nothing. A search keeps a `Trial`, changes one
operator's plan at a time (`Trial.replace`) and asks again: only what the change touches is priced
anew, and the answer is exactly that of `simulate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.domain.schedule import ScheduleName
from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Stage, Strategy, validate
from harness.errors import PlanError
from harness.plan.simulate.costs import Costs, Floats, Ints, check_profile
from harness.plan.simulate.network import Network
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.tables import Buckets, Flow, Tables, flow_of


@dataclass(frozen=True)
class Outcome:
    """What the event loop found, in arrays; numbers of tasks are those of `kernels`.

    Attributes:
        step_s: from the first task to the last optimizer's end.
        memory_bytes: (n_devices,) peak: weights, gradients, optimizer state, activations.
        static_bytes: (n_devices,) of those, all but activations.
        device_end_s: (n_devices,) when a device may start its optimizer.
        optimizer_s: (n_devices,) seconds of the optimizer.
        rows: (n_rows,) operator * n_devices + device of each row; edges' ends are given so too.
    """

    step_s: float
    memory_bytes: Floats
    static_bytes: Floats
    device_end_s: Floats
    optimizer_s: Floats
    start: Floats
    finish: Floats
    cause: Ints
    busy: Floats
    held: Floats
    rows: Ints
    edge_source: Ints
    edge_target: Ints
    edge_bytes: Floats
    edge_index: Ints
    buckets: Buckets


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
        self.network = Network(cluster)
        self.limits: Floats = np.array(
            [memory_bytes or device.memory_bytes for device in cluster.devices], dtype=np.float64
        )
        self.speeds: Floats = np.array([device.speed for device in cluster.devices])
        self.placed = [i for i, op in enumerate(graph.operators) if has_tasks(op)]
        self.returns = _needs_gradient(graph)
        self._costs: dict[int, Costs] = {}

    def costs(self, samples: int) -> Costs:
        """Prices at one size of microbatch, kept."""
        if samples not in self._costs:
            self._costs[samples] = Costs(self.graph, self.profile, self.cluster, samples)
        return self._costs[samples]

    def simulate(self, strategy: Strategy) -> Simulation:
        """Price one strategy.

        Raises:
            StrategyError: it does not fit the graph or the cluster.
        """
        validate(strategy, self.graph, self.cluster)
        return Simulation(self, strategy, Trial.from_strategy(self, strategy).outcome())

    def step_s(self, strategy: Strategy) -> float:
        """Seconds of a step; infinite when it does not fit into memory."""
        simulation = self.simulate(strategy)
        return simulation.step_s if simulation.fits else np.inf


class Trial:
    """A strategy under change: tables, plans by operator's position, and the flow.

    `replace` does not validate: the search proposes only what is valid.
    """

    def __init__(
        self,
        simulator: Simulator,
        plans: Mapping[int, OperatorPlan],
        *,
        batch: int,
        n_microbatches: int = 1,
        schedule: ScheduleName = "gpipe",
        stages: Sequence[Stage] = (Stage(),),
    ) -> None:
        self.simulator = simulator
        # The largest microbatch stands for all; they differ by one sample at most.
        samples = -(-batch // n_microbatches)
        self.tables = Tables(
            simulator.costs(samples), simulator.network, simulator.options, dict(plans)
        )
        self.batch, self.n_microbatches = batch, n_microbatches
        self.stages = tuple(stages)
        self.schedule: ScheduleName = schedule
        self._flow: Flow | None = None
        self._stage_key: object = None

    @classmethod
    def from_strategy(cls, simulator: Simulator, strategy: Strategy) -> Trial:
        position = simulator.graph.index()
        return cls(
            simulator,
            {position[name]: plan for name, plan in strategy.operators.items()},
            batch=strategy.batch,
            n_microbatches=strategy.n_microbatches,
            schedule=strategy.schedule,
            stages=strategy.stages,
        )

    def replace(self, op: int, plan: OperatorPlan) -> None:
        """Give one operator another plan."""
        self.tables.replace(op, plan)

    def _current_flow(self) -> Flow:
        """The flow depends on which stage every operator is in and on the stages' devices."""
        plans = self.tables.plans
        n_devices = self.tables.n_devices
        if len(self.stages) == 1:
            if self._flow is None:
                stage_of = [0 if op in plans else -1 for op in range(self.tables.n_ops)]
                self._flow = flow_of(
                    stage_of,
                    self.stages,
                    [tuple(range(n_devices))],
                    1,
                    self.schedule,
                    self.n_microbatches,
                    n_devices,
                )
            return self._flow
        stage_of = [plans[op].stage if op in plans else -1 for op in range(self.tables.n_ops)]
        sets: list[set[int]] = [set() for _ in self.stages]
        for plan in plans.values():
            sets[plan.stage].update(plan.devices)
        devices = [tuple(sorted(found)) for found in sets]
        key = (tuple(stage_of), tuple(devices))
        if self._flow is None or key != self._stage_key:
            n_ranks = len(dict.fromkeys(devices))
            self._flow = flow_of(
                stage_of,
                self.stages,
                devices,
                n_ranks,
                self.schedule,
                self.n_microbatches,
                n_devices,
            )
            self._stage_key = key
        return self._flow

    def outcome(self) -> Outcome:
        """Run the events."""
        from harness.plan.simulate import kernels

        tables, flow, simulator = self.tables, self._current_flow(), self.simulator
        n_devices = tables.n_devices
        source, target, n_bytes, index = tables.edge_rows()
        rows, row_at = _number_rows(tables.active)
        from_row, to_row = row_at.ravel()[source], row_at.ravel()[target]
        received = np.bincount(to_row, weights=n_bytes, minlength=len(rows))
        crosses = self._stage_of()[source // n_devices] != self._stage_of()[target // n_devices]
        outside = np.bincount(to_row[crosses], weights=n_bytes[crosses], minlength=len(rows))
        following, first, last, peak, held = kernels.order_tasks(
            flow.n_microbatches,
            row_at,
            tables.output_bytes.ravel()[rows] + received,
            outside,
            flow.stage_ptr,
            flow.stage_ops,
            flow.recompute,
            flow.rank_of,
            flow.action_ptr,
            flow.actions,
            flow.split_weight,
        )
        buckets = tables.buckets()
        trigger_task, trigger_bucket = self._triggers(buckets, flow, last, row_at)
        network = simulator.network
        start, finish, _, cause, busy = kernels.run_events(
            flow.n_microbatches,
            rows % n_devices,
            self._seconds(flow, rows),
            following,
            first,
            from_row,
            to_row,
            n_bytes,
            simulator.returns[source // n_devices],
            network.latency_s,
            network.bandwidth,
            network.nic,
            network.node_of,
            network.n_resources,
            buckets.seconds,
            buckets.ptr,
            buckets.resource,
            buckets.occupied,
            trigger_task,
            trigger_bucket,
        )
        ends = _device_ends(last, finish, buckets)
        assert not np.isnan(ends).any(), "a device waits for ever: the schedule has a cycle"
        weights = tables.weight_bytes.sum(axis=0)
        optimizer = weights * np.asarray(simulator.options.optimizer_s_per_byte) / simulator.speeds
        static = weights * (2 + simulator.options.n_optimizer_states)
        return Outcome(
            step_s=float((ends + optimizer).max()),
            memory_bytes=static + peak,
            static_bytes=static,
            device_end_s=ends,
            optimizer_s=optimizer,
            start=start,
            finish=finish,
            cause=cause,
            busy=busy,
            held=held,
            rows=rows,
            edge_source=source,
            edge_target=target,
            edge_bytes=n_bytes,
            edge_index=index,
            buckets=buckets,
        )

    def _stage_of(self) -> Ints:
        stages = np.zeros(self.tables.n_ops, dtype=np.int64)
        for op, plan in self.tables.plans.items():
            stages[op] = plan.stage
        return stages

    def _seconds(self, flow: Flow, rows: Ints) -> Floats:
        """(4, n_rows): forward, backward, weight pass and recomputation.

        A zero-bubble schedule gives half of the backward of an operator with weights to the
        weight pass: gradients of inputs and of weights are products of equal size.
        """
        tables = self.tables
        forward, backward = tables.forward_s.ravel()[rows], tables.backward_s.ravel()[rows]
        has_weights = tables.weight_bytes.ravel()[rows] > 0
        weight = np.where(has_weights, backward / 2, 0.0) if flow.split_weight else 0 * backward
        return np.stack([forward, backward - weight, weight, forward])

    def _triggers(
        self, buckets: Buckets, flow: Flow, last: Ints, row_at: Ints
    ) -> tuple[Ints, Ints]:
        """(compute task, bucket that waits for it): the last microbatch's gradients, or,
        without overlap, the device's last task."""
        if not self.simulator.options.overlap:
            pairs = [(int(last[d]), k) for k, group in enumerate(buckets.groups) for d in group]
        else:
            which = 2 if flow.split_weight else 1
            n_rows = int(row_at.max()) + 1
            base = ((which + 1) * flow.n_microbatches - 1) * n_rows
            pairs = [
                (base + int(row_at[op, d]), k)
                for k, (ops, group) in enumerate(zip(buckets.members, buckets.groups, strict=True))
                for op in ops
                for d in group
            ]
        flat = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        return np.ascontiguousarray(flat[:, 0]), np.ascontiguousarray(flat[:, 1])


def _number_rows(active: npt.NDArray[np.bool_]) -> tuple[Ints, Ints]:
    """Flat places of the active entries, and the row of every place (-1: none)."""
    rows = np.flatnonzero(active)
    row_at = np.full(active.shape, -1, dtype=np.int64)
    row_at.ravel()[rows] = np.arange(len(rows))
    return rows, row_at


def _device_ends(last: Ints, finish: Floats, buckets: Buckets) -> Floats:
    """When each device's gradients are complete."""
    ends = np.where(last >= 0, finish[last], 0.0)
    n_buckets = len(buckets.groups)
    for group, end in zip(buckets.groups, finish[len(finish) - n_buckets :], strict=True):
        for device in group:
            ends[device] = max(ends[device], end) if end == end else np.nan
    return ends


def _needs_gradient(graph: Graph) -> npt.NDArray[np.bool_]:
    """Whether anything before an operator, or it itself, has weights to train."""
    needs = np.zeros(len(graph.operators), dtype=np.bool_)
    for i, producers in enumerate(graph.producers()):
        needs[i] = graph.operators[i].parameter_bytes > 0 or any(needs[p] for p in producers)
    return needs


@dataclass(frozen=True)
class Simulation:
    """One strategy's outcome; `harness.plan.simulate.report` turns it into records and words."""

    simulator: Simulator
    strategy: Strategy
    outcome: Outcome

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
        """Whether every device has memory enough."""
        return bool((self.outcome.memory_bytes <= self.simulator.limits).all())

    def check_memory(self) -> None:
        """Refuse a strategy that would run out of memory.

        Raises:
            PlanError: names the device that lacks most.
        """
        excess = self.outcome.memory_bytes - self.simulator.limits
        worst = int(excess.argmax())
        if excess[worst] > 0:
            raise PlanError(
                f"strategy {self.strategy.name!r} needs {self.outcome.memory_bytes[worst]:.4g} "
                "B on "
                f"device {self.simulator.network.names[worst]}, which has "
                f"{self.simulator.limits[worst]:.4g} B: use more devices, microbatches or "
                "recomputation"
            )
