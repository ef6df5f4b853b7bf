"""The greater of two normal variables, compiled. Import lazily: it imports numba."""

from __future__ import annotations

import math
from typing import Any

from numba import njit

_FAR = 6.0  # deviations; the lesser one is the greater once in 1e9


@njit(cache=True)
def greatest(a: float, var_a: float, b: float, var_b: float) -> Any:
    """Mean and variance, where both are independent.

    C. E. Clark, The greatest of a finite set of random variables, Operations Research 9 (1961).
    """
    spread = math.sqrt(var_a + var_b)
    if abs(a - b) >= _FAR * spread:
        return (a, var_a) if a >= b else (b, var_b)
    x = (a - b) / spread
    density = spread * math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    of_a, of_b = math.erfc(-x / math.sqrt(2)) / 2, math.erfc(x / math.sqrt(2)) / 2
    # Both from the later one on, so that small variances are no difference of large numbers.
    base = max(a, b)
    mean = (a - base) * of_a + (b - base) * of_b + density
    square = ((a - base) ** 2 + var_a) * of_a + ((b - base) ** 2 + var_b) * of_b
    square += ((a - base) + (b - base)) * density
    return base + mean, max(0.0, square - mean * mean)
