"""The step of a layout, in closed form over its stages.

Replicas are alike, and so are the devices of a tensor-parallel group: a stage is one device. With M
microbatches, a stage of w seconds each that is reached after p seconds of earlier stages, and whose
gradients take y seconds to all-reduce, ends after

    M w + max(p, p / 3 + y - h)

(see `search/pipelines.py`), and the step is the last one's end. The last backward hides h of the
all-reduce once its first bucket is full, but not the last bucket. A stage that recomputes runs
forward again while it waits for the first gradient, so that p is without it. Rings of a node's
devices share its NIC. `sharded` adds what sharded state costs and saves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from harness.domain.cluster import Cluster, Link
from harness.domain.graph import Graph
from harness.domain.strategy import ShardState
from harness.errors import PlanError
from harness.plan.layouts.degrees import GroupCosts, ParallelLayout
from harness.plan.layouts.sharded import recomputed_bytes, stage_state
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.transfers import Floats, Ints


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
    shard_state: ShardState
    step_s: float
    memory_bytes: int

    @property
    def name(self) -> str:
        name = f"{self.layout.name}, {self.n_microbatches} microbatches"
        name += ", recomputed" if self.recompute else ""
        return name if self.shard_state == "none" else f"{name}, sharded {self.shard_state}"


def price(
    layout: ParallelLayout,
    ends: Ints,
    n_microbatches: int,
    *,
    recompute: bool,
    shard_state: ShardState,
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
    forward, kept = _sums(costs.forward_s, ends), _sums(costs.kept_bytes, ends)
    state = stage_state(
        shard_state,
        layout.dp,
        n_microbatches,
        ends=ends,
        costs=costs,
        again_s=costs.forward_s * recompute,
        all_reduce_s=partial(_all_reduce_s, layout, links=links),
        options=options,
    )
    backward = _sums(costs.backward_s, ends) + state.wait_s
    work = forward * (1 + recompute) + backward
    crossing = np.array(
        [costs.sent_bytes[:b][last_reader[:b] >= b].sum() for b in begins], dtype=np.float64
    )
    crossing_s = _crossing_s(layout, crossing, links)
    recomputes_ahead = options.recomputes_ahead and shard_state != "parameters"
    on_the_way = forward + backward if recomputes_ahead else work
    reached = np.cumsum(on_the_way + 2 * crossing_s) - on_the_way
    window_s = backward - state.first_s + (state.n_rounds - 1) * work
    exposed_s = state.sync_s - np.minimum(window_s, state.hideable_s)
    ends_s = n_microbatches * work + np.maximum(reached, reached / 3 + exposed_s)
    ends_s = np.maximum(ends_s, reached + n_microbatches * crossing_s)
    ends_s += state.owned_bytes * float(np.max(options.optimizer_s_per_byte)) + state.gather_s
    in_flight = np.minimum(n_microbatches, layout.pp - np.arange(layout.pp))
    if recompute:
        waiting, kept = recomputed_bytes(shard_state, ends, costs, last_reader, options)
        active = in_flight * (crossing + waiting) + kept
    else:
        active = in_flight * (kept + crossing)
    memory = state.n_bytes + options.reserved_bytes + active
    return Choice(
        layout=layout,
        n_microbatches=n_microbatches,
        recompute=recompute,
        shard_state=shard_state,
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


def _all_reduce_s(layout: ParallelLayout, n_bytes: Floats, *, links: NodeLinks) -> Floats:
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
