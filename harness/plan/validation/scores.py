"""How well predictions agree with measured steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np


def percentile_error(
    predicted: Sequence[float], measured: Sequence[float], q: float
) -> float | None:
    """The q-th percentile of |predicted / measured - 1|; None without points."""
    if not predicted:
        return None
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return float(np.percentile(errors, q))


def rank_correlation(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Spearman's coefficient, ties by mean rank; None below 3 points or if all are equal."""
    if len(predicted) < 3:
        return None
    a, b = _ranks(predicted), _ranks(measured)
    if a.std() == 0 or b.std() == 0:
        return None
    return float(np.corrcoef(a, b)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.array((ends - (counts - 1) / 2)[inverse], dtype=np.float64)


def regret_of(predicted: Sequence[float], measured: Sequence[float]) -> float | None:
    """Loss by choosing the predicted best, as a share of the measured best; None below 2 points.

    Points of one prediction are runs of one choice, which counts by their mean.
    """
    runs: dict[float, list[float]] = {}
    for p, m in zip(predicted, measured, strict=True):
        runs.setdefault(float(f"{p:.9g}"), []).append(m)
    if len(runs) < 2:
        return None
    means = {p: sum(own) / len(own) for p, own in runs.items()}
    return means[min(means)] / min(means.values()) - 1


def mean_of(values: Iterable[float | None]) -> float | None:
    """Mean of those that are known."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    return sum(known) / len(known) if known else None
