"""One tensor-parallel group: seconds and bytes of each operator for one microbatch.

All groups of a layout on equal nodes are alike, so one is simulated, on the first devices of a
node. An operator's seconds last from its start to that of the next one, and so contain the
all-reduces that it waits for.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from harness.domain.cluster import Cluster
from harness.domain.graph import Graph
from harness.domain.profile import Profile
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
