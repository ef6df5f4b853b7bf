"""Pieces of one operator's output that its readers fetch, and whose gradients they return."""

from __future__ import annotations

import numpy as np

from harness.domain.partition import n_replicas, volume
from harness.domain.routes import Parts, Pieces, find_pieces, summing_devices
from harness.domain.strategy import OperatorPlan, copies_of
from harness.plan.simulate.transfers import ADDS, COPIES, Floats, Ints, Shared, whole_bytes


class PricedPieces:
    """Collects the pieces of wants, with their bytes.

    Args:
        held: (n_parts, n_dims, 2) bounds of the producer's blocks.
    """

    def __init__(
        self, plan: OperatorPlan, held: Ints, bytes_per_element: float, *, is_summed: bool
    ) -> None:
        has_copies = n_replicas(plan.partition) > 1
        copies = [copies_of(plan, k) for k in range(len(plan.devices))] if has_copies else []
        self._parts = Parts(held, np.array(plan.devices), copies)
        self._bytes, self._is_summed = bytes_per_element, is_summed
        self._rows: list[tuple[float, ...]] = []

    def add(self, number: int, bounds: Ints, device: int, copies: tuple[int, ...]) -> Shared | None:
        """Add the pieces of one want that other devices hold, or receive gradients of.

        Args:
            bounds: (n_dims, 2) of the wanted region.
            copies: devices of the readers, if they are copies of each other.

        Returns:
            The all-reduce that may replace the pieces, or None.
        """
        found, holders = find_pieces(self._parts, bounds, device, copies), self._parts.devices
        elements, goes, returns = found.n_elements, found.goes, found.returns
        n_pieces, is_remote = np.count_nonzero(goes), holders != device
        sent = (elements * (goes & is_remote)).sum()
        if n_pieces > 1:  # local pieces are copied or added too
            each = (ADDS if self._is_summed else COPIES) * (elements * goes).sum() / max(sent, 1)
        else:
            each = 0.0
        for part in np.flatnonzero((goes | returns) & is_remote).tolist():
            n_bytes = float(elements[part]) * self._bytes
            streamed = n_bytes * each if goes[part] else 0.0
            self._rows.append((number, holders[part], n_bytes, streamed, goes[part], returns[part]))
        return self._shared(found, volume(bounds.tolist()), copies)

    def _shared(self, found: Pieces, whole: int, copies: tuple[int, ...]) -> Shared | None:
        goes, returns = self._is_summed, not copies
        if not (goes or (returns and self._parts.copies)):
            return None
        held = found.n_elements > 0
        is_whole = bool((found.n_elements[held] == whole).all())
        devices = summing_devices(self._parts.devices[held].tolist(), is_whole=is_whole)
        if devices is None:
            return None
        return Shared(devices, whole_bytes(whole, self._bytes), goes, returns)

    def columns(self) -> Floats:
        """(6, n) want, source, bytes, bytes streamed, whether it goes, whether it returns."""
        return np.array(self._rows, dtype=np.float64).reshape(-1, 6).T
