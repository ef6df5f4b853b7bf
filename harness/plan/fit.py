"""Operator times between measured shapes: exact where measured, else fitted, with the error kept.

For one operator on one kind of device, seconds = fixed + slope x elements of the shard's output,
both >= 0, least squares of relative errors. One measurement alone is scaled in proportion.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from harness.domain.graph import Operator
from harness.domain.profile import Measurement, Profile
from harness.errors import PlanError


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
    x, y = np.asarray(n_elements, dtype=float), np.asarray(seconds, dtype=float)
    weight = 1.0 / np.maximum(y, 1e-9)
    scale = x.max()
    solution, _ = nnls(np.stack([weight, weight * x / scale], axis=1), weight * y)
    fixed_s, slope_s = float(solution[0]), float(solution[1] / scale)
    error = float(np.max(np.abs(fixed_s + slope_s * x - y) * weight))
    return Line(fixed_s, slope_s, error)


@dataclass(frozen=True)
class _Curve:
    """All that is known of one operator on one device kind and dtype."""

    exact: dict[tuple[tuple[str, int], ...], Measurement]
    forward: Line
    backward: Line


class OperatorTimes:
    """Looks up and fits; built once per profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        groups: dict[tuple[str, str, str], list[Measurement]] = {}
        for point in profile.measurements:
            groups.setdefault((point.device_kind, point.operator, point.dtype), []).append(point)
        self._curves = {key: _fit_curve(points) for key, points in groups.items()}

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


def _fit_curve(points: list[Measurement]) -> _Curve:
    n = [float(math.prod(point.shape.values())) for point in points]
    return _Curve(
        exact={tuple(point.shape.items()): point for point in points},
        forward=fit_line(n, [point.forward_s for point in points]),
        backward=fit_line(n, [point.backward_s for point in points]),
    )
