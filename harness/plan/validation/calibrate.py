"""One number from one measured step: what a user could calibrate too."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from statistics import median

_N_HALVINGS = 30


def solve(predict: Callable[[float], float], measured: float, low: float, high: float) -> float:
    """The amount at which a prediction equals a measurement, by bisection of its logarithm; the
    nearer bound if none does.

    Args:
        predict: falls as the amount grows.
    """
    a, b = math.log(low), math.log(high)
    for _ in range(_N_HALVINGS):
        middle = (a + b) / 2
        a, b = (middle, b) if predict(math.exp(middle)) > measured else (a, middle)
    return math.exp((a + b) / 2)


def solve_all(
    predict: Callable[[int, float], float], measured: Sequence[float], low: float, high: float
) -> float:
    """The amount whose median error over several measurements is least in magnitude: the one at
    which the median of predicted / measured is 1.

    Args:
        predict: of measurement k at an amount; falls as the amount grows.
    """

    def ratio(amount: float) -> float:
        return median(predict(k, amount) / value for k, value in enumerate(measured))

    return solve(ratio, 1.0, low, high)
