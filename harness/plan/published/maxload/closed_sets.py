"""Sets of operators that contain all their producers: where a pipeline of stages may be cut."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from harness.plan.published.maxload.kernels import cut_values
from harness.plan.published.maxload.problem import Floats, Integers, Lists, LoadProblem

Words = npt.NDArray[np.uint64]


class ClosedSets(NamedTuple):
    """Closed sets by their seconds: a set stands after those that it includes.

    Attributes:
        members: as integers, bit i is operator i.
        words: the same as rows of 64 bits.
        seconds, n_bytes: of the members.
        cut_s: seconds of the values with operators on both sides.
        cut_starts, cut_values: those values by set, ascending, as `Lists` holds them.
        cut_inside: of each, how many of its operators are members.
        is_complete: all closed sets are here.
    """

    members: list[int]
    words: Words
    seconds: Floats
    n_bytes: Floats
    cut_s: Floats
    cut_starts: Integers
    cut_values: Integers
    cut_inside: Integers
    is_complete: bool

    def __len__(self) -> int:
        return len(self.members)


def list_closed_sets(problem: LoadProblem, most: int) -> ClosedSets:
    """All closed sets, or, where they are more than `most`, as many of the cheapest to cut at of
    each size."""
    found = _grow(problem, most, width=None)
    if found is not None:
        return _tabulate(problem, found, is_complete=True)
    width = max(1, most // (problem.n_operators + 1))
    beam = _grow(problem, most, width=width)
    assert beam is not None, "each size has at most its part"
    return _tabulate(problem, beam, is_complete=False)


def _grow(problem: LoadProblem, most: int, width: int | None) -> list[int] | None:
    """Closed sets by size, at most `width` of each; None where there are more than `most`."""
    n = problem.n_operators
    needs = [sum(1 << p for p in set(producers)) for producers in problem.producers]
    sources = tuple(i for i in range(n) if not needs[i])
    found, level = [0], {0: sources}
    while level:
        above: dict[int, tuple[int, ...]] = {}
        for members, ready in level.items():
            for i in ready:
                grown = members | 1 << i
                if grown not in above:
                    freed = [j for j in problem.consumers[i] if not needs[j] & ~grown]
                    above[grown] = (*(j for j in ready if j != i), *freed)
        if width is not None and len(above) > width:
            cut_s = _tabulate(problem, list(above), is_complete=False, is_ordered=True).cut_s
            kept = np.argsort(cut_s, kind="stable")[:width]
            items = list(above.items())
            above = dict(items[k] for k in kept)
        found += above
        if width is None and len(found) > most:
            return None
        level = above
    return found


def _tabulate(
    problem: LoadProblem, members: list[int], *, is_complete: bool, is_ordered: bool = False
) -> ClosedSets:
    n_words = (problem.n_operators + 63) // 64
    raw = b"".join(each.to_bytes(8 * n_words, "little") for each in members)
    words: Words = np.frombuffer(raw, dtype="<u8").reshape(len(members), n_words)
    bits = np.unpackbits(words.view(np.uint8), axis=1, bitorder="little", count=problem.n_operators)
    seconds = _sums(bits, problem.seconds)
    if not is_ordered:
        order = np.lexsort((bits.sum(axis=1), seconds))
        members, words, seconds = [members[k] for k in order], words[order], seconds[order]
        bits = bits[order]
    operators = Lists.from_lists([value.operators for value in problem.values])
    value_s = np.array([value.seconds for value in problem.values], dtype=np.float64)
    cut_s, starts, values, inside = cut_values(bits, *operators, value_s)
    return ClosedSets(
        members,
        np.ascontiguousarray(words),
        seconds,
        _sums(bits, problem.n_bytes),
        cut_s,
        starts,
        values,
        inside,
        is_complete,
    )


_TICK = 1e-12  # seconds and bytes are summed as multiples, so that order does not matter


def _sums(bits: npt.NDArray[np.uint8], amounts: object) -> Floats:
    """Sum of each set's amounts."""
    each = np.asarray(amounts, dtype=np.float64)
    unit = max(float(each.max(initial=0.0)) * _TICK, 1e-300)
    total: Floats = bits @ np.round(each / unit) * unit
    return total
