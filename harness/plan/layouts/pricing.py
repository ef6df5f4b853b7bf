"""The step of a layout, in closed form over its stages.

Replicas are alike, and so are the devices of a tensor-parallel group: a stage is one device. With M
microbatches, a stage of w seconds each that is reached after p seconds of earlier stages, and whose
gradients take y seconds to all-reduce, ends after

    M w + max(p, p / 3 + y - h)

(see `search/pipelines.py`), and the step is the last one's end. The last backward hides h of the
all-reduce, but not its last bucket. A stage that recomputes runs forward again while it waits for
the first gradient, so that p is without it. Rings of a node's devices share its NIC.

One tensor-parallel group: seconds and bytes of each operator for one microbatch.

All groups of a layout on equal nodes are alike, so one is simulated, on the first devices of a
node. An operator's seconds last from its start to that of the next one, and so contain the
all-reduces that it waits for.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from harness.domain.cluster import Cluster, Link
from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.errors import PlanError
from harness.plan.layouts.degrees import ParallelLayout, layout_strategy
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.simulator import Simulator, Trial
from harness.plan.simulate.transfers import Floats, Ints


class GroupCosts(NamedTuple):
    """By operator that is placed, on one device of the group.

    Attributes:
        kept_bytes: that forward keeps for backward.
        sent_bytes: of the whole output, for readers of a later stage.
    """

    forward_s: Floats
    backward_s: Floats
    weight_bytes: Floats
    kept_bytes: Floats
    sent_bytes: Floats


def group_cluster(cluster: Cluster, tp: int) -> Cluster:
    """The first devices of the first node."""
    node = cluster.nodes[0]
    devices = node.devices[:tp]
    names = {device.name for device in devices}
    return Cluster(
        nodes=[msgspec.structs.replace(node, devices=devices)],
        links=[link for link in cluster.links if {link.source, link.target} <= names],
    )


class Group:
    """Groups of one size."""

    def __init__(
        self, graph: Graph, profile: Profile, cluster: Cluster, tp: int, options: SimulatorOptions
    ) -> None:
        self._graph, self._tp = graph, tp
        self._cluster = group_cluster(cluster, tp)
        self._simulator = Simulator(graph, profile, self._cluster, options=options)
        self._known: dict[int, GroupCosts] = {}

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
        trial = Trial.from_strategy(self._simulator, strategy)
        found, tables, placed = trial.outcome(), trial.tables, self._simulator.placed
        costs = self._simulator.costs(samples)
        first = np.flatnonzero(found.rows % self._tp == 0)
        ops = found.rows[first] // self._tp
        end_s = float(found.finish[first].max())
        wire = [
            costs.wire_bytes_per_element(op) * float(np.prod(list(costs.shapes[op].values())))
            for op in placed
        ]
        return GroupCosts(
            _seconds(found.start[first], ops, placed, end_s),
            _seconds(
                found.start[first + len(found.rows)], ops, placed, float(found.device_end_s[0])
            ),
            tables.weight_bytes[placed].max(axis=1),
            (tables.output_bytes + tables.saved_bytes)[placed].max(axis=1),
            np.array(wire, dtype=np.float64),
        )


def _seconds(start: Floats, ops: Ints, placed: list[int], end_s: float) -> Floats:
    """By placed operator: from its start to the next one's, 0 where it has no task."""
    runs = np.flatnonzero(~np.isnan(start))
    order = runs[np.argsort(start[runs], kind="stable")]
    found = dict.fromkeys(placed, 0.0)
    ends = [*start[order[1:]].tolist(), end_s]
    for op, begin, end in zip(ops[order].tolist(), start[order].tolist(), ends, strict=True):
        found[op] += max(0.0, end - begin)
    return np.array([found[op] for op in placed])


class NodeLinks(NamedTuple):
    """Links of equal nodes: bytes/s and seconds."""

    n_each: int
    inside: float
    between: float
    latency_s: float

    @classmethod
    def from_cluster(cls, cluster: Cluster) -> NodeLinks:
        """The slowest link inside the first node, and from it to the second one.

        Raises:
            PlanError: nodes or devices differ, or a bandwidth is missing.
        """
        shapes = {
            (tuple((d.kind, d.speed, d.memory_bytes) for d in node.devices), node.nic_bytes_per_s)
            for node in cluster.nodes
        }
        if len(shapes) > 1 or len(set(next(iter(shapes))[0])) > 1:
            raise PlanError(
                f"--cost layouts plans for equal nodes of equal devices, and the cluster has "
                f"{len(shapes)} kinds of node: use --cost simulator"
            )
        n_each = len(cluster.nodes[0].devices)
        own = {device.name for device in cluster.nodes[0].devices}
        near: list[Link] = []
        far: list[Link] = []
        for link in cluster.links:
            if link.source in own:
                (near if link.target in own else far).append(link)
        nic = cluster.nodes[0].nic_bytes_per_s
        if (n_each > 1 and not near) or (len(cluster.nodes) > 1 and not far and nic is None):
            raise PlanError("the cluster lacks links of its first node: measure or write them")
        rates = [link.bandwidth_bytes_per_s for link in far] + ([nic] if nic else [])
        return cls(
            n_each,
            min((link.bandwidth_bytes_per_s for link in near), default=np.inf),
            min(rates, default=np.inf),
            max((link.latency_s for link in far or near), default=0.0),
        )


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A layout with its flow, time and memory."""

    layout: ParallelLayout
    n_microbatches: int
    recompute: bool
    step_s: float
    memory_bytes: int

    @property
    def name(self) -> str:
        again = ", recomputed" if self.recompute else ""
        return f"{self.layout.name}, {self.n_microbatches} microbatches{again}"


def price(
    layout: ParallelLayout,
    ends: Ints,
    n_microbatches: int,
    *,
    recompute: bool,
    costs: GroupCosts,
    last_reader: Ints,
    links: NodeLinks,
    options: SimulatorOptions,
) -> Choice:
    """The step and the fullest device's memory.

    Args:
        ends: one more than the position of each stage's last operator.
        last_reader: of each operator's output, by position; -1 for none.
    """
    begins = np.concatenate([[0], ends[:-1]])
    forward, backward = _sums(costs.forward_s, ends), _sums(costs.backward_s, ends)
    weights, kept = _sums(costs.weight_bytes, ends), _sums(costs.kept_bytes, ends)
    work = forward * (1 + recompute) + backward
    crossing = np.array(
        [costs.sent_bytes[:b][last_reader[:b] >= b].sum() for b in begins], dtype=np.float64
    )
    crossing_s = _crossing_s(layout, crossing, links)
    on_the_way = forward + backward if options.recomputes_ahead else work
    reached = np.cumsum(on_the_way + 2 * crossing_s) - on_the_way
    gradients = weights * options.gradient_bytes_per_weight_byte
    sync_s = _all_reduce_s(layout, gradients, links)
    last_bucket = np.minimum(1.0, options.bucket_bytes / np.maximum(gradients, 1.0))
    hidden_s = np.minimum(backward, sync_s * (1 - last_bucket)) if options.overlap else 0.0
    ends_s = n_microbatches * work + np.maximum(reached, reached / 3 + sync_s - hidden_s)
    ends_s = np.maximum(ends_s, reached + n_microbatches * crossing_s)
    ends_s += weights * float(np.max(options.optimizer_s_per_byte))
    in_flight = np.minimum(n_microbatches, layout.pp - np.arange(layout.pp))
    active = in_flight * crossing + kept if recompute else in_flight * (kept + crossing)
    copies = 1 + options.gradient_bytes_per_weight_byte + options.n_optimizer_states
    memory = weights * copies + options.reserved_bytes + active
    return Choice(
        layout=layout,
        n_microbatches=n_microbatches,
        recompute=recompute,
        step_s=float(ends_s.max()),
        memory_bytes=int(np.ceil(memory.max())),
    )


def _sums(values: Floats, ends: Ints) -> Floats:
    return np.diff(np.concatenate([[0.0], values.cumsum()[ends - 1]]))


def _crossing_s(layout: ParallelLayout, n_bytes: Floats, links: NodeLinks) -> Floats:
    """Of one microbatch into each stage, one way."""
    width = layout.tp * layout.dp
    first = np.arange(layout.pp) * width // links.n_each
    is_inside = np.concatenate([[True], first[1:] == first[:-1]])
    shared = links.between / min(width, links.n_each)
    inside_s = n_bytes / links.inside
    return np.where(is_inside, inside_s, n_bytes / shared + links.latency_s) * (n_bytes > 0)


def _all_reduce_s(layout: ParallelLayout, n_bytes: Floats, links: NodeLinks) -> Floats:
    """A ring of the replicas of each device of a group; the rings of a node share its NIC."""
    dp, tp = layout.dp, layout.tp
    if dp == 1:
        return np.zeros(len(n_bytes))
    rate, latency_s = links.inside, 0.0
    if dp * tp > links.n_each:
        rate, latency_s = min(links.inside, links.between / min(tp, links.n_each)), links.latency_s
    return 2 * (dp - 1) * (n_bytes / dp / rate + latency_s)


def last_readers(graph: Graph, placed: list[int]) -> Ints:
    """By placed operator: position of its last consumer, -1 for none."""
    at = {op: k for k, op in enumerate(placed)}
    consumers = graph.consumers()
    return np.array([max((at[c] for c in consumers[op] if c in at), default=-1) for op in placed])
