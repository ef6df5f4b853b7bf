"""A model and devices as PipeDream's formula has them, and the cuts of the graph as arrays.

On one level of W workers joined by B bytes/s, a stage of compute c (seconds) and parameters P
(bytes) on r replicas costs, with activation transfers counted,

    (c + 4 (r - 1) P / (B r) / inner) / r                              seconds per minibatch,

where `inner` is the number of workers inside each worker of this level, and c on level L + 1 is
the best time of all workers of level L. A stage that is not the first of its level also costs
2 a / (B r) for the activations a of the cut at its start, and for those of the cut at its end.
The step time is the costliest of all. Source: optimizer_graph_hierarchical.py of PipeDream, whose
optimizer forgets `inner` in pipelines, and transfers unless a compression ratio is given.

Inputs are dropped (they stand in the first stage), and so are `__getitem__` sinks, whose
results nobody reads.

A pipeline is a chain of cuts, each after a closed set: one that contains all producers of its
operators. A branchy graph has exponentially many, so that they are listed up to a limit. Sets are
Python integers: bit i is operator i. For the dynamic program, cuts are arrays in an order that
respects inclusion.

The bytes that cross a cut are counted as PipeDream counts them: the outputs of the operators
that have no consumer inside, and of every operator below one of those that feeds something not
below it. (That counts a fork whose branches are all inside but not yet joined, which nobody
outside reads; kept so that its figures and ours compare.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from harness.domain.graph import Graph
from harness.domain.profile import Profile
from harness.errors import GraphError
from harness.plan.bottleneck import Floats
from harness.plan.fit import OperatorTimes

# Seconds are summed as whole multiples of this: equal sets have equal sums, whatever the order.
TICK_S = 1e-13
# Bytes held per byte of parameters: the parameters, their gradients, and momentum.
STATE_BYTES_PER_PARAMETER_BYTE = 3
Amount = TypeVar("Amount", float, Floats)


@dataclass(frozen=True, kw_only=True)
class OperatorDag:
    """Operators in topological order, all lists by position.

    Attributes:
        compute_ticks: forward plus backward of the profiled minibatch on one device, in TICK_S.
        activation_bytes: sent to its consumers and kept until the backward pass, whole minibatch.
        producers: positions of the distinct producers.
    """

    names: list[str]
    compute_ticks: list[int]
    parameter_bytes: list[int]
    activation_bytes: list[int]
    producers: list[list[int]]

    @cached_property
    def consumers(self) -> list[list[int]]:
        """Positions of the distinct consumers."""
        return consumers_of(self.producers)

    @property
    def n_operators(self) -> int:
        return len(self.names)


def workload_from(graph: Graph, profile: Profile, kind: str, speed: float = 1.0) -> OperatorDag:
    """Join a graph with its times on devices of one kind and speed.

    Raises:
        GraphError: nothing but inputs is left.
        PlanError: the profile does not know an operator on that kind of device.
    """
    read = {name for operator in graph.operators for name in operator.inputs}
    kept = [
        op
        for op in graph.operators
        if op.kind != "input"
        if op.name in read or not str(op.attrs.get("description")).startswith("__getitem__")
    ]
    if not kept:
        raise GraphError(f"graph {graph.name!r} has only inputs: there is nothing to plan")
    times = OperatorTimes(profile)
    position = {operator.name: i for i, operator in enumerate(kept)}
    return OperatorDag(
        names=[op.name for op in kept],
        compute_ticks=[round(times.lookup(op, kind).total_s / speed / TICK_S) for op in kept],
        parameter_bytes=[op.parameter_bytes for op in kept],
        activation_bytes=[op.activation_bytes for op in kept],
        producers=[
            [position[name] for name in dict.fromkeys(op.inputs) if name in position] for op in kept
        ],
    )


def _reached(neighbours: Sequence[Sequence[int]], order: Iterable[int]) -> list[int]:
    """By operator: itself and all that neighbours lead to, which stand before it in the order."""
    found = [0] * len(neighbours)
    for i in order:
        found[i] = 1 << i | union(found[j] for j in neighbours[i])
    return found


def _sent_sets(workload: OperatorDag) -> list[int]:
    """Per operator: itself and the operators below it that feed something not below it."""
    inside = _reached(workload.producers, range(workload.n_operators))
    consumers = [union(1 << j for j in found) for found in workload.consumers]
    sent: list[int] = []
    for i, producers in enumerate(workload.producers):
        forks = union(sent[p] for p in producers)
        # Above one producer, what it leaves open stays so, but for itself.
        closing = forks if len(producers) > 1 else union(1 << p for p in producers)
        for p in members_of(closing):
            if not consumers[p] & ~inside[i]:
                forks &= ~(1 << p)
        sent.append(forks | 1 << i)
    return sent


def _merged_chains(workload: OperatorDag, most_ticks: float) -> list[list[int]]:
    """Operators in groups: chains that lie beside others, of at most so much compute unless a
    single operator has more."""
    n, consumers = workload.n_operators, workload.consumers
    below = _reached(workload.producers, range(n))
    above = _reached(consumers, reversed(range(n)))
    # On the trunk every other operator is before or after.
    on_trunk = [below[i].bit_count() + above[i].bit_count() == n + 1 for i in range(n)]
    group_of: dict[int, list[int]] = {}
    for i, producers in enumerate(workload.producers):
        group_of[i] = [i]
        if len(producers) == 1 and len(consumers[producers[0]]) == 1:
            before = group_of[producers[0]]
            ticks = sum(workload.compute_ticks[j] for j in [*before, i])
            if not on_trunk[i] and not on_trunk[producers[0]] and ticks <= most_ticks:
                before.append(i)
                group_of[i] = before
    return [group for i, group in group_of.items() if group[0] == i]


def merged_sets(workload: OperatorDag, most_ticks: float, most: int) -> list[int] | None:
    """The closed sets that divide no chain of operators beside others, of at most so much compute;
    None if more than `most`."""
    groups = _merged_chains(workload, most_ticks)
    group_of = {i: k for k, members in enumerate(groups) for i in members}
    producers = [
        sorted({group_of[p] for i in members for p in workload.producers[i]} - {k})
        for k, members in enumerate(groups)
    ]
    sets = list_closed_sets(producers, most)
    units = [union(1 << i for i in members) for members in groups]
    return sets and [union(units[k] for k in members_of(each)) for each in sets]


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
    def at(cls, workload: OperatorDag, sets: Sequence[int]) -> Cuts:
        """After each of some closed sets, among which are the empty and the full one."""
        n = workload.n_operators
        ticks = flags_of(sets, n) @ np.array(workload.compute_ticks, dtype=np.int64)
        keys = sorted(zip(ticks.tolist(), map(int.bit_count, sets), sets, strict=True))
        members = [each for *_, each in keys]
        flags = flags_of(members, n).astype(float)
        is_consumer = flags_of([union(1 << j for j in found) for found in workload.consumers], n)
        last = flags * (flags @ is_consumer.T == 0)
        sent = last @ flags_of(_sent_sets(workload), n) > 0
        sent[-1] = False
        activations = np.array(workload.activation_bytes, dtype=float)
        return cls(
            members=members,
            compute_s=np.array([tick for tick, *_ in keys], dtype=float) * TICK_S,
            parameter_bytes=flags @ np.array(workload.parameter_bytes, dtype=float),
            activation_bytes=flags @ activations,
            crossing_bytes=sent @ activations,
        )

    def __len__(self) -> int:
        return len(self.members)

    @cached_property
    def blocked(self) -> Bools:
        """[i, j] is True unless a stage may run from cut i to another cut j: i is within j."""
        words = words_of(self.members, self.members[-1].bit_length())
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
        return self.take(
            cheapest_of_parts(self.compute_s, self.crossing_bytes, n_buckets, per_bucket)
        )


Flags = npt.NDArray[np.uint8]  # by set and operator: 1 for members
Words = npt.NDArray[np.uint64]  # the same, 64 operators in each


def consumers_of(producers: Sequence[Sequence[int]]) -> list[list[int]]:
    """Positions of each operator's distinct consumers."""
    found: list[list[int]] = [[] for _ in producers]
    for i, sources in enumerate(producers):
        for source in dict.fromkeys(sources):
            found[source].append(i)
    return found


def list_closed_sets(
    producers: Sequence[Sequence[int]],
    most: int,
    narrow: Callable[[list[int]], Iterable[int]] = lambda sets: range(len(sets)),
) -> list[int] | None:
    """All closed sets, by size; None as soon as there are more than `most`.

    Args:
        producers: by operator, in topological order.
        narrow: the positions to keep of the sets of one size.
    """
    consumers = consumers_of(producers)
    needs = [union(1 << p for p in sources) for sources in producers]
    found, level = [0], {0: tuple(i for i, need in enumerate(needs) if not need)}
    while level:
        above: dict[int, tuple[int, ...]] = {}
        for members, ready in level.items():
            for i in ready:
                grown = members | 1 << i
                if grown not in above:
                    freed = [j for j in consumers[i] if not needs[j] & ~grown]
                    above[grown] = (*(j for j in ready if j != i), *freed)
        items = list(above.items())
        level = dict(items[k] for k in narrow(list(above)))
        found += level
        if len(found) > most:
            return None
    return found


def union(sets: Iterable[int]) -> int:
    """Of sets of operators."""
    members = 0
    for each in sets:
        members |= each
    return members


def members_of(members: int) -> Iterable[int]:
    """Positions of the operators of a set, ascending."""
    while members:
        low = members & -members
        yield low.bit_length() - 1
        members ^= low


def words_of(sets: Sequence[int], n_operators: int) -> Words:
    """A row for each set."""
    n_words = -(-n_operators // 64)
    raw = b"".join(members.to_bytes(8 * n_words, "little") for members in sets)
    return np.frombuffer(raw, dtype="<u8").reshape(len(sets), n_words)


def flags_of(sets: Sequence[int], n_operators: int) -> Flags:
    """A row for each set."""
    octets = words_of(sets, n_operators).view(np.uint8)
    return np.unpackbits(octets, axis=1, bitorder="little", count=n_operators)


def cheapest_of_parts(
    work: Floats, cost: Floats, n_parts: int, n_each: int
) -> npt.NDArray[np.intp]:
    """Positions of the sets that cost least among those of about equal work, and of both ends.

    Args:
        work: ascending.
    """
    part = np.minimum((work / max(work[-1], 1e-300) * n_parts).astype(int), n_parts - 1)
    order = np.lexsort((cost, part))
    ordered = part[order]
    rank = np.arange(len(work)) - np.searchsorted(ordered, ordered, side="left")
    kept = np.zeros(len(work), dtype=bool)
    kept[order[rank < n_each]] = True
    kept[[0, -1]] = True
    return np.flatnonzero(kept)


def n_in_flight(n_replicas: int, n_after: int) -> int:
    """Minibatches that a replica holds activations of: its own and those further down.

    Every replica admits a minibatch whenever the pipeline finishes one per replica, so that the
    `n_after` workers behind the stage hold ceil(n_after / n_replicas) of each replica's.
    """
    return math.ceil(n_after / n_replicas) + 1


def memory_bytes(parameters: Amount, activations: Amount, in_flight: int) -> Amount:
    """Peak of one replica: state, a stashed copy of the weights per extra minibatch, activations.

    Args:
        parameters: bytes of the stage's parameters.
        activations: bytes of everything the stage keeps of one minibatch, inputs too.
    """
    return (STATE_BYTES_PER_PARAMETER_BYTE + in_flight - 1) * parameters + in_flight * activations


@dataclass(frozen=True, kw_only=True)
class Level:
    """Equal workers of one level.

    Attributes:
        bandwidth: bytes/s of the slowest link between them.
        inner: workers inside each: 1 on the innermost level, where they are devices.
        memory_bytes: of each device; infinite for no limit, and on outer levels.
    """

    n_workers: int
    bandwidth: float
    inner: int
    memory_bytes: float = math.inf

    def sync_s_per_byte(self, r: int) -> float:
        """Gradient synchronisation of r replicas, per byte of parameters."""
        return 4 * (r - 1) / (self.bandwidth * r * r) / self.inner


def levels_of(
    n_workers: Sequence[int], bandwidths: Sequence[float], memory: float = math.inf
) -> list[Level]:
    """Levels of equal workers, innermost first; `memory` is of each device."""
    inner = [1, *n_workers[:-1]]
    limits = [memory, *[math.inf] * (len(n_workers) - 1)]
    return [
        Level(n_workers=n, bandwidth=bandwidth, inner=within, memory_bytes=limit)
        for n, bandwidth, within, limit in zip(n_workers, bandwidths, inner, limits, strict=True)
    ]


def data_parallel_s(compute_s: float, parameter_bytes: float, levels: Sequence[Level]) -> float:
    """Step time when every device holds the whole model."""
    time_s = compute_s
    for level in levels:
        n = level.n_workers
        time_s = time_s / n + level.sync_s_per_byte(n) * parameter_bytes
    return time_s
