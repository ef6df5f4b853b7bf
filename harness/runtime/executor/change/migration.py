"""Which regions of which tensors travel between ranks when the strategy changes.

Every rank knows the holders of every slice under both strategies, so it works out all migrations
without communication. Slices of one tensor are equal or disjoint within a strategy, so each region
of a new slice lies in exactly one old slice:

    before      rank 0 |======|      rank 1 |======|
    after       rank 0 |===|   rank 1 |=========|
                               kept: the right part; from rank 0: the rest
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from harness.domain.partition import Interval, intersect
from harness.errors import StrategyError
from harness.runtime.executor.geometry.slices import WeightSlice

# The devices that hold each slice.
Placement = Mapping[WeightSlice, tuple[int, ...]]


@dataclass(frozen=True)
class Migration:
    """A region of one tensor that rank `target` needs and rank `source` holds.

    Attributes:
        region: in the whole tensor.
        before, after: the slice that the source holds, and the one that the target needs.
        source: equal to `target` if the rank holds the region already.
    """

    region: WeightSlice
    before: WeightSlice
    after: WeightSlice
    source: int
    target: int

    @property
    def n_elements(self) -> int:
        return self.region.n_elements


def find_migrations(before: Placement, after: Placement) -> list[Migration]:
    """All migrations of a change, in the same order on every rank; kept regions included.

    Of several holders, the one that sends least so far sends a region.

    Raises:
        StrategyError: a region that the new strategy needs is held by no rank.
    """
    old: dict[str, list[WeightSlice]] = defaultdict(list)
    for piece in sorted(before, key=_in_order):
        old[piece.name].append(piece)
    found: list[Migration] = []
    n_sent: Counter[int] = Counter()
    for piece in sorted(after, key=_in_order):
        parts = [(one, _common(one, piece)) for one in old[piece.name]]
        known = [(one, region) for one, region in parts if region is not None]
        _check_covered(piece, [region for _, region in known])
        for target in after[piece]:
            for one, region in known:
                holders = before[one]
                source = target
                if target not in holders:
                    source = min(holders, key=lambda rank: (n_sent[rank], rank))
                migration = Migration(region, one, piece, source, target)
                n_sent[source] += migration.n_elements if source != target else 0
                found.append(migration)
    return found


def _check_covered(piece: WeightSlice, regions: list[WeightSlice]) -> None:
    wanted = piece.n_elements
    held = sum(r.n_elements for r in regions)
    if held != wanted:
        raise StrategyError(
            f"the next strategy needs {wanted} elements of {piece.name}, the ranks hold {held} of "
            "them: change to a strategy of the same model"
        )


def _common(one: WeightSlice, other: WeightSlice) -> WeightSlice | None:
    """The region that two slices of one tensor share; None if it is empty."""
    if len(one.intervals) != len(other.intervals):
        return None
    common = intersect(one.intervals, other.intervals)
    return None if common is None else WeightSlice(one.name, common)


def _in_order(piece: WeightSlice) -> tuple[str, tuple[Interval, ...]]:
    return piece.name, piece.intervals
