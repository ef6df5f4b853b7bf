"""Parse and print quantities; the only converters, because all other code uses SI units.

GB is 1e9 bytes, GiB is 2**30; `bit` units are divided by eight.
"""

from __future__ import annotations

import math
import re

from harness.errors import ConfigError
from harness.inputs import MOST_S, find_number, shorten

_PREFIX = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}
_UNIT = re.compile(r"[a-zA-Z/]*\Z")
_LONGEST = 64
_SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "us": 1e-6, "ns": 1e-9, "min": 60.0, "h": 3600.0}
_MOST_BYTES = 2.0**60
_MOST_BYTES_PER_S = 1e18
_LEAST_MEMORY = 10**6  # of a device; less is a number whose unit was forgotten
_LEAST_BARE_BANDWIDTH = 1000  # less without a unit is one, too


def _split(text: str, quantity: str, example: str) -> tuple[float, str]:
    text = text.strip()
    unit = _UNIT.search(text) if len(text) <= _LONGEST else None
    number = find_number(text[: unit.start()], at_most=math.inf) if unit else None
    if unit is None or number is None:
        raise ConfigError(
            f"{quantity} {shorten(text)} is not a number with a unit: write it like {example}"
        )
    return number, unit.group()


def _scale(prefix: str, text: str, quantity: str, example: str) -> float:
    scale = {**_PREFIX, **_BINARY}.get(prefix.lower())
    if scale is None:
        raise ConfigError(f"{quantity} {text!r} has an unknown unit: write it like {example}")
    return scale


def _check(value: float, most: float, text: str, quantity: str, limit: str) -> float:
    if value > most:
        raise ConfigError(f"{quantity} {text!r} is beyond {limit}: write the one that is meant")
    return value


def parse_bytes(text: str) -> int:
    """Read a size such as `16MiB`, `4GB`, `4096`; returns bytes.

    Raises:
        ConfigError: not a size, or above 2**60 bytes.
    """
    number, unit = _split(text, "size", "16MiB or 4GB")
    prefix = unit.removesuffix("B").removesuffix("b")
    n_bytes = number * _scale(prefix, text, "size", "16MiB or 4GB")
    return round(_check(n_bytes, _MOST_BYTES, text, "size", "1048576 TiB"))


def parse_memory(text: str) -> int:
    """Read the memory of a device, such as `12GB`; returns bytes.

    Raises:
        ConfigError: not a size, below 1 MB, or above 2**60 bytes.
    """
    n_bytes = parse_bytes(text)
    if n_bytes < _LEAST_MEMORY:
        raise ConfigError(
            f"--memory {text} is {format_bytes(n_bytes)}, which is no device's: write it with a "
            "unit, such as 12GB"
        )
    return n_bytes


def parse_bandwidth(text: str) -> float:
    """Read a bandwidth such as `1gbit`, `1Gbps`, `1.25e9`, `1.25GB/s`; returns bytes/s.

    Raises:
        ConfigError: not a bandwidth, above 1e18 bytes/s, of bits or bytes, as `1Gb/s`, or of a
            unit that was forgotten, as `10`.
    """
    example = "1gbit, 1.25GB/s or 1.25e9 (bytes/s)"
    number, unit = _split(text, "bandwidth", example)
    if not unit and 0 < number < _LEAST_BARE_BANDWIDTH:
        raise ConfigError(
            f"bandwidth {text!r} would be {format_number(number)} bytes/s: write its unit, such as "
            f"{text.strip()}gbit or {text.strip()}GB/s"
        )
    name = unit.removesuffix("/s").removesuffix("ps")
    is_bits = name.lower().endswith("bit") or unit.endswith("bps")
    if name.endswith("b") and not is_bits:
        raise ConfigError(
            f"bandwidth {text!r} is of bits or of bytes: write it like {example}, with B for bytes"
        )
    prefix = name.lower().removesuffix("bit").removesuffix("b")
    value = number * _scale(prefix, text, "bandwidth", example) / (8 if is_bits else 1)
    return _check(value, _MOST_BYTES_PER_S, text, "bandwidth", "1e18 bytes/s")


def parse_duration(text: str) -> float:
    """Read a duration such as `500us`, `2ms`, `30s`, `5min`; returns seconds.

    Raises:
        ConfigError: not a duration, or above 1e10 s.
    """
    number, unit = _split(text, "duration", "500us or 30s")
    if unit.lower() not in _SECONDS:
        raise ConfigError(f"duration {text!r} has an unknown unit: write it like 500us or 30s")
    return _check(number * _SECONDS[unit.lower()], MOST_S, text, "duration", "1e10 s")


def _pick(value: float, scales: list[tuple[float, str]]) -> str:
    scale, unit = next((one for one in scales if abs(value) >= one[0]), scales[-1])
    return f"{format_number(value / scale, 3)} {unit}"


def format_number(value: float, digits: int = 4) -> str:
    """Print a number with so many significant digits, and a large one with all of its integer part:
    `48.13`, `25312`."""
    is_large = abs(value) >= 10**digits - 0.5  # which `g` would write as 1e+04
    return f"{value:.0f}" if is_large else f"{value:.{digits}g}"


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
    if abs(seconds) < 1e-15:
        return "0 ns"
    if abs(seconds) >= 120:
        return f"{seconds / 60:.1f} min"
    return _pick(seconds, [(1, "s"), (1e-3, "ms"), (1e-6, "us"), (1e-9, "ns")])


def format_count(n: int, noun: str) -> str:
    """Print a number of things: `1 stage`, `3 microbatches`."""
    plural = "" if n == 1 else "es" if noun.endswith("ch") else "s"
    return f"{n} {noun}{plural}"
