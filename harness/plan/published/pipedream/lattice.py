"""Cuts of a DAG: sets of operators closed under producers, ordered by inclusion.

A pipeline is a chain of cuts. A branchy graph has exponentially many, so they are listed up to a
limit, or by a beam that keeps the cheapest to cross of each size. Sets are Python integers: bit
i is operator i.

The bytes that cross a cut are counted as PipeDream counts them: the outputs of the operators
that have no consumer inside, and of every operator below one of those that feeds something not
below it. (That counts a fork whose branches are all inside but not yet joined, which nobody
outside reads; kept so that its figures and ours compare.)
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

from harness.plan.published.pipedream.workload import Workload

_BEAM_LOOK = 3  # cuts looked at, for each one kept


class Cut(NamedTuple):
    """One cut: its members and what is summed over them.

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
    """Grows and shrinks cuts of one workload.

    Args:
        units: which operators of a finer workload each operator stands for; itself when None.
    """

    def __init__(self, workload: Workload, units: list[int] | None = None) -> None:
        self.workload = workload
        n = workload.n_operators
        self.full = (1 << n) - 1
        self._units = units or [1 << i for i in range(n)]
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
        self.below = below
        return sent

    def _bytes(self, members: int) -> int:
        sizes, total = self.workload.output_bytes, 0
        while members:  # `bits`, written out: half of a large search is spent here
            low = members & -members
            total += sizes[low.bit_length() - 1]
            members ^= low
        return total

    def _crossing(self, members: int, last: int) -> int:
        if members == self.full:
            return 0
        if last & (last - 1) == 0:
            return self._sent_bytes[last.bit_length() - 1] if last else 0
        sent = 0
        while last:
            low = last & -last
            sent |= self._sent[low.bit_length() - 1]
            last ^= low
        return self._bytes(sent)

    def empty(self) -> Cut:
        """The cut before everything."""
        sources = tuple(i for i, producers in enumerate(self.workload.producers) if not producers)
        return Cut(0, 0, 0, 0, 0, 0, sources, 0)

    def cut(self, members: int) -> Cut:
        """Build a cut from its members, which must be closed under producers."""
        work = self.workload
        inside = list(bits(members))
        ready = tuple(
            i
            for i, producers in enumerate(self._producer_bits)
            if not members >> i & 1 and not producers & ~members
        )
        last = _union([i for i in inside if not self._consumer_bits[i] & members])
        return Cut(
            members,
            _union_bits(self._units[i] for i in inside),
            sum(work.compute_ticks[i] for i in inside),
            sum(work.parameter_bytes[i] for i in inside),
            sum(work.activation_bytes[i] for i in inside),
            self._crossing(members, last),
            ready,
            last,
        )

    def grow(self, cut: Cut, i: int) -> Cut:
        """Add a ready operator."""
        work = self.workload
        members = cut.members | 1 << i
        last = cut.last & ~self._producer_bits[i] | 1 << i
        ready = [j for j in cut.ready if j != i]
        ready += [j for j in work.consumers[i] if not self._producer_bits[j] & ~members]
        return Cut(
            members,
            cut.covers | self._units[i],
            cut.ticks + work.compute_ticks[i],
            cut.parameter_bytes + work.parameter_bytes[i],
            cut.activation_bytes + work.activation_bytes[i],
            self._crossing(members, last),
            tuple(ready),
            last,
        )

    def shrink(self, cut: Cut, i: int) -> Cut:
        """Remove a last operator."""
        work = self.workload
        members = cut.members & ~(1 << i)
        freed = [j for j in work.producers[i] if not self._consumer_bits[j] & members]
        last = cut.last & ~(1 << i) | _union(freed)
        return Cut(
            members,
            cut.covers & ~self._units[i],
            cut.ticks - work.compute_ticks[i],
            cut.parameter_bytes - work.parameter_bytes[i],
            cut.activation_bytes - work.activation_bytes[i],
            self._crossing(members, last),
            (*(j for j in cut.ready if j not in work.consumers[i]), i),
            last,
        )

    def every(self, limit: int) -> list[Cut] | None:
        """All cuts, by size; None as soon as there are more than `limit`."""
        found = [self.empty()]
        level = {0: found[0]}
        while level:
            above: dict[int, Cut] = {}
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

    def line(self) -> list[Cut]:
        """The cuts of one topological order."""
        found = [self.empty()]
        for i in range(self.workload.n_operators):
            found.append(self.grow(found[-1], i))
        return found

    def beam(self, width: int) -> list[Cut]:
        """Of each size, at most `width` cuts that are cheap to cross and can be grown to.

        Those with the fewest live bytes, which somebody outside reads, are looked at: these are
        cheaper to keep up than the bytes that the formula counts, and close to them.
        """
        level = [(0, self.empty())]
        found = [self.empty()]
        while level:
            above: dict[int, tuple[int, Cut, int]] = {}
            for live, cut in level:
                for i in cut.ready:
                    members = cut.members | 1 << i
                    if members not in above:
                        above[members] = (live + self._live_change(members, i), cut, i)
            cheapest = sorted((live, members) for members, (live, _, _) in above.items())
            grown = [
                (live, self.grow(above[members][1], above[members][2]))
                for live, members in cheapest[: _BEAM_LOOK * width]
            ]
            level = sorted(grown, key=lambda each: (each[1].crossing_bytes, each[1].members))
            level = level[:width]
            found.extend(cut for _, cut in level)
        return found

    def _live_change(self, members: int, i: int) -> int:
        """Bytes that become live when operator i joins, less those that are read for the last time.

        Args:
            members: of the cut, i among them.
        """
        sizes = self.workload.output_bytes
        change = sizes[i] if self.workload.consumers[i] else 0
        for producer in self.workload.producers[i]:
            if not self._consumer_bits[producer] & ~members:
                change -= sizes[producer]
        return change

    def around(self, members: int, limit: int) -> list[Cut]:
        """At most `limit` cuts near one: half the nearest, half the cheapest to cross."""
        start = self.cut(members)
        found = {members: start}
        # Nearest first is first in, first out; then the cheapest of all that were reached.
        queue = deque([start])
        while queue and len(found) < limit // 2:
            queue.extend(self._neighbours(queue.popleft(), found, limit // 2))
        heap = [(cut.crossing_bytes, cut.members, cut) for cut in found.values()]
        heapq.heapify(heap)
        while heap and len(found) < limit:
            for cut in self._neighbours(heapq.heappop(heap)[2], found, limit):
                heapq.heappush(heap, (cut.crossing_bytes, cut.members, cut))
        return list(found.values())

    def _neighbours(self, cut: Cut, found: dict[int, Cut], limit: int) -> list[Cut]:
        """Cuts one operator away that are not yet found; they are added, up to the limit."""
        steps = [(cut.members | 1 << i, i, self.grow) for i in cut.ready]
        steps += [(cut.members & ~(1 << i), i, self.shrink) for i in bits(cut.last)]
        new: list[Cut] = []
        for members, i, step in steps:
            if members not in found and len(found) < limit:
                found[members] = step(cut, i)
                new.append(found[members])
        return new

    def _above(self) -> list[int]:
        """Per operator: itself and all that depends on it."""
        above = [0] * self.workload.n_operators
        for i in reversed(range(self.workload.n_operators)):
            above[i] = 1 << i | _union_bits(above[j] for j in self.workload.consumers[i])
        return above

    def principal(self) -> list[Cut]:
        """Per operator: the smallest cut with it, and the largest one without it."""
        smallest = self.below
        largest = [self.full & ~over for over in self._above()]
        return [self.cut(members) for members in dict.fromkeys([*smallest, *largest])]

    def trunk(self) -> list[bool]:
        """Per operator: whether every other one is before or after it."""
        n = self.workload.n_operators
        pairs = zip(self.below, self._above(), strict=True)
        return [under.bit_count() + over.bit_count() == n + 1 for under, over in pairs]


def merge_branches(lattice: Lattice, most_ticks: float) -> tuple[Workload, list[int]]:
    """Merge chains of operators that lie beside other operators, so that fewer cuts are left.

    Args:
        most_ticks: compute of a merged operator, unless a single one has more.

    Returns:
        The coarser workload, and the members of each of its operators in the finer one.
    """
    work = lattice.workload
    on_trunk = lattice.trunk()
    group: list[int] = []
    members: list[int] = []
    last: list[int] = []
    ticks: list[int] = []
    for i, producers in enumerate(work.producers):
        joins = (
            len(producers) == 1
            and len(work.consumers[producers[0]]) == 1
            and not on_trunk[i]
            and not on_trunk[producers[0]]
            and ticks[group[producers[0]]] + work.compute_ticks[i] <= most_ticks
        )
        if joins:
            k = group[producers[0]]
            members[k] |= 1 << i
            last[k] = i
            ticks[k] += work.compute_ticks[i]
        else:
            k = len(members)
            members.append(1 << i)
            last.append(i)
            ticks.append(work.compute_ticks[i])
        group.append(k)
    return _merged(work, group, members, last)


def _merged(
    work: Workload, group: list[int], members: list[int], last: list[int]
) -> tuple[Workload, list[int]]:
    n = len(members)
    producers: list[list[int]] = [[] for _ in range(n)]
    consumers: list[list[int]] = [[] for _ in range(n)]
    for i, sources in enumerate(work.producers):
        for source in sources:
            a, b = group[source], group[i]
            if a != b and a not in producers[b]:
                producers[b].append(a)
                consumers[a].append(b)
    return (
        Workload(
            names=[work.names[i] for i in last],
            compute_ticks=[sum(work.compute_ticks[i] for i in bits(m)) for m in members],
            parameter_bytes=[sum(work.parameter_bytes[i] for i in bits(m)) for m in members],
            activation_bytes=[sum(work.activation_bytes[i] for i in bits(m)) for m in members],
            output_bytes=[work.output_bytes[i] for i in last],
            producers=producers,
            consumers=consumers,
        ),
        members,
    )


def _union(positions: Iterable[int]) -> int:
    members = 0
    for i in positions:
        members |= 1 << i
    return members


def _union_bits(sets: Iterable[int]) -> int:
    members = 0
    for each in sets:
        members |= each
    return members
