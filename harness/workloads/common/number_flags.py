"""Checks of flags that are numbers or lists of numbers: each must be finite and within its bound.

None and `auto` mean automatic and pass every check.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from harness.errors import ConfigError


def flag(name: str) -> str:
    """The command-line spelling of a field's name."""
    return f"--{name.replace('_', '-')}"


def check_at_least(config: Any, bounds: Mapping[str, float]) -> None:
    """Refuse values below their bounds.

    Raises:
        ConfigError: names the flag, its value and the bound.
    """
    for name, bound in bounds.items():
        _check(config, name, partial(operator.le, bound), f"at least {bound}")


def check_above_zero(config: Any, names: Iterable[str]) -> None:
    """Refuse values of 0 or less.

    Raises:
        ConfigError: names the flag and its value.
    """
    for name in names:
        _check(config, name, partial(operator.lt, 0), "above 0")


def _check(config: Any, name: str, is_within: Callable[[float], bool], bound: str) -> None:
    given = getattr(config, name)
    values, each = (given, " each") if isinstance(given, tuple) else ((given,), "")
    numbers = [value for value in values if value not in (None, "auto")]
    if all(math.isfinite(value) and is_within(value) for value in numbers):
        return
    text = " ".join(map(str, values))
    raise ConfigError(f"{flag(name)} {text} must be {bound}{each}, and finite")
