"""Quality of the predictions of one cell: error, rank correlation, regret."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

MIN_CORRELATED = 3


@dataclass(frozen=True, kw_only=True)
class RankedStrategy:
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
        n_failed: predicted strategies without a measured step.
        median_error, worst_error: of |error| over the strategies.
        rank_correlation: Spearman's, predicted against measured; None below three strategies or
            when either side is constant.
        chosen: the strategy with the fastest predicted step; among equals the slowest measured,
            where a failed one counts as slowest.
        best: the strategy with the fastest measured step.
        regret: measured step of `chosen` over that of `best`, less 1; None where `chosen` failed.
    """

    n_strategies: int
    n_failed: int
    median_error: float
    worst_error: float
    rank_correlation: float | None
    chosen: str
    best: str
    regret: float | None


def _spearman(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Correlation of ranks; ties have their mean rank."""
    from scipy.stats import rankdata

    if len(a) < MIN_CORRELATED or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])


def cell_summary(
    strategies: Sequence[RankedStrategy], failed: Mapping[str, float] | None = None
) -> CellSummary:
    """Judge the predictions of one cell.

    Args:
        strategies: those with a measured step.
        failed: predicted steps, by name, of those without a measured step.

    Raises:
        ValueError: no strategy was measured.
    """
    if not strategies:
        raise ValueError("a cell is judged by at least one strategy that has a measured step")
    errors = [abs(judged.error) for judged in strategies]
    failed = failed or {}
    chosen = min(strategies, key=lambda judged: (judged.predicted_s, -judged.measured_s))
    faster = {name: step_s for name, step_s in failed.items() if step_s <= chosen.predicted_s}
    fastest_failed = min(faster, key=faster.__getitem__, default=None)
    best = min(strategies, key=lambda judged: judged.measured_s)
    return CellSummary(
        n_strategies=len(strategies),
        n_failed=len(failed),
        median_error=median(errors),
        worst_error=max(errors),
        rank_correlation=_spearman(
            [judged.predicted_s for judged in strategies],
            [judged.measured_s for judged in strategies],
        ),
        chosen=fastest_failed or chosen.name,
        best=best.name,
        regret=None if fastest_failed else chosen.measured_s / best.measured_s - 1,
    )
