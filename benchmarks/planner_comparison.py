"""What the planner's programs print of ratios that no interval of a median suits."""

from __future__ import annotations

import shlex
import statistics
import sys
from collections.abc import Sequence

from comparison import machine

from harness.runtime.ranks.host import code_commit


def compare_extremes(name: str, ratios: Sequence[float], **more: object) -> dict[str, object]:
    """Median of ratios of unlike cases, or of too few for an interval of 99 %, and their ends.

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
