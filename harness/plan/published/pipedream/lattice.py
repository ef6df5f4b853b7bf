"""Cuts of a DAG: sets of operators closed under producers, ordered by inclusion.

A pipeline is a chain of cuts. A branchy graph has exponentially many, so that they are listed up to
a limit. Sets are Python integers: bit i is operator i.

The bytes that cross a cut are counted as PipeDream counts them: the outputs of the operators
that have no consumer inside, and of every operator below one of those that feeds something not
below it. (That counts a fork whose branches are all inside but not yet joined, which nobody
outside reads; kept so that its figures and ours compare.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from harness.plan.published.pipedream.workload import OperatorDag


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
