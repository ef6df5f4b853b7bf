"""Non-negative least squares of relative errors, for a few coefficients."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import numpy as np


def fit_amounts(rows: Sequence[Sequence[float]], values: Sequence[float]) -> list[float]:
    """Coefficients >= 0 whose sums of terms come nearest to the values, relative to each value.

    Exact, by trying every set of coefficients that are not 0; so for few of them.

    Args:
        rows: terms of each value.
        values: above 0.
    """
    terms = np.asarray(rows, dtype=np.float64) / np.asarray(values, dtype=np.float64)[:, None]
    n = terms.shape[1]
    best, least = np.zeros(n), np.inf
    for size in range(1, min(n, len(values)) + 1):
        for chosen in combinations(range(n), size):
            part = terms[:, chosen]
            found, _, rank, _ = np.linalg.lstsq(part, np.ones(len(values)), rcond=None)
            if rank < size or (found < 0).any():
                continue
            error = float(np.square(part @ found - 1).sum())
            if error < least * (1 - 1e-9):
                best, least = np.zeros(n), error
                best[list(chosen)] = found
    return [float(one) for one in best]
