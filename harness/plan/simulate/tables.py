"""Tables of a strategy by operator and device, which `lowering` turns into the event loop's arrays.

`Tables` is mutable, so that changes are cheap: `replace` changes one operator's plan and updates
only its row and its edges. Replacing it back undoes the change.
"""

from collections.abc import Sequence, Sized
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.domain.partition import SAMPLE
from harness.domain.routes import LARGE_ELEMENTS, first_bucket_bytes
from harness.domain.schedule import SCHEDULES, Action, ScheduleName, rank_actions
from harness.domain.sharding import has_tasks
from harness.domain.strategy import OperatorPlan, Stage
from harness.plan.simulate.costs import Costs
from harness.plan.simulate.options import SimulatorOptions
from harness.plan.simulate.passes import ACTIONS, WEIGHT
from harness.plan.simulate.transfers import Edges, Floats, Ints


class Flow(NamedTuple):
    """Schedule and stages, in arrays."""

    n_microbatches: int
    stage_of: Ints  # (operators,) stage; -1 for those without tasks
    stage_ptr: Ints  # (S + 1,) into stage_ops
    stage_ops: Ints  # operators by stage, in topological order
    recompute: npt.NDArray[np.bool_]  # (S,)
    segments: Ints  # (S,) their number
    rank_of: Ints  # (D,) pipeline rank of a device, or -1
    action_ptr: Ints  # (P + 1,) into actions
    actions: Ints  # (n, 3) pass, microbatch, stage by rank
    split_weight: bool  # the schedule has weight passes, which then free the activations

    def actions_of(self, device: int) -> list[Action]:
        begin, end = self.action_ptr[self.rank_of[device] :][:2]
        rows = self.actions[begin:end].tolist()
        return [Action(ACTIONS[which], microbatch, stage) for which, microbatch, stage in rows]


class Ends(NamedTuple):
    """Every device of every bucket.

    Attributes:
        device, bucket: (n_ends,)
        before: (n_ends,) the end of the group's previous bucket on the same device, or -1.
    """

    device: Ints
    bucket: Ints
    before: Ints


@dataclass(frozen=True)
class Buckets:
    """All-reduces of gradients, or, if these are sharded, reduce-scatters.

    Attributes:
        members: operators of each bucket.
        groups: devices of each bucket.
        n_rounds: (n,) share of an all-reduce that each takes: 1, or 0.5; 0 for an average of
            replicas.
        microbatch: (n,) the microbatch after whose backward each starts; -1: the last.
        ends: every device of every bucket.
        trigger_place, trigger_end: (n,) every member on every device of its group, as
            operator * n_devices + device, and the end that waits for it.
        alone: (n_ops, n_devices) bytes of gradients in no bucket, which each step allocates in
            backward.
    """

    n_bytes: Floats
    members: list[list[int]]
    groups: list[tuple[int, ...]]
    n_rounds: Floats
    microbatch: Ints
    ends: Ends
    trigger_place: Ints
    trigger_end: Ints
    alone: Floats


def ends_of(groups: Sequence[tuple[int, ...]]) -> Ends:
    """The ends of buckets of these groups of devices."""
    ends: list[tuple[int, int, int]] = []
    latest: dict[tuple[int, ...], int] = {}  # first end of each group's last bucket
    for bucket, group in enumerate(groups):
        former = latest.get(group)
        latest[group] = len(ends)
        for place, device in enumerate(group):
            ends.append((device, bucket, -1 if former is None else former + place))
    return Ends(*np.array(ends, dtype=np.int64).reshape(-1, 3).T.copy())


def flow_of(
    stages_of_ops: Sequence[int],
    stages: Sequence[Stage],
    stage_devices: Sequence[tuple[int, ...]],
    schedule: ScheduleName,
    n_microbatches: int,
    n_devices: int,
    options: SimulatorOptions,
) -> Flow:
    """Lower stages and schedule; operators without tasks have stage -1.

    A weight pass follows every backward if each microbatch updates the weights.
    """
    has_weights, n_ranks = SCHEDULES[schedule].splits_backward, len(dict.fromkeys(stage_devices))
    stage_ops = [[i for i, s in enumerate(stages_of_ops) if s == k] for k in range(len(stages))]
    rank_of = np.full(n_devices, -1, dtype=np.int64)
    lists = []
    for rank in range(n_ranks):
        rank_of[list(stage_devices[rank])] = rank
        actions: list[tuple[int, int, int]] = []
        for action in rank_actions(
            schedule,
            n_stages=len(stages),
            n_microbatches=n_microbatches,
            n_ranks=n_ranks,
            rank=rank,
        ):
            actions.append((ACTIONS.index(action.kind), action.microbatch, action.stage))
            updates = options.updates_each_microbatch and not has_weights
            if action.kind == "backward" and updates:
                actions.append((WEIGHT, action.microbatch, action.stage))
        lists.append(actions)
    return Flow(
        n_microbatches=n_microbatches,
        stage_of=np.array(stages_of_ops, dtype=np.int64),
        stage_ptr=pointers(stage_ops),
        stage_ops=np.array([op for ops in stage_ops for op in ops], dtype=np.int64),
        recompute=np.array([stage.recompute for stage in stages], dtype=np.bool_),
        segments=np.array([stage.segments for stage in stages], dtype=np.int64),
        rank_of=rank_of,
        action_ptr=pointers(lists),
        actions=np.array([a for actions in lists for a in actions], dtype=np.int64).reshape(-1, 3),
        split_weight=has_weights,
    )


def pointers(lists: Sequence[Sized]) -> Ints:
    """The place of each list in their concatenation, and the end."""
    return np.concatenate([[0], np.cumsum([len(items) for items in lists])]).astype(np.int64)


class Tables:
    """Rows by operator and device, edges, buckets.

    Args:
        costs: costs of the largest microbatch, which give all bytes.
        smaller: costs of microbatches with one sample less, and their share of all microbatches;
            None if all are equal. Seconds are those of the mean microbatch.
        keeps_large: large linear layers keep the memory of gradients from step to step.

    Attributes:
        tied: operators that share weights, by the last of them (see `Operator.attrs`).
        last_user: of the weights of each of these operators.
        mean_size: size of the mean microbatch over the largest.
        producers: of each operator, those with tasks.
        slices: by operator, (bytes, devices) of each slice of its weights.
        fed_bytes: (n_ops, n_devices) of a microbatch's inputs, where an operator reads one or is
            the loss: a device that feeds samples has all their inputs.
    """

    def __init__(
        self,
        costs: Costs,
        options: SimulatorOptions,
        plans: dict[int, OperatorPlan],
        smaller: tuple[Costs, float] | None = None,
        *,
        keeps_large: bool = True,
    ) -> None:
        graph = costs.graph
        self._keeps_large = keeps_large
        self._smaller = smaller
        self.mean_size = 1.0 if smaller is None else 1 - smaller[1] / costs.samples
        self.costs, self.options = costs, options
        self.n_ops, self.n_devices = len(graph.operators), costs.n_devices
        self.plans = dict(plans)
        producers = graph.producers()
        # Every device loads inputs itself, so they cause no transfers.
        self.edges = [
            (p, c)
            for c, of_reader in enumerate(producers)
            for p in of_reader
            if has_tasks(graph.operators[p]) and has_tasks(graph.operators[c])
        ]
        self._readers: list[list[int]] = [[] for _ in graph.operators]
        self.producers: list[list[int]] = [[] for _ in graph.operators]
        for p, c in self.edges:
            self._readers[p].append(c)
            self.producers[c].append(p)
        self.tied = {members[-1]: members for members in graph.ties()}
        self.last_user = {op: last for last, members in self.tied.items() for op in members}
        self.parameterised = [i for i, op in enumerate(graph.operators) if op.weight_bytes > 0]
        self._amounts = np.zeros((8, self.n_ops, self.n_devices))  # see `OperatorCosts.amounts`
        self.forward_s, self.backward_s, self.output_bytes, self.saved_bytes = self._amounts[:4]
        self.inner_bytes, self.weight_bytes, self.frozen_bytes, self.shared_bytes = self._amounts[
            4:
        ]
        self.active = np.zeros((self.n_ops, self.n_devices), dtype=np.bool_)
        self.fed_bytes = np.zeros((self.n_ops, self.n_devices))
        inputs = [i for i, op in enumerate(graph.operators) if not has_tasks(op)]
        self._fed = {c for c, read in enumerate(producers) if not {*inputs}.isdisjoint(read)}
        self._fed |= {i for i, op in enumerate(graph.operators) if op.kind == "loss"}
        scale = costs.samples / (graph.batch or costs.samples)
        self._input_bytes = scale * sum(graph.operators[i].activation_bytes for i in inputs)
        self.slices: list[tuple[tuple[int, tuple[int, ...]], ...]] = [()] * self.n_ops
        self._placed = [op for op in range(self.n_ops) if op in plans]
        for op, plan in plans.items():
            self._fill_row(op, plan)
        for last in self.tied:
            self._count_once(last)
        self._transfers = {op: self._find_transfers(op) for op in self._placed}
        self._stale: set[int] = set()  # operators whose transfers changed
        self._edges: Edges | None = None
        self._buckets: Buckets | None = None

    def _fill_row(self, op: int, plan: OperatorPlan) -> None:
        row = self.costs.operator(op, plan)
        self._amounts[:, op], self.active[op], self.slices[op] = row.amounts, row.active, row.slices
        if self._smaller is not None:
            costs, share = self._smaller
            other = costs.operator(op, plan)
            self.forward_s[op] += share * (other.forward_s - row.forward_s)
            self.backward_s[op] += share * (other.backward_s - row.backward_s)
        if op in self._fed:
            self.fed_bytes[op] = self._input_bytes * self._sample_shares(op, plan)

    def step_input_bytes(self, n_microbatches: int) -> Floats:
        """(n_devices,) bytes of a step's inputs."""
        largest: Floats = self.fed_bytes.max(axis=0)
        return largest * (self.mean_size * n_microbatches)

    def _sample_shares(self, op: int, plan: OperatorPlan) -> Floats:
        """(n_devices,) share of a microbatch's samples that an operator computes."""
        shares, dims = np.zeros(self.n_devices), list(self.costs.shapes[op])
        for block, device in zip(self.costs.blocks(op, plan), plan.devices, strict=True):
            begin, end = block[dims.index(SAMPLE)] if SAMPLE in dims else (0, self.costs.samples)
            shares[device] = max(shares[device], (end - begin) / self.costs.samples)
        return shares

    def _count_once(self, last: int) -> None:
        """Count tied weights once on each device, with the first of their operators there."""
        has_them = np.zeros(self.n_devices, dtype=np.bool_)
        for op in (op for op in self.tied[last] if op in self.plans):
            row, operator = self.costs.operator(op, self.plans[op]), self.costs.graph.operators[op]
            tied = operator.tied_bytes / max(1, operator.weight_bytes)
            share = np.where(has_them, 1 - tied, 1.0)
            self.weight_bytes[op] = share * row.weight_bytes
            self.frozen_bytes[op] = share * row.frozen_bytes
            self.shared_bytes[op] = share * row.shared_bytes
            has_them |= row.weight_bytes + row.frozen_bytes > 0

    def _find_transfers(self, op: int) -> Edges:
        plans = self.plans
        readers = [(c, plans[c]) for c in self._readers[op]]
        if len(readers) > 1:  # stages may run in another order than the list of operators
            readers.sort(key=lambda reader: (reader[1].stage, reader[0]))
        is_global = self.options.batch_norm == "global"
        return self.costs.transfers(op, plans[op], readers, syncs_norms=is_global)

    def replace(self, op: int, plan: OperatorPlan) -> None:
        """Change one operator's plan; updates its row and the transfers to and from it."""
        slices = self.slices[op]
        self.plans[op] = plan
        self._fill_row(op, plan)
        if op in self.last_user:
            self._count_once(self.last_user[op])
        if self.slices[op] != slices:
            self._buckets = None
        self._stale.update((op, *self.producers[op]))

    def edge_rows(self) -> Edges:
        """All transfers within a microbatch."""
        for op in self._stale:
            transfers = self._find_transfers(op)
            if transfers is not self._transfers[op]:
                self._transfers[op] = transfers
                self._edges = None
        self._stale.clear()
        if self._edges is None:
            self._edges = Edges.joined([self._transfers[op] for op in self._placed])
        return self._edges

    def buckets(self) -> Buckets:
        if self._buckets is None:
            self._buckets = self._fill_buckets()
        return self._buckets

    def _fill_buckets(self) -> Buckets:
        """Fill buckets per group of devices, last operator first.

        A bucket is full at `bucket_bytes`; a group's first bucket at `first_bucket_bytes`.
        """
        members: list[list[int]] = []
        groups: list[tuple[int, ...]] = []
        sizes: list[int] = []
        open_bucket: dict[tuple[int, ...], int] = {}
        has_closed: set[tuple[int, ...]] = set()  # groups whose first bucket is full
        alone = np.zeros((self.n_ops, self.n_devices))
        for op in reversed(self.parameterised):
            for n_bytes, group in self.held(op):
                if len(group) < 2:
                    is_linear = self.costs.graph.operators[op].kind == "linear"
                    if not (self._keeps_large and is_linear and n_bytes >= 4 * LARGE_ELEMENTS):
                        alone[op, group[0]] += n_bytes
                    continue
                k = open_bucket.get(group)
                if k is None:
                    k = open_bucket[group] = len(sizes)
                    members.append([])
                    groups.append(group)
                    sizes.append(0)
                sizes[k] += n_bytes
                owners = self.tied.get(op, (op,))
                members[k] += [owner for owner in owners if owner not in members[k]]
                limit = self.options.bucket_bytes
                if sizes[k] >= (limit if group in has_closed else first_bucket_bytes(limit)):
                    del open_bucket[group]
                    has_closed.add(group)
        ends = ends_of(groups)
        triggers = [
            (op * self.n_devices + device, end)
            for end, (device, bucket) in enumerate(
                zip(ends.device.tolist(), ends.bucket.tolist(), strict=True)
            )
            for op in members[bucket]
            if self.active[op, device]
        ]
        trigger_place, trigger_end = np.array(triggers, dtype=np.int64).reshape(-1, 2).T.copy()
        return Buckets(
            n_bytes=np.array(sizes, dtype=np.float64),
            members=members,
            groups=groups,
            n_rounds=np.ones(len(sizes)),
            microbatch=np.full(len(sizes), -1, dtype=np.int64),
            ends=ends,
            trigger_place=trigger_place,
            trigger_end=trigger_end,
            alone=alone,
        )

    def held(self, op: int) -> list[tuple[int, tuple[int, ...]]]:
        """Bytes of each slice of weights, with the devices that hold it; of tied weights all
        devices that have one of their operators, with the last one."""
        own_slices, operators = self.slices[op], self.costs.graph.operators
        if self.last_user.get(op, op) != op:
            own_bytes = operators[op].weight_bytes - operators[self.last_user[op]].tied_bytes
            share = max(0.0, own_bytes / operators[op].weight_bytes)
            return [(round(share * n), group) for n, group in own_slices] if share else []
        users = [self.slices[user] for user in self.tied.get(op, (op,))]
        if any(len(slices) != len(own_slices) for slices in users):
            every = tuple(
                sorted({device for slices in users for _, group in slices for device in group})
            )
            return [(sum(n_bytes for n_bytes, _ in own_slices), every)]
        return [
            (n_bytes, tuple(sorted({d for slices in users for d in slices[k][1]})))
            for k, (n_bytes, _) in enumerate(own_slices)
        ]
