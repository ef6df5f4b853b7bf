"""Summaries and comparisons of repeated measurements: medians with intervals, never bare means.

The interval of a median is nonparametric, by order statistics: a sample is below the median with
probability 1/2, so ranks are binomial. Comparisons use Mann and Whitney's U and the interval of
Hodges and Lehmann's shift, on logarithms, so that the shift is a ratio.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count
from statistics import NormalDist
from typing import Literal

import numpy as np

from harness.units import format_number

CONFIDENCE = 0.99
MAX_P = 0.002
MINIMUM_EFFECT = 1.1
MIN_REPEATS = 9
_FEWEST_CORRELATED = 3
TOO_SHORT_S = 1e-3
# Up to this many samples an exact binomial coefficient takes microseconds.
_EXACT = 1000

Outcome = Literal["faster", "slower", "same", "inconclusive"]


@dataclass(frozen=True, kw_only=True)
class Summary:
    """Statistics of a set of samples, in the samples' unit.

    Attributes:
        low, high: interval of the median; the samples' range if they are too few for 99 %.
        coverage: the probability that [low, high] holds the median (0 for a single sample).
        cv: standard deviation (n - 1) over mean; 0 for a single sample.
        p95: 95th percentile, linearly interpolated.
        noise: reasons to distrust the numbers because of their spread.
    """

    median: float
    low: float
    high: float
    cv: float
    n: int
    p95: float
    min: float
    max: float
    coverage: float
    noise: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """Result of comparing one set of durations with a second one.

    Attributes:
        outcome: faster or slower than the second by at least the minimum effect, the same within
            it, or inconclusive.
        ratio: median of the first over that of the second, so below 1 is faster.
        p: two-sided probability of such a difference by chance; 1 below MIN_REPEATS in total.
        n_more: more repeats of each side that are likely to decide it; 0 when decided.
        is_apart: inconclusive by the number of repeats alone: there are two or more of each, and
            their ranges, which differ by the minimum effect, do not overlap.
    """

    outcome: Outcome
    ratio: float
    p: float
    n_more: int
    is_apart: bool = False

    def __str__(self) -> str:
        reading = f"{self.outcome} ({format_number(self.ratio, 3)} times as long"
        if self.outcome != "inconclusive":
            return f"{reading}, p = {self.p:.2g})"
        about = "the ranges do not overlap, and" if self.is_apart else "about"
        return f"{reading}): {about} {self.n_more} more repeats of each would settle it"


def _finite(values: Sequence[float], name: str) -> np.ndarray:
    array = np.asarray(values, dtype=float)
    if array.ndim != 1 or array.size == 0:
        raise ValueError(f"{name} needs a flat, non-empty sequence, not one of shape {array.shape}")
    if not np.isfinite(array).all():
        raise ValueError(f"{name} needs finite numbers: drop failed samples before")
    return array


def known_median(values: Iterable[float | None]) -> float | None:
    """The median of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


def known_mean(values: Iterable[float | None]) -> float | None:
    """The mean of the values that are known; None if none is."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def median_interval_ranks(n: int) -> tuple[int, int, float]:
    """Ranks (from 0) of the sorted samples that enclose the median, and their coverage.

    The narrowest symmetric pair with at least CONFIDENCE; the whole range if n is below 8.

    Source: David and Nagaraja, Order Statistics, section 7.1.
    """
    first = (n - 1) // 2
    chance = _chance_below(first, n)
    coverage = 0.0 if n % 2 else chance * (n - first) / (first + 1)
    while coverage < CONFIDENCE and first > 0:  # widen by a rank on both sides
        coverage += 2 * chance
        chance *= first / (n - first + 1)
        first -= 1
    return first, n - 1 - first, coverage


def _chance_below(k: int, n: int) -> float:
    """Probability that k of n samples (k near n / 2) are below the median: C(n, k) / 2^n."""
    if n <= _EXACT:
        return float(math.comb(n, k) / 2**n)
    log_of_ways = math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)
    return math.exp(log_of_ways - n * math.log(2))


def _noise(array: np.ndarray, cv: float) -> tuple[str, ...]:
    """The warnings of pyperf's `check` about the spread."""
    mean = float(array.mean())
    doubts = []
    if cv >= 0.1:
        doubts.append(f"standard deviation is {cv:.0%} of the mean")
    if mean > 0 and array.min() <= 0.5 * mean:
        doubts.append(f"minimum is {1 - array.min() / mean:.0%} below the mean")
    if mean > 0 and array.max() >= 1.5 * mean:
        doubts.append(f"maximum is {array.max() / mean - 1:.0%} above the mean")
    return tuple(doubts)


def distrust(durations: Summary) -> list[str]:
    """Reasons to distrust durations: the warnings of pyperf's `check`, and too few samples."""
    few = f"{durations.n} samples are too few for a 99 % interval (8 needed): their range is shown"
    short = f"samples are shorter than {TOO_SHORT_S * 1e3:g} ms"
    return [
        *([few] if durations.coverage < CONFIDENCE else []),
        *durations.noise,
        *([short] if durations.median < TOO_SHORT_S else []),
    ]


def summarize(values: Sequence[float]) -> Summary:
    """Summarise finite samples of one quantity, in any order.

    Raises:
        ValueError: empty or not finite.
    """
    array = np.sort(_finite(values, "summarize"))
    first, last, coverage = median_interval_ranks(array.size)
    mean = float(array.mean())
    cv = float(array.std(ddof=1) / abs(mean)) if array.size > 1 and mean != 0 else 0.0
    return Summary(
        median=float(np.median(array)),
        low=float(array[first]),
        high=float(array[last]),
        cv=cv,
        n=int(array.size),
        p95=float(np.percentile(array, 95)),
        min=float(array[0]),
        max=float(array[-1]),
        coverage=coverage,
        noise=_noise(array, cv),
    )


def paired_ratio(a: Sequence[float], b: Sequence[float]) -> Summary:
    """Statistics of a[i] / b[i], for samples taken in pairs, one right after the other.

    Raises:
        ValueError: lengths differ, empty, not finite, or a `b` that is not above 0.
    """
    above, below = _finite(a, "paired_ratio"), _finite(b, "paired_ratio")
    if above.size != below.size:
        raise ValueError(f"{above.size} and {below.size} samples do not pair: measure them in turn")
    if (below <= 0).any():
        raise ValueError("paired_ratio divides by the second samples: they must be above 0")
    return summarize((above / below).tolist())


def _shift_interval(log_a: np.ndarray, log_b: np.ndarray) -> tuple[float, float, float]:
    """Hodges and Lehmann's shift of log a against log b with its interval at 1 - MAX_P.

    Source: Hollander and Wolfe, Nonparametric Statistical Methods, section 4.3 (normal form).
    """
    shifts = np.sort(np.subtract.outer(log_a, log_b).ravel())
    n_a, n_b = log_a.size, log_b.size
    spread = math.sqrt(n_a * n_b * (n_a + n_b + 1) / 12)
    k = max(0, math.floor(n_a * n_b / 2 - NormalDist().inv_cdf(1 - MAX_P / 2) * spread))
    return float(np.median(shifts)), float(shifts[k]), float(shifts[-1 - k])


def _repeats_missing(n: int, half_width: float, distance: float) -> int:
    """Estimate the repeats to add to n of each side; intervals narrow with the root of n."""
    by_width = n * (half_width / distance) ** 2 if distance > 0 else 2 * n
    # Of each side, for which full separation gives p below MAX_P.
    fewest = next(k for k in count(2) if 2 / math.comb(2 * k, k) < MAX_P)
    return max(fewest, math.ceil(min(by_width, 1000)), n + 1) - n


def verdict(a: Sequence[float], b: Sequence[float]) -> Verdict:
    """Compare durations `a` with `b`, each the median of one repeat (a separate process).

    `faster` and `slower` need p below 0.002 by Mann and Whitney and a factor of at least
    MINIMUM_EFFECT; `same` needs the whole interval of the ratio within it. Fewer than nine repeats
    in total are always inconclusive.

    Raises:
        ValueError: empty, not finite, or not above 0.
    """
    log_a, log_b = _logs(a), _logs(b)
    shift, low, high = _shift_interval(log_a, log_b)
    p, effect = 1.0, math.log(MINIMUM_EFFECT)
    outcome: Outcome = "inconclusive"
    if log_a.size + log_b.size >= MIN_REPEATS:
        from scipy.stats import mannwhitneyu  # whose import takes a second

        p = float(mannwhitneyu(log_a, log_b, alternative="two-sided").pvalue)
        if p < MAX_P and abs(shift) >= effect:
            outcome = "faster" if shift < 0 else "slower"
        elif -effect < low and high < effect:
            outcome = "same"
    n, settled = min(log_a.size, log_b.size), outcome != "inconclusive"
    is_disjoint = log_a.max() < log_b.min() or log_b.max() < log_a.min()
    is_apart = bool(not settled and n > 1 and is_disjoint and abs(shift) >= effect)
    half_width = 0.0 if is_apart else (high - low) / 2
    return Verdict(
        outcome=outcome,
        ratio=float(np.median(a) / np.median(b)),  # as the speed-up beside it
        p=p,
        n_more=0 if settled else _repeats_missing(n, half_width, abs(effect - abs(shift))),
        is_apart=is_apart,
    )


def _logs(values: Sequence[float]) -> np.ndarray:
    array = _finite(values, "verdict")
    if (array <= 0).any():
        raise ValueError("verdict compares durations: they must be above 0")
    logs: np.ndarray = np.log(array)
    return logs


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float | None:
    """Spearman's coefficient, ties by their mean rank; None below three pairs, or where all values
    of a side are equal."""
    if len(a) < _FEWEST_CORRELATED or len(set(a)) == 1 or len(set(b)) == 1:
        return None
    from scipy.stats import rankdata

    return float(np.corrcoef(rankdata(a), rankdata(b))[0, 1])
