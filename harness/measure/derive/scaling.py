"""Strong and weak scaling efficiency, from work and time at several numbers of devices.

Both are the rate per device over that of the smallest run; they differ in what is held equal:
strong scaling the work in all, t(1) / (n t(n)); weak scaling the work per device, t(1) / t(n).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Scaling = Literal["strong", "weak"]

TOLERANCE = 0.01
"""Work counts as equal within this: an epoch's last batch is cut, a product's size is whole."""


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """One measurement: how long a number of devices took for an amount of work.

    Attributes:
        series: what may be compared; points of different series never meet.
        work: samples or FLOPs, in all.
        low_s, high_s: interval of `time_s`.
        is_baseline: one device, whatever joins the devices of others: the start of every series of
            its `family`.
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


def _held(point: ScalingPoint, scaling: Scaling) -> float:
    return point.work if scaling == "strong" else point.work / point.n_devices


def _equal_work(points: Iterable[ScalingPoint], scaling: Scaling) -> list[list[ScalingPoint]]:
    """Points whose held work agrees within TOLERANCE of the smallest of their group."""
    groups: list[list[ScalingPoint]] = []
    for point in sorted(points, key=lambda point: _held(point, scaling)):
        if groups and _held(point, scaling) <= (1 + TOLERANCE) * _held(groups[-1][0], scaling):
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _efficiency(scaling: Scaling, point: ScalingPoint, base: ScalingPoint) -> EfficiencyRow:
    if point is base:  # 100 % by definition: its own spread is in the others' intervals
        return EfficiencyRow(
            scaling=scaling, point=point, baseline=base, efficiency=1.0, low=1.0, high=1.0
        )
    work = (point.work / point.n_devices) / (base.work / base.n_devices)
    return EfficiencyRow(
        scaling=scaling,
        point=point,
        baseline=base,
        efficiency=work * base.time_s / point.time_s,
        low=work * base.low_s / point.high_s,
        high=work * base.high_s / point.low_s,
    )


def _series_rows(
    members: list[ScalingPoint], singles: list[ScalingPoint], scaling: Scaling
) -> list[EfficiencyRow]:
    """One series against its run on the fewest devices, or a baseline on still fewer."""
    fewest = min(member.n_devices for member in members)
    together = [*(single for single in singles if single.n_devices < fewest), *members]
    smallest = min(member.n_devices for member in together)
    base = min(
        (member for member in together if member.n_devices == smallest),
        key=lambda member: member.time_s,
    )
    larger = [member for member in together if member.n_devices > smallest]
    return [_efficiency(scaling, member, base) for member in (base, *larger)] if larger else []


def scaling_table(points: Iterable[ScalingPoint], scaling: Scaling) -> list[EfficiencyRow]:
    """Efficiency of every series that was measured at two numbers of devices or more.

    Of several points of one series on the fewest devices the fastest is the baseline.
    """
    families: dict[str, list[ScalingPoint]] = defaultdict(list)
    for point in points:
        families[point.family].append(point)
    rows: list[EfficiencyRow] = []
    for _, family in sorted(families.items()):
        for like in _equal_work(family, scaling):
            singles = [point for point in like if point.is_baseline]
            series: dict[str, list[ScalingPoint]] = defaultdict(list)
            for point in like:
                if not point.is_baseline:
                    series[point.series].append(point)
            for _, members in sorted(series.items()):
                rows += _series_rows(members, singles, scaling)
    return rows
