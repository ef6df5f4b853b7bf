"""Whether predictions choose well among the strategies of one cell: error, order, regret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

MIN_CORRELATED = 3


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One strategy of a cell: its predicted and its measured step."""

    name: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


@dataclass(frozen=True, kw_only=True)
class CellSummary:
    """How well the prediction orders strategies of equal model, batch, dtype and cluster: a cell.

    Attributes:
        median_error, worst_error: of |error| over the strategies.
        rank_correlation: Spearman's, predicted against measured; None below three strategies or
            when either side is constant.
        chosen: the strategy that is predicted to be the fastest; of equals the slowest measured.
        best: the strategy that was measured to be the fastest.
        regret: measured step of `chosen` over that of `best`, less 1.
    """

    n_strategies: int
    median_error: float
    worst_error: float
    rank_correlation: float | None
    chosen: str
    best: str
    regret: float


def _spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Correlation of ranks, ties with their mean rank."""
    from scipy.stats import rankdata

    if len(a) < MIN_CORRELATED or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def cell_summary(strategies: Sequence[Judged]) -> CellSummary:
    """Judge the predictions of one cell.

    Raises:
        ValueError: no strategy.
    """
    if not strategies:
        raise ValueError("a cell is judged by at least one strategy that has a measured step")
    errors = [abs(judged.error) for judged in strategies]
    chosen = min(strategies, key=lambda judged: (judged.predicted_s, -judged.measured_s))
    best = min(strategies, key=lambda judged: judged.measured_s)
    return CellSummary(
        n_strategies=len(strategies),
        median_error=median(errors),
        worst_error=max(errors),
        rank_correlation=_spearman(
            [judged.predicted_s for judged in strategies],
            [judged.measured_s for judged in strategies],
        ),
        chosen=chosen.name,
        best=best.name,
        regret=chosen.measured_s / best.measured_s - 1,
    )
