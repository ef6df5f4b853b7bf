"""Simulate every point of a set and score the predictions.

How well predictions agree with measured steps.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from statistics import median
from typing import Any

import numpy as np

from harness.domain.validation import PartScores, ValidatedPoint, Validation
from harness.errors import HarnessError
from harness.measure.statistics import rank_correlation
from harness.plan.validation.points import MeasuredStep, NotExpressedError, Published
from harness.units import format_bytes


def percentile_error(
    predicted: Sequence[float], measured: Sequence[float], q: float
) -> float | None:
    """The q-th percentile of |predicted / measured - 1|; None without points."""
    if not predicted:
        return None
    errors = [abs(p / m - 1) for p, m in zip(predicted, measured, strict=True)]
    return float(np.percentile(errors, q))


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


_CALIBRATES = "calibrates the others"
# Groups of points that are named for what they lack.
_N_WORST = 3


def judge(
    name: str, published: Published, progress: Callable[[int, int], None] = lambda done, of: None
) -> Validation:
    """Predict and score.

    Args:
        progress: called with the number of points that are done, and of all.
    """
    reasons: Counter[str] = Counter()
    judged: list[tuple[MeasuredStep, ValidatedPoint]] = []
    for k, point in enumerate(published.points):
        progress(k, len(published.points))
        try:
            judged.append((point, _predict(point)))
            reasons[_CALIBRATES] += bool(point.calibrates)
        except NotExpressedError as error:
            reasons[str(error)] += 1
        except HarnessError as error:
            reasons[f"{type(error).__name__}: {error}"] += 1
    return _scored(name, published, judged, {why: n for why, n in reasons.items() if n})


def _predict(point: MeasuredStep) -> ValidatedPoint:
    case = point.build()
    simulation = case.simulator.simulate(case.strategy)
    return ValidatedPoint(
        name=point.name,
        cell=point.cell,
        part=point.part,
        samples=point.samples,
        measured_s=point.measured_s,
        predicted_s=simulation.step_s,
        fits=simulation.fits,
        calibrates=point.calibrates,
        measured_bytes=point.memory_bytes,
        predicted_bytes=max(simulation.memory_bytes.values()),
        limit_bytes=int(case.simulator.limits.min()),
    )


def _scored(
    name: str,
    published: Published,
    judged: Sequence[tuple[MeasuredStep, ValidatedPoint]],
    reasons: dict[str, int],
) -> Validation:
    ran = [(p, v, p.measured_s) for p, v in judged if p.measured_s is not None and not p.calibrates]
    parts = sorted({point.part for point, _ in judged})
    with_memory = [v for _, v, _ in ran if v.measured_bytes]
    theirs = [(p.source_s, s) for p, _, s in ran if p.source_s is not None]
    return Validation(
        set=name,
        n_points=len(published.points),
        **_scores([one for _, one in judged]),
        source_median_error=percentile_error([a for a, _ in theirs], [s for _, s in theirs], 50)
        or published.source_median_error,
        trivial_median_error=published.trivial_median_error,
        not_expressed=reasons,
        memory_median_error=percentile_error(
            [float(v.predicted_bytes) for v in with_memory],
            [float(v.measured_bytes or 0) for v in with_memory],
            50,
        ),
        parts=[
            PartScores(part=part, **_scores([one for p, one in judged if p.part == part]))
            for part in (parts if len(parts) > 1 else ())
        ],
        bias=median(v.predicted_s / s for _, v, s in ran) - 1 if ran else None,
        notes=list(published.notes),
        missing=[
            *published.missing([(p, v.predicted_s) for p, v, _ in ran]),
            *_unlike_groups(published.lacks, [(p, v.predicted_s / s) for p, v, s in ran]),
            *_missing_memory([one for _, one in judged]),
        ],
        points=[one for _, one in judged],
    )


def _scores(points: Sequence[ValidatedPoint]) -> dict[str, Any]:
    """Fields of `Validation` and `PartScores`."""
    finished = [(v, v.measured_s) for v in points if v.measured_s is not None]
    judged = [v for v in points if not v.calibrates]
    ran = [(v, s) for v, s in finished if not v.calibrates]
    predicted, measured = [v.predicted_s for v, _ in ran], [s for _, s in ran]
    cells: dict[str, list[tuple[float, float]]] = defaultdict(list)
    choices: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one, seconds in finished:
        cells[one.cell].append((one.predicted_s / one.samples, seconds / one.samples))
        if one.fits:
            choices[one.cell].append(cells[one.cell][-1])
    pairs = [list(zip(*cell, strict=True)) for cell in cells.values()]
    offered = [list(zip(*cell, strict=True)) for cell in choices.values()]
    failed = [one for one in judged if one.measured_s is None]
    return {
        "n_expressed": len(judged),
        "median_error": percentile_error(predicted, measured, 50),
        "p90_error": percentile_error(predicted, measured, 90),
        "spearman": mean_of(rank_correlation(*pair) for pair in pairs),
        "regret": mean_of(regret_of(*pair) for pair in offered),
        "n_failed": len(failed),
        "n_failed_called": sum(not one.fits for one in failed),
        "n_ran_called_failed": sum(not one.fits for one, _ in ran),
    }


def _unlike_groups(lacks: str, ratios: Sequence[tuple[MeasuredStep, float]]) -> list[str]:
    """The groups of points whose predictions are furthest off, if groups say which term is missing.

    Args:
        ratios: predicted over measured seconds.
    """
    groups: dict[str, list[float]] = defaultdict(list)
    for point, ratio in ratios:
        groups[point.group].append(ratio)
    if not lacks or len(groups) < 2:
        return []
    errors = {group: median(own) - 1 for group, own in groups.items()}
    worst = sorted(errors, key=lambda group: -abs(errors[group]))[:_N_WORST]
    each = ", ".join(f"{errors[group]:+.0%} {group} ({len(groups[group])})" for group in worst)
    all_ = median(ratio for _, ratio in ratios) - 1
    return [f"{lacks}: predicted against measured is {each}; all together {all_:+.0%}"]


def _missing_memory(points: Sequence[ValidatedPoint]) -> list[str]:
    """By part: how much more memory the failed runs need that are predicted to fit."""
    spare: dict[str, list[int]] = defaultdict(list)
    for one in points:
        if one.measured_s is None and one.fits and not one.calibrates:
            spare[one.part].append(one.limit_bytes - one.predicted_bytes)
    return [
        f"memory beside tensors: {len(own)} failed runs{f' of {part}' if part else ''} are "
        f"predicted to leave {format_bytes(min(own))} to {format_bytes(max(own))} of a device free"
        for part, own in spare.items()
    ]
