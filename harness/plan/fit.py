"""Operator times between measured shapes: exact where measured, else fitted, with the error kept.

For one operator on one kind of device, seconds = fixed + slope x elements of the shard's output,
both >= 0, least squares of relative errors. One measurement alone is scaled in proportion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from harness.domain.graph import Operator
from harness.domain.profile import Measurement, Profile
from harness.domain.sharding import PARTIAL_DIMS
from harness.errors import PlanError

_LEAST_S = 1e-9  # clocks resolve no less; keeps zero times from weighing without bound


@dataclass(frozen=True)
class OperatorTime:
    """Seconds of one operator at one shape; `fitted` says that it was not measured there."""

    forward_s: float
    backward_s: float
    fitted: bool

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Line:
    """seconds = fixed_s + slope_s x n_elements; the error is the largest, None from one point."""

    fixed_s: float
    slope_s: float
    relative_error: float | None

    def at(self, n_elements: float) -> float:
        return self.fixed_s + self.slope_s * n_elements


def fit_line(n_elements: list[float], seconds: list[float]) -> Line:
    """Fit non-negative fixed cost and slope; needs at least one point."""
    if len(seconds) == 1:
        return Line(0.0, seconds[0] / n_elements[0], None)
    # In relative terms the model is 1 = fixed u + slope v, so that small shapes count as large.
    points = [
        (1.0 / max(y, _LEAST_S), x / max(y, _LEAST_S), y / max(y, _LEAST_S))
        for x, y in zip(n_elements, seconds, strict=True)
    ]
    suu = math.fsum(u * u for u, _, _ in points)
    svv = math.fsum(v * v for _, v, _ in points)
    suv = math.fsum(u * v for u, v, _ in points)
    suw = math.fsum(u * w for u, _, w in points)
    svw = math.fsum(v * w for _, v, w in points)
    candidates = [(0.0, svw / svv), (suw / suu, 0.0)]
    determinant = suu * svv - suv * suv
    if determinant > 1e-12 * suu * svv:
        both = ((suw * svv - svw * suv) / determinant, (svw * suu - suw * suv) / determinant)
        if min(both) >= 0:
            candidates.append(both)

    def squares(line: tuple[float, float]) -> float:
        return math.fsum((line[0] * u + line[1] * v - w) ** 2 for u, v, w in points)

    fixed_s, slope_s = min(candidates, key=squares)
    error = max(abs(fixed_s * u + slope_s * v - w) for u, v, w in points)
    return Line(fixed_s, slope_s, error)


class _Curve:
    """All that is known of one operator on one device kind and dtype; fitted when first needed."""

    def __init__(self, points: list[Measurement]) -> None:
        # Parts that hold a partial sum of the whole output lie on another line.
        shown = [point for point in points if not set(PARTIAL_DIMS) & set(point.shape)]
        self._points = shown or points
        self.exact = {tuple(point.shape.items()): point for point in points}

    @cached_property
    def _n_elements(self) -> list[float]:
        return [float(math.prod(point.shape.values())) for point in self._points]

    @cached_property
    def forward(self) -> Line:
        return fit_line(self._n_elements, [point.forward_s for point in self._points])

    @cached_property
    def backward(self) -> Line:
        return fit_line(self._n_elements, [point.backward_s for point in self._points])


class OperatorTimes:
    """Looks up and fits; built once per profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        groups: dict[tuple[str, str, str], list[Measurement]] = {}
        for point in profile.measurements:
            groups.setdefault((point.device_kind, point.operator, point.dtype), []).append(point)
        self._curves = {key: _Curve(points) for key, points in groups.items()}

    def lookup(
        self,
        operator: Operator,
        device_kind: str,
        *,
        shape: dict[str, int] | None = None,
        dtype: str | None = None,
    ) -> OperatorTime:
        """Seconds of one shard of an operator.

        Args:
            shape: of the shard's output; the operator's whole output when None.
            dtype: that was profiled; the operator's own when None.

        Raises:
            PlanError: the profile does not know the operator on that kind of device.
        """
        if operator.kind == "input":
            return OperatorTime(0.0, 0.0, fitted=False)
        shape = operator.shape if shape is None else shape
        dtype = operator.dtype if dtype is None else dtype
        curve = self._curves.get((device_kind, operator.profile_key, dtype))
        if curve is None:
            raise PlanError(self._unknown(operator, device_kind, dtype))
        point = curve.exact.get(tuple(shape.items()))
        if point is not None:
            return OperatorTime(point.forward_s, point.backward_s, fitted=False)
        n = float(math.prod(shape.values()))
        whole = curve.exact.get(())
        if whole is not None:  # measured for the whole minibatch, of unknown shape
            n /= operator.n_elements
        return OperatorTime(curve.forward.at(n), curve.backward.at(n), fitted=True)

    def is_measured(
        self, operator: Operator, device_kind: str, shape: dict[str, int], dtype: str | None = None
    ) -> bool:
        """Whether `lookup` would return a measurement rather than a fit."""
        key = (device_kind, operator.profile_key, operator.dtype if dtype is None else dtype)
        curve = self._curves.get(key)
        return curve is not None and tuple(shape.items()) in curve.exact

    def relative_error(self, operator: Operator, device_kind: str, dtype: str) -> float | None:
        """Largest relative error of the operator's fits; None when there is nothing to compare."""
        curve = self._curves.get((device_kind, operator.profile_key, dtype))
        if curve is None or curve.forward.relative_error is None:
            return None
        return max(curve.forward.relative_error, curve.backward.relative_error or 0.0)

    def _unknown(self, operator: Operator, device_kind: str, dtype: str) -> str:
        kinds = self._profile.device_kinds
        if device_kind not in kinds:
            return (
                f"the profile of {self._profile.model!r} has no device kind {device_kind!r}, only "
                f"{', '.join(map(repr, kinds))}: profile on that device, or write the cluster's "
                "kind and speed relative to a profiled one"
            )
        return (
            f"the profile of {self._profile.model!r} does not know operator {operator.name!r} "
            f"({operator.profile_key}, {dtype}) on {device_kind!r}: profile the model again"
        )
