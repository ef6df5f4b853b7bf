"""Cuts as arrays, in an order that respects inclusion, for the dynamic program."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from harness.plan.bottleneck import Floats
from harness.plan.published.pipedream.lattice import GraphCut
from harness.plan.published.pipedream.workload import TICK_S

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
