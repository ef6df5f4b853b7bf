"""Output of planner benchmarks for ratios that have no interval of a median."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Sequence

from comparison import machine

from harness.runtime.ranks.host import code_commit


def compare_extremes(name: str, ratios: Sequence[float], **more: object) -> dict[str, object]:
    """Median, minimum and maximum of ratios of different cases, or of too few for an interval.

    Args:
        more: further fields of the object.
    """
    return {
        "name": name,
        "ratio": statistics.median(ratios),
        "low": min(ratios),
        "high": max(ratios),
        "interval": "least and most",
        "n_pairs": len(ratios),
        **more,
        "command": shlex.join(sys.argv),
        "machine": machine(),
        "commit": code_commit(),
    }
