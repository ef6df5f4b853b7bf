"""Pipelines on unlike devices and links: a dynamic program over (devices used, last stage, cut).

A stage is a run of consecutive segments on a group of devices, which share each microbatch. With
M microbatches a stage that takes w seconds per microbatch (forward and backward) and is reached
after p seconds of earlier stages and transfers (there and back, a third of it there) ends after

    b = M w + max(p, p/3 + y - 2w/3)

with y its all-reduce, which only the last microbatch's backward pass hides; and a cut whose
microbatch takes t seconds to cross, after p + M t; and the NICs of a stage's nodes, which share the
bytes of the cuts on both sides, take M times as long as for a microbatch. So every partial pipeline
has the pair (p, largest b so far), both to be kept small: the program keeps, for each (devices
used, last group, segments done), up to three pairs that no other one beats. Where a schedule splits
backward, the gradients of weights fill bubbles, and of a stage only a share of w counts in p.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from harness.plan.compiled import compiled, inlined
from harness.plan.simulate.transfers import Floats, Ints

Group = tuple[int, ...]

MOST_PAIRS = 3  # kept per state and cut
MOST_RUN = 8  # devices along an order: larger groups are multiples of it, or all that are left
_MOVES_AT_ONCE = 2_000  # between two looks at the clock


@dataclass(frozen=True)
class Pipeline:
    """Stages as runs of segments, each with its devices.

    Attributes:
        bound_s: the program's estimate of the step, without contention, memory, schedules and
            skips.
        ends: the segment at which each stage ends.
    """

    bound_s: float
    ends: tuple[int, ...]
    groups: tuple[Group, ...]


@dataclass(frozen=True)
class GroupChains:
    """Sequences of disjoint groups of devices, as a graph of states: (devices used, last group).

    Attributes:
        last: (n_states,) index of the last group; state 0 is the start, before any group.
        moves: (n_moves, 2) from a state to another that adds a group; those from states of fewer
            devices first.
    """

    groups: list[Group]
    last: Ints
    moves: Ints


@lru_cache(maxsize=32)
def chains_of_classes(classes: tuple[Group, ...], most: int) -> GroupChains:
    """All sequences of groups of at most so many devices; of the devices of one class, which are
    interchangeable, the first ones are used first."""

    def following(used: Group) -> Iterator[tuple[Group, Group]]:
        free = [range(len(own) - n + 1) for own, n in zip(classes, used, strict=True)]
        for counts in product(*free):
            if 0 < sum(counts) <= most:
                taken = zip(classes, used, counts, strict=True)
                group = [d for own, first, n in taken for d in own[first : first + n]]
                yield (
                    tuple(a + b for a, b in zip(used, counts, strict=True)),
                    tuple(sorted(group)),
                )

    return _chains((0,) * len(classes), following)


def n_moves(classes: Iterable[Group]) -> int:
    """Number of moves of all sequences of groups; so many ways to have, of each class, devices
    used before, in the last group, in the next, and free."""
    return math.prod(math.comb(len(own) + 3, 3) for own in classes)


@lru_cache(maxsize=32)
def chains_along(order: Group, most: int) -> GroupChains:
    """Sequences of groups of neighbours in an order of the devices, from its first one on."""
    n = len(order)

    def following(used: Group) -> Iterator[tuple[Group, Group]]:
        (first,) = used
        for k in range(1, min(most, n - first) + 1):
            if k <= MOST_RUN or first + k == n or k % MOST_RUN == 0:
                yield (first + k,), tuple(sorted(order[first : first + k]))

    return _chains((0,), following)


def chain_of(groups: tuple[Group, ...]) -> GroupChains:
    """One sequence of groups, none of which is left out."""
    number = np.arange(len(groups))
    last = np.insert(number, 0, -1)
    return GroupChains(list(groups), last, np.stack([number, number + 1], axis=1))


def _chains(
    start: Group, following: Callable[[Group], Iterable[tuple[Group, Group]]]
) -> GroupChains:
    """The graph from a start; `following` gives the devices used and the group of each move."""
    groups: dict[Group, int] = {}
    states: dict[tuple[Group, int], int] = {(start, -1): 0}
    of_use: dict[Group, list[int]] = {start: [0]}
    moves: list[tuple[int, int]] = []
    waiting = {0: {start}}  # by number of devices used
    while waiting:
        for used in sorted(waiting.pop(n_used := min(waiting))):
            for then, group in following(used):
                key = (then, groups.setdefault(group, len(groups)))
                if key not in states:
                    states[key] = len(states)
                    of_use.setdefault(then, []).append(states[key])
                    waiting.setdefault(n_used + len(group), set()).add(then)
                moves += [(source, states[key]) for source in of_use[used]]
    last = np.array([group for _, group in states], dtype=np.int64)
    return GroupChains(list(groups), last, np.array(moves, dtype=np.int64).reshape(-1, 2))


class Links(NamedTuple):
    """By device and device."""

    latency_s: Floats
    rate: Floats  # bytes/s
    nic_s: Floats  # that the first one's NIC needs for a byte to or from the second; 0 in a node
    node_of: Ints  # (devices,)


class StageCosts(NamedTuple):
    """Costs of stages and of cuts between them; n segments have n + 1 cuts."""

    stage_s: Floats  # (groups, cuts, cuts) one microbatch, forward and backward
    sync_s: Floats  # (groups, cuts, cuts) all-reduce
    sent: Floats  # (cuts, cuts) [a, b]: bytes of a microbatch from segments a..b to later ones
    returned: Floats  # (cuts, cuts) of them, bytes of gradients that come back


class Partials(NamedTuple):
    """Partial pipelines by state, cut, and place: the one with the least bound first."""

    prefix_s: Any  # when the next stage is reached
    bound_s: Any
    start: Any  # cut at which the last stage starts
    parent: Any  # (..., 2) state and place of the partial pipeline before the last stage
    n: Any  # (states, cuts) number of places in use


def best_pipelines(
    chains: GroupChains,
    costs: StageCosts,
    links: Links,
    *,
    n_microbatches: int,
    limit_s: float,
    fill_share: float = 1.0,
    n_each: int,
    is_over: Callable[[], bool],
) -> list[Pipeline]:
    """The pipelines of all segments with the least bounds up to limit_s: for each last state,
    n_each of them.

    Args:
        fill_share: of a stage's time, that later stages wait before their first microbatch.
        is_over: asked now and then; there are no pipelines when it says so.
    """
    n_states, n_cuts = len(chains.last), len(costs.sent)
    partials = _empty(n_states, n_cuts, MOST_PAIRS)
    partials.prefix_s[0, 0, 0] = partials.bound_s[0, 0, 0] = 0.0
    partials.n[0, 0] = 1
    whole = _empty(n_states, 1, n_each)
    n_members = np.array([len(group) for group in chains.groups], dtype=np.int64)
    members = np.full((len(n_members), n_members.max(initial=1)), -1, dtype=np.int64)
    for row, group in zip(members, chains.groups, strict=True):
        row[: len(group)] = group
    n_nodes = np.array([len(set(links.node_of[list(g)])) for g in chains.groups], dtype=np.int64)
    network = (*links[:3], n_nodes)
    groups, options = (chains.last, members, n_members), (n_microbatches, limit_s, fill_share)
    for first in range(0, len(chains.moves), _MOVES_AT_ONCE):
        if is_over():
            return []
        moves = chains.moves[first : first + _MOVES_AT_ONCE]
        _extend(moves, groups, (*costs, *network), options, partials, whole)
    found = [(s, k) for s in range(n_states) for k in range(whole.n[s, 0])]
    return [_pipeline(chains, partials, whole, state, place) for state, place in found]


def _empty(n_states: int, n_cuts: int, n_places: int) -> Partials:
    shape = (n_states, n_cuts, n_places)
    return Partials(
        np.full(shape, np.inf),
        np.full(shape, np.inf),
        np.zeros(shape, dtype=np.int64),
        np.zeros((*shape, 2), dtype=np.int64),
        np.zeros(shape[:2], dtype=np.int64),
    )


def _pipeline(
    chains: GroupChains, partials: Partials, whole: Partials, state: int, place: int
) -> Pipeline:
    """The pipeline that ends in a state, from its last stage to its first."""
    bound_s = float(whole.bound_s[state, 0, place])
    cut, of = partials.n.shape[1] - 1, whole
    ends: list[int] = []
    groups: list[Group] = []
    at = 0
    while state:
        ends.append(cut)
        groups.append(chains.groups[chains.last[state]])
        cut = int(of.start[state, at, place])
        state, place = of.parent[state, at, place].tolist()
        of, at = partials, cut
    return Pipeline(bound_s, tuple(reversed(ends)), tuple(reversed(groups)))


@compiled
def _extend(moves: Any, groups: Any, costs: Any, options: Any, partials: Any, whole: Any) -> None:
    """Add one more stage to the partial pipelines of each move's first state."""
    stage_s, sync_s, last = costs[0], costs[1], groups[0]
    n_microbatches, limit_s, fill_share = options
    n = partials.n.shape[1] - 1
    for move in range(len(moves)):
        source, target = moves[move, 0], moves[move, 1]
        after = last[target]
        for a in range(n):
            for k in range(partials.n[source, a]):
                prefix_s = partials.prefix_s[source, a, k]
                there_s = back_s = nic_busy_s = 0.0
                if source:
                    there_s, back_s, nic_busy_s = _cross(
                        source, a, k, after, groups, costs, partials
                    )
                reached_s = prefix_s + there_s + back_s
                crossed_s = prefix_s + n_microbatches * max(there_s, back_s)
                bound_s = max(partials.bound_s[source, a, k], n_microbatches * nic_busy_s)
                bound_s = max(bound_s, crossed_s)
                for b in range(a + 1, n + 1):
                    own_s = stage_s[after, a, b]
                    if reached_s + n_microbatches * own_s > limit_s:
                        break
                    drained_s = max(reached_s, reached_s / 3 + sync_s[after, a, b] - 2 / 3 * own_s)
                    ends_s = max(bound_s, n_microbatches * own_s + drained_s)
                    if ends_s > limit_s:
                        continue
                    next_s = reached_s + fill_share * own_s
                    if b < n:
                        _insert(partials, target, b, next_s, ends_s, a, source, k, True)
                    else:
                        _insert(whole, target, 0, next_s, ends_s, a, source, k, False)


@inlined
def _cross(
    source: int, a: int, k: int, after: int, groups: Any, costs: Any, partials: Any
) -> tuple[float, float, float]:
    """Seconds of a microbatch from a partial pipeline to the group after it, of its gradients back,
    and of the NICs beside the cut."""
    last, members, n_members = groups
    _, _, sent, returned, latency_s, rate, nic_s, n_nodes = costs
    before = earlier = last[source]
    lanes = min(n_members[before], n_members[after])
    start = partials.start[source, a, k]
    there, back = sent[start, a] / lanes, returned[start, a] / lanes
    there_s = back_s = nic_busy_s = np.inf
    first, place = partials.parent[source, a, k]  # of the stages before the last
    sent_in = returned_in = 0.0
    if first:
        earlier, origin = last[first], partials.start[first, start, place]
        sent_in, returned_in = sent[origin, start], returned[origin, start]
    for i in range(n_members[before]):
        for j in range(n_members[after]):
            p, q = members[before, i], members[after, j]
            there_s = min(there_s, latency_s[p, q] + there / rate[p, q])
            back_s = min(back_s, latency_s[q, p] + back / rate[q, p])
            next_s = sent[start, a] * nic_s[q, p] / n_nodes[after]
            for h in range(n_members[earlier]):
                o = members[earlier, h]
                out_s = returned_in * nic_s[p, o] + sent[start, a] * nic_s[p, q]
                in_s = sent_in * nic_s[p, o] + returned[start, a] * nic_s[p, q]
                own_s = max(out_s, in_s) / n_nodes[before]
                nic_busy_s = min(nic_busy_s, max(own_s, next_s))
    if there > 0 and back == 0:  # below the first trained operator
        back_s = 0.0
    return there_s, back_s, nic_busy_s


@compiled
def _insert(
    partials: Any,
    state: int,
    cut: int,
    prefix_s: float,
    bound_s: float,
    start: int,
    source: int,
    place: int,
    only_unbeaten: bool,
) -> None:
    """Keep a partial pipeline at its place, unless all places have better ones."""
    prefixes, bounds, n = partials.prefix_s, partials.bound_s, partials.n[state, cut]
    k = n
    while k > 0 and (bounds[state, cut, k - 1], prefixes[state, cut, k - 1]) > (bound_s, prefix_s):
        k -= 1
    if k == bounds.shape[2]:
        return
    if only_unbeaten:
        if k > 0 and prefixes[state, cut, k - 1] <= prefix_s:
            return
        kept = k
        for i in range(k, n):  # their bounds are larger
            if prefixes[state, cut, i] < prefix_s:
                _move(partials, state, cut, i, kept)
                kept += 1
        n = kept
    n = min(n + 1, bounds.shape[2])
    for i in range(n - 1, k, -1):
        _move(partials, state, cut, i - 1, i)
    prefixes[state, cut, k], bounds[state, cut, k] = prefix_s, bound_s
    partials.start[state, cut, k] = start
    partials.parent[state, cut, k, 0] = source
    partials.parent[state, cut, k, 1] = place
    partials.n[state, cut] = n


@compiled
def _move(partials: Any, state: int, cut: int, source: int, target: int) -> None:
    partials.prefix_s[state, cut, target] = partials.prefix_s[state, cut, source]
    partials.bound_s[state, cut, target] = partials.bound_s[state, cut, source]
    partials.start[state, cut, target] = partials.start[state, cut, source]
    for i in range(2):
        partials.parent[state, cut, target, i] = partials.parent[state, cut, source, i]
