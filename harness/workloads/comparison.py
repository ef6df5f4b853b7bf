"""The comparison that `./entry.sh` runs when no workload is named."""

from __future__ import annotations

from typing import Any


def comparison(*, has_gpu: bool) -> list[tuple[str, Any]]:
    """Workloads with their configurations, in order."""
    return []
