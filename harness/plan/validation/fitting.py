"""Fit a few amounts to measured steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import combinations
from statistics import median

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


_N_HALVINGS = 30


def solve_all(
    predict: Callable[[int, float], float], measured: Sequence[float], low: float, high: float
) -> float:
    """The amount whose median error over several measurements is least in magnitude, at which the
    median of predicted / measured is 1; by bisection of its logarithm. The nearer bound if none is.

    Args:
        predict: of measurement k at an amount; falls as the amount grows.
    """
    a, b = math.log(low), math.log(high)
    for _ in range(_N_HALVINGS):
        amount = math.exp((a + b) / 2)
        ratio = median(predict(k, amount) / value for k, value in enumerate(measured))
        a, b = (math.log(amount), b) if ratio > 1 else (a, math.log(amount))
    return math.exp((a + b) / 2)
