"""A strategy lowered to the arrays that the compiled event loop reads.

`Tables` is mutable on purpose: `replace` swaps one operator's plan and touches only its row and
its edges, which is what makes proposing changes cheap. It can be undone by replacing back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from harness.domain.schedule import ScheduleName, rank_actions
from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Stage
from harness.plan.simulate.costs import Costs, EdgeCosts, Floats, Ints
from harness.plan.simulate.network import Network
from harness.plan.simulate.options import SimulatorOptions

_PASS = {"forward": 0, "backward": 1, "weight": 2}


@dataclass(frozen=True)
class Flow:
    """How microbatches flow, as arrays (see `kernels.order_tasks`)."""

    n_microbatches: int
    stage_ptr: Ints
    stage_ops: Ints
    recompute: npt.NDArray[np.bool_]
    rank_of: Ints
    action_ptr: Ints
    actions: Ints
    split_weight: bool


@dataclass(frozen=True)
class Buckets:
    """All-reduces of gradients.

    Attributes:
        members: operators of each bucket.
        groups: devices of each bucket.
    """

    seconds: Floats
    n_bytes: Floats
    ptr: Ints
    resource: Ints
    occupied: Floats
    members: list[list[int]]
    groups: list[tuple[int, ...]]


def flow_of(
    stages_of_ops: Sequence[int],
    stages: Sequence[Stage],
    stage_devices: Sequence[tuple[int, ...]],
    n_ranks: int,
    schedule: ScheduleName,
    n_microbatches: int,
    n_devices: int,
) -> Flow:
    """Lower stages and schedule; operators without tasks have stage -1."""
    stage_ops = [[i for i, s in enumerate(stages_of_ops) if s == k] for k in range(len(stages))]
    rank_of = np.full(n_devices, -1, dtype=np.int64)
    lists = []
    for rank in range(n_ranks):
        rank_of[list(stage_devices[rank])] = rank
        lists.append(
            [
                (_PASS[action.kind], action.microbatch, action.stage)
                for action in rank_actions(
                    schedule,
                    n_stages=len(stages),
                    n_microbatches=n_microbatches,
                    n_ranks=n_ranks,
                    rank=rank,
                )
            ]
        )
    return Flow(
        n_microbatches=n_microbatches,
        stage_ptr=_pointers(stage_ops),
        stage_ops=np.array([op for ops in stage_ops for op in ops], dtype=np.int64),
        recompute=np.array([stage.recompute for stage in stages], dtype=np.bool_),
        rank_of=rank_of,
        action_ptr=_pointers(lists),
        actions=np.array([a for actions in lists for a in actions], dtype=np.int64).reshape(-1, 3),
        split_weight=schedule == "zero_bubble",
    )


def _pointers(lists: Sequence[Sequence[object]]) -> Ints:
    return np.concatenate([[0], np.cumsum([len(items) for items in lists])]).astype(np.int64)


class Tables:
    """Rows by operator and device, edges, buckets."""

    def __init__(
        self,
        costs: Costs,
        network: Network,
        options: SimulatorOptions,
        plans: dict[int, OperatorPlan],
    ) -> None:
        graph = costs.graph
        self.costs, self.network, self.options = costs, network, options
        self.n_ops, self.n_devices = len(graph.operators), costs.n_devices
        self.plans = dict(plans)
        producers = graph.producers()
        # An input is loaded by every device for itself, so nothing is fetched from it.
        self.edges = [
            (p, c)
            for c, found in enumerate(producers)
            for p in found
            if has_tasks(graph.operators[p]) and has_tasks(graph.operators[c])
        ]
        self._edges_at: list[list[int]] = [[] for _ in graph.operators]
        for e, (p, c) in enumerate(self.edges):
            self._edges_at[p].append(e)
            self._edges_at[c].append(e)
        self.parameterised = [i for i, op in enumerate(graph.operators) if op.parameter_bytes > 0]
        shape = (self.n_ops, self.n_devices)
        self.active = np.zeros(shape, dtype=np.bool_)
        self.forward_s, self.backward_s = np.zeros(shape), np.zeros(shape)
        self.output_bytes, self.weight_bytes = np.zeros(shape), np.zeros(shape)
        self._slices: list[tuple[tuple[int, tuple[int, ...]], ...]] = [()] * self.n_ops
        self._edge_costs: list[EdgeCosts] = []
        for op, plan in plans.items():
            self._fill_row(op, plan)
        self._edge_costs = [self._price(e) for e in range(len(self.edges))]

    def _fill_row(self, op: int, plan: OperatorPlan) -> None:
        row = self.costs.operator(op, plan)
        self.active[op], self.forward_s[op], self.backward_s[op] = (
            row.active,
            row.forward_s,
            row.backward_s,
        )
        self.output_bytes[op], self.weight_bytes[op] = row.output_bytes, row.weight_bytes
        self._slices[op] = row.slices

    def _price(self, e: int) -> EdgeCosts:
        p, c = self.edges[e]
        return self.costs.edge(p, c, self.plans[p], self.plans[c])

    def replace(self, op: int, plan: OperatorPlan) -> None:
        """Give one operator another plan: its row and its edges change, nothing else."""
        self.plans[op] = plan
        self._fill_row(op, plan)
        for e in self._edges_at[op]:
            self._edge_costs[e] = self._price(e)

    def edge_rows(self) -> tuple[Ints, Ints, Floats, Ints]:
        """(source row, target row, bytes, edge) of every transfer between two devices."""
        counts = [len(costs.n_bytes) for costs in self._edge_costs]
        if not sum(counts):
            nothing = np.zeros(0, dtype=np.int64)
            return nothing, nothing, np.zeros(0), nothing
        which = np.repeat(np.arange(len(counts)), counts)
        ends = np.array(self.edges, dtype=np.int64)[which] * self.n_devices
        sources = ends[:, 0] + np.concatenate([costs.sources for costs in self._edge_costs])
        targets = ends[:, 1] + np.concatenate([costs.targets for costs in self._edge_costs])
        n_bytes = np.concatenate([costs.n_bytes for costs in self._edge_costs])
        return sources, targets, n_bytes, which

    def buckets(self) -> Buckets:
        """Gradients to all-reduce, last operator first, merged per group of devices.

        A bucket is closed when it has reached the option's size, as DDP does.
        """
        members: list[list[int]] = []
        groups: list[tuple[int, ...]] = []
        sizes: list[int] = []
        open_bucket: dict[tuple[int, ...], int] = {}
        for op in reversed(self.parameterised):
            for n_bytes, group in self._slices[op]:
                if len(group) < 2:
                    continue
                k = open_bucket.get(group)
                if k is None:
                    k = open_bucket[group] = len(sizes)
                    members.append([])
                    groups.append(group)
                    sizes.append(0)
                sizes[k] += n_bytes
                if not members[k] or members[k][-1] != op:
                    members[k].append(op)
                if sizes[k] >= self.options.bucket_bytes:
                    del open_bucket[group]
        priced = [self.network.all_reduce(g, n) for g, n in zip(groups, sizes, strict=True)]
        pairs = [pair for collective in priced for pair in collective.occupied]
        return Buckets(
            seconds=np.array([collective.duration_s for collective in priced]),
            n_bytes=np.array(sizes, dtype=np.float64),
            ptr=_pointers([collective.occupied for collective in priced]),
            resource=np.array([resource for resource, _ in pairs], dtype=np.int64),
            occupied=np.array([seconds for _, seconds in pairs]),
            members=members,
            groups=groups,
        )
