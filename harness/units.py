"""Parse and print quantities. SI inside (seconds, bytes, bytes/s); converted only here.

GB is 1e9 bytes, GiB is 2**30; `bit` units are divided by eight.
"""

from __future__ import annotations

import math
import re

from harness.errors import ConfigError

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_QUANTITY = re.compile(r"^\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-z/]*)\s*$", re.IGNORECASE)
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}


def _split(text: str, what: str, example: str) -> tuple[float, str]:
    match = _QUANTITY.match(text)
    if match is None:
        raise ConfigError(f"{what} {text!r} is not a number with a unit: write it like {example}")
    return float(match.group(1)), match.group(2)


def _scale(prefix: str, text: str, what: str, example: str) -> float:
    scale = {**_PREFIX, **_BINARY}.get(prefix.lower())
    if scale is None:
        raise ConfigError(f"{what} {text!r} has an unknown unit: write it like {example}")
    return scale


def parse_bytes(text: str) -> int:
    """Read a size such as `16MiB`, `4GB`, `4096`; returns bytes.

    Raises:
        ConfigError: not a size, or an infinite one.
    """
    number, unit = _split(text, "size", "16MiB or 4GB")
    prefix = unit.removesuffix("B").removesuffix("b")
    n_bytes = number * _scale(prefix, text, "size", "16MiB or 4GB")
    if math.isinf(n_bytes):
        raise ConfigError(f"size {text!r} is not finite: write it like 16MiB or 4GB")
    return round(n_bytes)


def parse_bandwidth(text: str) -> float:
    """Read a bandwidth such as `1gbit`, `100mbit`, `1.25e9`, `1.25GB/s`; returns bytes/s.

    Raises:
        ConfigError: not a bandwidth.
    """
    example = "1gbit, 1.25GB/s or 1.25e9 (bytes/s)"
    number, unit = _split(text, "bandwidth", example)
    lowered = unit.lower().removesuffix("/s").removesuffix("ps")
    if lowered.endswith("bit"):
        return number * _scale(lowered.removesuffix("bit"), text, "bandwidth", example) / 8
    return number * _scale(lowered.removesuffix("b"), text, "bandwidth", example)


def parse_duration(text: str) -> float:
    """Read a duration such as `500us`, `2ms`, `30s`, `5min`; returns seconds.

    Raises:
        ConfigError: not a duration.
    """
    number, unit = _split(text, "duration", "500us or 30s")
    if unit.lower() not in _SECONDS:
        raise ConfigError(f"duration {text!r} has an unknown unit: write it like 500us or 30s")
    return number * _SECONDS[unit.lower()]


def _pick(value: float, scales: list[tuple[float, str]]) -> str:
    for scale, unit in scales:
        if abs(value) >= scale:
            return (
                f"{value / scale:.3g} {unit}"
                if value / scale < 1000
                else f"{value / scale:.0f} {unit}"
            )
    scale, unit = scales[-1]
    return f"{value / scale:.3g} {unit}"


def format_bytes(n_bytes: float) -> str:
    """Print a size in binary units: `16 MiB`."""
    return _pick(
        n_bytes, [(2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"), (1, "B")]
    )


def format_bandwidth(bytes_per_s: float) -> str:
    """Print a bandwidth in decimal units: `1.25 GB/s`."""
    return _pick(
        bytes_per_s, [(1e12, "TB/s"), (1e9, "GB/s"), (1e6, "MB/s"), (1e3, "kB/s"), (1, "B/s")]
    )


def format_flops(flops_per_s: float) -> str:
    """Print a rate of computation: `12.3 TFLOP/s`."""
    scales = [
        (1e15, "PFLOP/s"),
        (1e12, "TFLOP/s"),
        (1e9, "GFLOP/s"),
        (1e6, "MFLOP/s"),
        (1, "FLOP/s"),
    ]
    return _pick(flops_per_s, scales)


def format_duration(seconds: float) -> str:
    """Print a duration: `12.3 ms`; `-` when it is not a number."""
    if math.isnan(seconds):
        return "-"
    if abs(seconds) >= 120:
        return f"{seconds / 60:.1f} min"
    return _pick(seconds, [(1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])
