"""Sets of operators that contain all their producers: where a pipeline of stages may be cut.

A branchy graph has exponentially many, so that they are listed up to a limit. Sets are Python
integers: bit i is operator i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
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
