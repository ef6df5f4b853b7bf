"""The gradient noise scale of a training, by the norms of gradients of two numbers of samples.

Source: McCandlish, Kaplan, Amodei and the OpenAI Dota Team, An Empirical Model of Large-Batch
Training, 2018, appendix A.1.
"""

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from harness.domain.record import Record
from harness.measure.derive.spans import samples_of
from harness.measure.rank_records import Records
from harness.measure.statistics import CONFIDENCE
from harness.units import format_number

_N_RESAMPLES = 2000


@dataclass(frozen=True, kw_only=True)
class NoiseScale:
    """In samples; infinite where the gradient cannot be told from its noise, 0 where the noise
    cannot be told from none.

    Attributes:
        low, high: its interval, by the bootstrap.
    """

    n_samples: float
    low: float
    high: float

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self.high)

    def __str__(self) -> str:
        if math.isinf(self.n_samples):
            return f"above {format_number(self.low, 2)}"
        if self.n_samples == 0 < self.high < math.inf:
            return f"below {format_number(self.high, 2)}"
        if self.low == self.high:
            return format_number(self.n_samples, 3)
        high = format_number(self.high, 2) if self.is_bounded else "more"
        return f"{format_number(self.n_samples, 2)} ({format_number(self.low, 2)} to {high})"


def samples_needed(batch: float, noise_scale: float) -> float:
    """Samples to the same loss with a batch, relative to those with the smallest batches.

    Source: McCandlish et al., with the noise scale as critical batch: (steps / fewest - 1)
    (samples / fewest - 1) = 1, where the critical batch is fewest samples / fewest steps.
    """
    return 1 + batch / noise_scale if noise_scale else math.inf


def needed_words(batch: float, noise: NoiseScale) -> str:
    """`samples_needed` in words: a bound where only one of the scale is known."""
    if math.isinf(noise.n_samples):
        return f"below {samples_needed(batch, noise.low):.2f}"
    if noise.n_samples == 0 < noise.high:
        return f"above {samples_needed(batch, noise.high):.2f}"
    return f"{samples_needed(batch, noise.n_samples):.2f}"


def noise_scale(records: Iterable[Record]) -> NoiseScale | None:
    """The noise scale by rank 0's records; None without gradients of two numbers of samples.

    Of several points of a training, each stands for the measured steps nearest to it. The mean of
    their scales N weights a step by its progress, B / (B + N) with batch B (appendix D), so it is
    B times the sum of N / (B + N) over that of B / (B + N): the scale by mean squared norms
    relative to those of a point's whole batches.
    """
    records = Records.of(records)
    squares: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for sample in samples_of(records, "gradient_square_norm"):
        squares[sample.step or 0][int(str(sample.labels["n_distinct"]))].append(sample.value)
    points = {
        step + 1: found
        for step, found in sorted(squares.items())
        if len(found) == 2 and any(found[max(found)])
    }
    if not points:
        return None
    first = min((record.step for record in records if record.step is not None), default=0)
    at = np.array([*points])
    n_steps = np.diff([first, *(at[1:] + at[:-1]) / 2, at[-1]])
    few, many = sorted(next(iter(points.values())))
    draw = np.random.default_rng(0)

    def relative(mean: Callable[[list[float]], np.ndarray]) -> np.ndarray:
        ratios = [
            mean(found[few]) / np.maximum(mean(found[many]), sys.float_info.min)
            for found in points.values()
        ]
        weighted: np.ndarray = np.average(ratios, axis=0, weights=n_steps)
        return weighted

    def resampled(values: list[float]) -> np.ndarray:
        means: np.ndarray = draw.choice(values, (_N_RESAMPLES, len(values))).mean(axis=1)
        return means

    found = _scale(few, many, relative(lambda values: np.mean(values, keepdims=True)))
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(
        _scale(few, many, relative(resampled)), [tail, 1 - tail], method="nearest"
    )
    return NoiseScale(n_samples=float(found[0]), low=float(low), high=float(high))


def choose_scale(newest_first: Iterable[NoiseScale | None]) -> NoiseScale | None:
    """The newest of several runs' noise scales that has bounds, else the newest; None without."""
    newest = None
    for found in newest_first:
        if found is not None and found.is_bounded:
            return found
        newest = newest or found
    return newest


def _scale(few: int, many: int, ratio: np.ndarray) -> np.ndarray:
    """By the mean squared norm of few samples' gradients over that of many: a mean gradient of n
    samples has |G|^2 + S / n in expectation, where G is the gradient, S the trace of the covariance
    of samples' gradients, and S / |G|^2 the scale.
    """
    gradient = (many - few * ratio) / (many - few)
    noise = np.maximum(0, (ratio - 1) / (1 / few - 1 / many))
    return np.where(gradient > 0, noise / np.where(gradient > 0, gradient, 1), math.inf)
