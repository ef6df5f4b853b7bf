"""Strong and weak scaling efficiency, from work and time at several numbers of devices.

Both are the rate per device over that of the smallest run; they differ in what is held equal:
strong scaling the work in all, t(1) / (n t(n)); weak scaling the work per device, t(1) / t(n).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Scaling = Literal["strong", "weak"]


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """One measurement: how long a number of devices took for an amount of work.

    Attributes:
        series: what may be compared; points of different series never meet.
        work: samples or FLOPs, in all.
        low_s, high_s: interval of `time_s`.
        is_baseline: one device without any parallelisation: the start of every series of its
            `family`.
        family: series that share a baseline.
    """

    family: str
    series: str
    n_devices: int
    work: float
    time_s: float
    low_s: float
    high_s: float
    is_baseline: bool = False


@dataclass(frozen=True, kw_only=True)
class EfficiencyRow:
    """Efficiency of one point; `low` and `high` from the far ends of both intervals."""

    scaling: Scaling
    point: ScalingPoint
    baseline: ScalingPoint
    efficiency: float
    low: float
    high: float

    @property
    def speedup(self) -> float:
        """Rate over the baseline's rate."""
        return (self.point.work / self.point.time_s) / (self.baseline.work / self.baseline.time_s)


def _held_equal(point: ScalingPoint, scaling: Scaling) -> float:
    held = point.work if scaling == "strong" else point.work / point.n_devices
    return round(math.log(held), 3)  # 0.1 %: the last batch of an epoch may be cut


def _efficiency(scaling: Scaling, point: ScalingPoint, base: ScalingPoint) -> EfficiencyRow:
    work = (point.work / point.n_devices) / (base.work / base.n_devices)
    return EfficiencyRow(
        scaling=scaling,
        point=point,
        baseline=base,
        efficiency=work * base.time_s / point.time_s,
        low=work * base.low_s / point.high_s,
        high=work * base.high_s / point.low_s,
    )


def scaling_table(points: Iterable[ScalingPoint], scaling: Scaling) -> list[EfficiencyRow]:
    """Efficiency of every series that was measured at two numbers of devices or more.

    Several points of one series at one number of devices keep the fastest as the baseline.
    """
    points = list(points)
    groups: dict[tuple[str, str, float], list[ScalingPoint]] = defaultdict(list)
    for point in points:
        if not point.is_baseline:
            groups[point.family, point.series, _held_equal(point, scaling)].append(point)
    rows: list[EfficiencyRow] = []
    for (family, _, held), members in sorted(groups.items()):
        fewest = min(member.n_devices for member in members)
        singles = [
            point
            for point in points
            if point.is_baseline
            and point.family == family
            and _held_equal(point, scaling) == held
            and point.n_devices < fewest
        ]
        together = [*singles, *members]
        smallest = min(member.n_devices for member in together)
        base = min(
            (member for member in together if member.n_devices == smallest),
            key=lambda member: member.time_s,
        )
        if any(member.n_devices > smallest for member in together):
            shown = [base, *(m for m in together if m is not base and m.n_devices > smallest)]
            rows.extend(_efficiency(scaling, member, base) for member in shown)
    return rows
