"""Pieces of one operator's output that its readers fetch, and whose gradients they return.

The rules are those of `runtime.executor.geometry.layout`; tests compare the two.
"""

from __future__ import annotations

import numpy as np

from harness.domain.partition import n_replicas, nearest, volume
from harness.domain.sharding import FEWEST_SUMMED
from harness.domain.strategy import OperatorPlan, copies_of
from harness.plan.simulate.transfers import ADDS, COPIES, Floats, Ints, Shared, whole_bytes


class Pieces:
    """Collects the pieces of wants.

    Args:
        held: (n_parts, n_dims, 2) bounds of the producer's blocks.
    """

    def __init__(
        self, plan: OperatorPlan, held: Ints, bytes_per_element: float, *, is_summed: bool
    ) -> None:
        self._held, self._bytes = held, bytes_per_element
        self._holders = np.array(plan.devices)
        self._copies = [copies_of(plan, k) for k in range(len(plan.devices))]
        self._has_copies = n_replicas(plan.partition) > 1
        self._is_summed = is_summed
        self._rows: list[tuple[float, ...]] = []

    def add(self, number: int, bounds: Ints, device: int, copies: tuple[int, ...]) -> Shared | None:
        """Add the pieces of one want that other devices hold, or receive gradients of.

        Args:
            bounds: (n_dims, 2) of the wanted region.
            copies: devices of the readers, if they are copies of each other.

        Returns:
            The all-reduce that may replace the pieces, or None.
        """
        low = np.maximum(self._held[:, :, 0], bounds[:, 0])
        high = np.minimum(self._held[:, :, 1], bounds[:, 1])
        elements = np.maximum(high - low, 0).prod(axis=1)
        goes = returns = elements > 0
        if self._has_copies:
            served = [nearest(holders, device) for holders in self._copies]
            goes = goes & (self._holders == served)
        if copies:
            served = [nearest(copies, holder) for holder in self._holders.tolist()]
            returns = returns & (np.array(served) == device)
        n_pieces, is_remote = np.count_nonzero(goes), self._holders != device
        sent = (elements * (goes & is_remote)).sum()
        if n_pieces > 1:  # local pieces are copied or added too
            each = (ADDS if self._is_summed else COPIES) * (elements * goes).sum() / max(sent, 1)
        else:
            each = 0.0
        for part in np.flatnonzero((goes | returns) & is_remote).tolist():
            n_bytes = float(elements[part]) * self._bytes
            streamed = n_bytes * each if goes[part] else 0.0
            self._rows.append(
                (number, self._holders[part], n_bytes, streamed, goes[part], returns[part])
            )
        return self._shared(elements, volume(bounds.tolist()), copies)

    def _shared(self, elements: Ints, whole: int, copies: tuple[int, ...]) -> Shared | None:
        goes, returns = self._is_summed, not copies
        if not (goes or (returns and self._has_copies)):
            return None
        devices = tuple(sorted(self._holders[elements > 0].tolist()))
        is_all = bool((elements[elements > 0] == whole).all())
        if len(set(devices)) < max(FEWEST_SUMMED, len(devices)) or not is_all:
            return None
        return Shared(devices, whole_bytes(whole, self._bytes), goes, returns)

    def columns(self) -> Floats:
        """(6, n) want, source, bytes, bytes streamed, whether it goes, whether it returns."""
        return np.array(self._rows, dtype=np.float64).reshape(-1, 6).T
