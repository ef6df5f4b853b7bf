"""Strong and weak scaling efficiency, from work and time at several numbers of devices.

Both are the rate per device over that of the smallest run. Strong scaling keeps the total work
constant, t(1) / (n t(n)); weak scaling keeps the work per device constant, t(1) / t(n).
"""

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from harness.measure.statistics import Summary

Scaling = Literal["strong", "weak"]

TOLERANCE = 0.01
"""Tolerance of equal work, because last batches are cut and matrix sizes are integers."""


@dataclass(frozen=True, kw_only=True)
class ScalingPoint:
    """One measurement: the time of a number of devices for an amount of work.

    Attributes:
        series: name of the comparison; only points of one series are compared.
        strategy: of all points of the series.
        work: total, in `unit`.
        time: seconds.
        is_baseline: one device, which is the first point of every series of its `family`.
        family: name shared by series with the same baseline.
    """

    family: str
    series: str
    strategy: str
    n_devices: int
    work: float
    time: Summary
    unit: Literal["samples", "FLOPs"] = "samples"
    is_baseline: bool = False


@dataclass(frozen=True, kw_only=True)
class EfficiencyRow:
    """Efficiency of one point; `low` and `high` combine the ends of both intervals."""

    scaling: Scaling
    point: ScalingPoint
    baseline: ScalingPoint

    @property
    def efficiency(self) -> float:
        return self._ratio(self.baseline.time.median, self.point.time.median)

    @property
    def low(self) -> float:
        return self._ratio(self.baseline.time.low, self.point.time.high)

    @property
    def high(self) -> float:
        return self._ratio(self.baseline.time.high, self.point.time.low)

    @property
    def speedup(self) -> float:
        """Rate over the baseline's rate."""
        point, base = self.point, self.baseline
        return (point.work / point.time.median) / (base.work / base.time.median)

    @property
    def problem(self) -> float:
        """The work that is equal along the line of a series: of all devices, or of one."""
        return _work(self.baseline, self.scaling)

    def _ratio(self, base_s: float, point_s: float) -> float:
        """Rate per device over the baseline's."""
        if self.point is self.baseline:  # 100 % by definition; its spread is in the other intervals
            return 1.0
        point, base = self.point, self.baseline
        return (point.work / point.n_devices) / (base.work / base.n_devices) * base_s / point_s


def _work(point: ScalingPoint, scaling: Scaling) -> float:
    return point.work if scaling == "strong" else point.work / point.n_devices


def _equal_work(points: Iterable[ScalingPoint], scaling: Scaling) -> list[list[ScalingPoint]]:
    """Groups of points whose constant work is within TOLERANCE of the group's smallest."""
    groups: list[list[ScalingPoint]] = []
    for point in sorted(points, key=lambda point: _work(point, scaling)):
        if groups and _work(point, scaling) <= (1 + TOLERANCE) * _work(groups[-1][0], scaling):
            groups[-1].append(point)
        else:
            groups.append([point])
    return groups


def _series_rows(
    members: list[ScalingPoint], singles: list[ScalingPoint], scaling: Scaling
) -> list[EfficiencyRow]:
    """Compare a series with its point on the fewest devices, or a baseline on still fewer."""
    fewest = min(member.n_devices for member in members)
    together = [*(single for single in singles if single.n_devices < fewest), *members]
    smallest = min(member.n_devices for member in together)
    base = min(
        (member for member in together if member.n_devices == smallest),
        key=lambda member: member.time.median,
    )
    larger = [member for member in together if member.n_devices > smallest]
    if not larger:
        return []
    return [EfficiencyRow(scaling=scaling, point=one, baseline=base) for one in (base, *larger)]


def scaling_table(points: Iterable[ScalingPoint], scaling: Scaling) -> list[EfficiencyRow]:
    """Efficiency of every series with two or more numbers of devices.

    If a series has several points on the fewest devices, the fastest is the baseline.
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
