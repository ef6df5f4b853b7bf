"""A model as PipeDream's formula has it, and the cuts of its graph as arrays.

Inputs are dropped (they stand in the first stage), and so are `__getitem__` sinks, whose
results nobody reads.

A pipeline is a chain of cuts. A branchy graph has exponentially many, so that they are listed up to
a limit. Sets are Python integers: bit i is operator i.

The bytes that cross a cut are counted as PipeDream counts them: the outputs of the operators
that have no consumer inside, and of every operator below one of those that feeds something not
below it. (That counts a fork whose branches are all inside but not yet joined, which nobody
outside reads; kept so that its figures and ours compare.)

Cuts as arrays, in an order that respects inclusion, for the dynamic program.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.domain.graph import Graph, Operator
from harness.domain.profile import Profile
from harness.errors import GraphError
from harness.plan.bottleneck import Floats
from harness.plan.fit import OperatorTimes

# Seconds are summed as whole multiples of this: equal sets have equal sums, whatever the order.
TICK_S = 1e-13


@dataclass(frozen=True, kw_only=True)
class OperatorDag:
    """Operators in topological order, all lists by position.

    Attributes:
        compute_ticks: forward plus backward of the profiled minibatch on one device, in TICK_S.
        activation_bytes: kept until the backward pass, whole minibatch.
        output_bytes: sent to its consumers, whole minibatch.
        producers: positions of the distinct producers.
    """

    names: list[str]
    compute_ticks: list[int]
    parameter_bytes: list[int]
    activation_bytes: list[int]
    output_bytes: list[int]
    producers: list[list[int]]

    @cached_property
    def consumers(self) -> list[list[int]]:
        """Positions of the distinct consumers."""
        found: list[list[int]] = [[] for _ in self.names]
        for i, sources in enumerate(self.producers):
            for source in sources:
                found[source].append(i)
        return found

    @property
    def n_operators(self) -> int:
        return len(self.names)

    def grouped(self, groups: Sequence[Sequence[int]], group_of: Sequence[int]) -> OperatorDag:
        """With runs of operators as one; consumers read the last of each."""

        def summed(values: list[int]) -> list[int]:
            return [sum(values[i] for i in members) for members in groups]

        outside = [
            [group_of[p] for i in members for p in self.producers[i] if group_of[p] != k]
            for k, members in enumerate(groups)
        ]
        return OperatorDag(
            names=[self.names[members[-1]] for members in groups],
            compute_ticks=summed(self.compute_ticks),
            parameter_bytes=summed(self.parameter_bytes),
            activation_bytes=summed(self.activation_bytes),
            output_bytes=[self.output_bytes[members[-1]] for members in groups],
            producers=[list(dict.fromkeys(sources)) for sources in outside],
        )


def workload_from(graph: Graph, profile: Profile, device_kind: str) -> OperatorDag:
    """Join a graph with its times on one kind of device.

    Raises:
        GraphError: nothing but inputs is left.
        PlanError: the profile does not know an operator on that kind of device.
    """
    read = {name for operator in graph.operators for name in operator.inputs}
    kept = [op for op in graph.operators if op.kind != "input" and not _is_unread_item(op, read)]
    if not kept:
        raise GraphError(f"graph {graph.name!r} has only inputs: there is nothing to plan")
    times = OperatorTimes(profile)
    position = {operator.name: i for i, operator in enumerate(kept)}
    return OperatorDag(
        names=[op.name for op in kept],
        compute_ticks=[round(times.lookup(op, device_kind).total_s / TICK_S) for op in kept],
        parameter_bytes=[op.parameter_bytes for op in kept],
        activation_bytes=[op.activation_bytes for op in kept],
        output_bytes=[op.activation_bytes for op in kept],
        producers=[
            [position[name] for name in dict.fromkeys(op.inputs) if name in position] for op in kept
        ],
    )


def _is_unread_item(operator: Operator, read: set[str]) -> bool:
    is_item = str(operator.attrs.get("description", "")).startswith("__getitem__")
    return is_item and operator.name not in read


class GraphCut(NamedTuple):
    """One cut: its members and sums over them.

    Attributes:
        members: bit i when operator i is before the cut.
        covers: the same in the numbering of the finest workload.
        ticks: compute of the members, in TICK_S.
        parameter_bytes: of the members.
        activation_bytes: of the members.
        crossing_bytes: activations that a stage behind the cut is sent.
        ready: operators that may be added.
        last: members without consumers among the members, as bits.
    """

    members: int
    covers: int
    ticks: int
    parameter_bytes: int
    activation_bytes: int
    crossing_bytes: int
    ready: tuple[int, ...]
    last: int


def bits(members: int) -> Iterable[int]:
    """Positions of the set bits, ascending."""
    while members:
        low = members & -members
        yield low.bit_length() - 1
        members ^= low


class Lattice:
    """The cuts of one workload.

    Args:
        units: which operators of a finer workload each operator stands for; itself when None.
    """

    def __init__(self, workload: OperatorDag, units: list[int] | None = None) -> None:
        self.workload = workload
        self.full = (1 << workload.n_operators) - 1
        self._units = units or [1 << i for i in range(workload.n_operators)]
        self._producer_bits = [_union(producers) for producers in workload.producers]
        self._consumer_bits = [_union(consumers) for consumers in workload.consumers]
        self._sent = self._sent_sets()
        self._sent_bytes = [self._bytes(sent) for sent in self._sent]

    def _sent_sets(self) -> list[int]:
        """Per operator: itself and the operators below it that feed something not below it."""
        below: list[int] = []
        sent: list[int] = []
        for i, producers in enumerate(self.workload.producers):
            under, forks = 0, 0
            for producer in producers:
                under |= below[producer]
                forks |= sent[producer]
            inside = under | 1 << i
            # Above one producer, what it leaves open stays so, but for itself.
            closing = forks if len(producers) > 1 else _union(producers)
            for p in bits(closing):
                if not self._consumer_bits[p] & ~inside:
                    forks &= ~(1 << p)
            below.append(inside)
            sent.append(forks | 1 << i)
        self._below = below
        return sent

    def _bytes(self, members: int) -> int:
        return sum(self.workload.output_bytes[i] for i in bits(members))

    def _crossing(self, members: int, last: int) -> int:
        if members == self.full:
            return 0
        if last & (last - 1) == 0:
            return self._sent_bytes[last.bit_length() - 1] if last else 0
        sent = 0
        for i in bits(last):
            sent |= self._sent[i]
        return self._bytes(sent)

    def empty(self) -> GraphCut:
        """The cut before everything."""
        sources = tuple(i for i, producers in enumerate(self.workload.producers) if not producers)
        return GraphCut(0, 0, 0, 0, 0, 0, sources, 0)

    def grow(self, cut: GraphCut, i: int) -> GraphCut:
        """Add a ready operator."""
        work = self.workload
        members = cut.members | 1 << i
        last = cut.last & ~self._producer_bits[i] | 1 << i
        ready = [j for j in cut.ready if j != i]
        ready += [j for j in work.consumers[i] if not self._producer_bits[j] & ~members]
        return GraphCut(
            members,
            cut.covers | self._units[i],
            cut.ticks + work.compute_ticks[i],
            cut.parameter_bytes + work.parameter_bytes[i],
            cut.activation_bytes + work.activation_bytes[i],
            self._crossing(members, last),
            tuple(ready),
            last,
        )

    def every(self, limit: int) -> list[GraphCut] | None:
        """All cuts, by size; None as soon as there are more than `limit`."""
        found = [self.empty()]
        level = {0: found[0]}
        while level:
            above: dict[int, GraphCut] = {}
            for cut in level.values():
                for i in cut.ready:
                    if cut.members | 1 << i not in above:
                        grown = self.grow(cut, i)
                        above[grown.members] = grown
            found.extend(above.values())
            if len(found) > limit:
                return None
            level = above
        return found

    def line(self) -> list[GraphCut]:
        """The cuts of one topological order."""
        found = [self.empty()]
        for i in range(self.workload.n_operators):
            found.append(self.grow(found[-1], i))
        return found

    def merged(self, most_ticks: float) -> Lattice:
        """Of the workload in which chains of operators that lie beside others are merged.

        Args:
            most_ticks: compute of a merged operator, unless a single one has more.
        """
        work, n = self.workload, self.workload.n_operators
        above = [0] * n
        for i in reversed(range(n)):
            above[i] = 1 << i | _union_bits(above[j] for j in work.consumers[i])
        # On the trunk every other operator is before or after.
        on_trunk = [self._below[i].bit_count() + above[i].bit_count() == n + 1 for i in range(n)]
        groups: list[list[int]] = []
        group_of: list[int] = []
        for i, producers in enumerate(work.producers):
            before = producers[0] if len(producers) == 1 else i
            if before != i and len(work.consumers[before]) == 1:
                members = groups[group_of[before]]
                ticks = sum(work.compute_ticks[j] for j in members) + work.compute_ticks[i]
                if not on_trunk[i] and not on_trunk[before] and ticks <= most_ticks:
                    members.append(i)
                    group_of.append(group_of[before])
                    continue
            group_of.append(len(groups))
            groups.append([i])
        return Lattice(work.grouped(groups, group_of), [_union(members) for members in groups])


def _union(positions: Iterable[int]) -> int:
    return _union_bits(1 << i for i in positions)


def _union_bits(sets: Iterable[int]) -> int:
    members = 0
    for each in sets:
        members |= each
    return members


Bools = npt.NDArray[np.bool_]
Indices = npt.NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Cuts:
    """Columns over cuts, by compute before them: a cut stands after the cuts that it includes.

    Attributes:
        members: sets of operators as integers; the first and the last bound all others.
        compute_s, parameter_bytes, activation_bytes: sums over the members.
        crossing_bytes: activations sent over the cut.
    """

    members: list[int]
    compute_s: Floats
    parameter_bytes: Floats
    activation_bytes: Floats
    crossing_bytes: Floats

    @classmethod
    def from_cuts(cls, cuts: Iterable[GraphCut]) -> Cuts:
        """Sort them."""
        ordered = sorted(cuts, key=lambda c: (c.ticks, c.covers.bit_count(), c.covers))
        return cls(
            members=[cut.covers for cut in ordered],
            compute_s=np.array([cut.ticks for cut in ordered], dtype=float) * TICK_S,
            parameter_bytes=np.array([cut.parameter_bytes for cut in ordered], dtype=float),
            activation_bytes=np.array([cut.activation_bytes for cut in ordered], dtype=float),
            crossing_bytes=np.array([cut.crossing_bytes for cut in ordered], dtype=float),
        )

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def blocked(self) -> Bools:
        """[i, j] is True unless a stage may run from cut i to another cut j: i is within j."""
        n_bytes = (self.members[-1].bit_length() + 63) // 64 * 8
        raw = b"".join(members.to_bytes(n_bytes, "little") for members in self.members)
        words = np.frombuffer(raw, dtype="<u8").reshape(len(self), -1)
        blocked = np.eye(len(self), dtype=bool)
        for column in words.T:
            blocked |= (column[:, None] & ~column[None, :]) != 0
        return blocked

    def take(self, positions: Indices) -> Cuts:
        """Some of the cuts; positions ascending."""
        return Cuts(
            members=[self.members[i] for i in positions],
            compute_s=self.compute_s[positions],
            parameter_bytes=self.parameter_bytes[positions],
            activation_bytes=self.activation_bytes[positions],
            crossing_bytes=self.crossing_bytes[positions],
        )

    def between(self, start: int, end: int) -> Indices:
        """Positions of the cuts from one position to another, both included, by inclusion."""
        low, high = self.members[start], self.members[end]
        inside = [
            i
            for i in range(start, end + 1)
            if not low & ~self.members[i] and not self.members[i] & ~high
        ]
        return np.array(inside, dtype=np.intp)

    def thin(self, n_buckets: int, per_bucket: int) -> Cuts:
        """Keep the cuts cheapest to cross among those of about equal compute, and both ends."""
        share = self.compute_s / max(self.compute_s[-1], TICK_S)
        bucket = np.minimum((share * n_buckets).astype(int), n_buckets - 1)
        order = np.lexsort((self.crossing_bytes, bucket))
        ordered = bucket[order]
        rank = np.arange(len(self)) - np.searchsorted(ordered, ordered, side="left")
        kept = np.zeros(len(self), dtype=bool)
        kept[order[rank < per_bucket]] = True
        kept[[0, -1]] = True
        return self.take(np.flatnonzero(kept))
