"""The gradient noise scale of made gradients."""

import math

import numpy as np
import pytest

from harness.domain.record import Sample
from harness.measure.derive.noise import needed_words, noise_scale, samples_needed

N_PARAMETERS = 50
SCALE = 40.0  # trace of the covariance / squared norm of the mean gradient


def squares(scale, n_each, *, mean=1.0, few=4, many=32):
    """Squared norms of mean gradients of `few` and of `many` samples."""
    draw = np.random.default_rng(7)
    deviation = math.sqrt(scale / N_PARAMETERS)
    return [
        Sample(
            metric="gradient_square_norm",
            value=float(
                np.square(
                    mean / math.sqrt(N_PARAMETERS)
                    + draw.normal(0, deviation / math.sqrt(n), N_PARAMETERS)
                ).sum()
            ),
            labels={"n_distinct": n},
        )
        for _ in range(n_each)
        for n in (few, many)
    ]


def test_the_scale_is_that_of_the_gradients_and_in_its_interval():
    found = noise_scale(squares(SCALE, 400))
    assert found.n_samples == pytest.approx(SCALE, rel=0.1)
    assert found.low < SCALE < found.high < 1.5 * SCALE
    assert samples_needed(SCALE, found.n_samples) == pytest.approx(2, rel=0.1)
    fewer = noise_scale(squares(SCALE, 40))
    assert fewer.low < found.low < found.high < fewer.high


def test_without_a_gradient_the_scale_is_unknown():
    found = noise_scale(squares(SCALE, 40, mean=0.0))
    assert math.isinf(found.high)
    assert samples_needed(32, math.inf) == 1


def test_of_several_points_the_scale_is_the_mean_over_the_steps_by_their_progress():
    few, many, first = 4, 32, 10  # of a run that goes on after 10 steps
    at = {19: (8.0, 1.0), 29: (64.0, 3.0), 34: (1.0, 0.0)}  # noise and square of the gradient
    steps = {19: 15.0, 29: 7.5, 34: 2.5}  # that are nearest
    points = [
        Sample(
            metric="gradient_square_norm", value=square + noise / n, labels={"n_distinct": n},
            step=step,
        )
        for step, (noise, square) in at.items() for n in (few, many)
    ]  # fmt: skip
    found = noise_scale([Sample(metric="loss", value=1.0, step=first), *points])
    scales = {19: 8.0, 29: 64 / 3}  # without a gradient, samples are spent without progress
    spent = [n * scales[k] / (many + scales[k]) for k, n in steps.items() if k in scales]
    progress = [n / (many + scales[k]) for k, n in steps.items() if k in scales]
    assert found.n_samples == pytest.approx((sum(spent) + steps[34]) / sum(progress))
    assert found.low == found.high == pytest.approx(found.n_samples)
    assert noise_scale(points[-2:]).n_samples == math.inf


def test_equal_samples_have_no_noise():
    found = noise_scale(squares(0.0, 8))
    assert str(found) == "0"
    assert samples_needed(32, found.n_samples) == math.inf


def test_of_noise_that_is_not_above_0_only_the_most_is_known():
    draws = [(4, 1.0), (4, 1.2), (32, 1.1), (32, 1.15)]
    found = noise_scale(
        Sample(metric="gradient_square_norm", value=value, labels={"n_distinct": n})
        for n, value in draws
    )
    assert found.n_samples == 0
    assert str(found) == f"below {found.high:.2g}"
    assert needed_words(32, found) == f"above {1 + 32 / found.high:.2f}"


def test_gradients_of_one_number_of_samples_tell_nothing():
    assert noise_scale(squares(SCALE, 4)[::2]) is None
    assert noise_scale([]) is None
