"""Operator times at and between measured shapes, with the relative error of fitted times.

Cuts of weights and of the batch save different work, because each device writes the gradients of
all weights that it holds for any number of samples. So for one operator on one kind of device

    seconds(shape) = seconds(elements, whole weights) x product over cut dims of the weights of
                     seconds(part of the dim, all elements) / seconds(whole)

where each factor is linear between measurements. Beyond them it follows a line fitted to all:
fixed + slope x size, both >= 0, least squares of relative errors. A single measurement is scaled
in proportion.

A median of few noisy samples is uncertain, so a measurement is shrunk towards the line by the share
noise / (noise + model), both variances: noise is that of the medians, estimated from the samples'
spread; model is the deviation of the measurements from the line beyond noise (the empirical Bayes
estimate of Fay and Herriot, 1979). Measurements with little or unknown spread stay unchanged.
"""

import math
import statistics
from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

from harness.domain.graph import Operator
from harness.domain.profile import Measurement, Profile
from harness.domain.sharding import full_shape, is_partial, weight_dims
from harness.errors import PlanError

_LEAST_S = 1e-9  # resolution of clocks; bounds the weight of zero times


class OperatorTime(NamedTuple):
    """Seconds of one operator at one shape."""

    forward_s: float
    backward_s: float

    @property
    def total_s(self) -> float:
        return self.forward_s + self.backward_s


class Line(NamedTuple):
    """seconds = fixed_s + slope_s x n_elements."""

    fixed_s: float
    slope_s: float

    def at(self, n_elements: float) -> float:
        return self.fixed_s + self.slope_s * n_elements


def fit_line(n_elements: list[float], seconds: list[float]) -> Line:
    """Fit non-negative fixed cost and slope; needs at least one point."""
    if len(seconds) == 1:
        return Line(0.0, seconds[0] / n_elements[0])
    # Relative errors: the model is 1 = fixed u + slope v, so that all sizes have equal weight.
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

    return Line(*min(candidates, key=squares))


class _Axis:
    """Seconds as a function of one size, with all other dims whole.

    Args:
        points: seconds by size.
        noise: relative standard error of a measurement.
    """

    def __init__(self, points: dict[float, float], noise: float = 0.0) -> None:
        self._sizes = sorted(points)
        self._measured = [points[size] for size in self._sizes]
        self._line = fit_line(self._sizes, self._measured)
        self._seconds = _shrunk(self._sizes, self._measured, self._line, noise)

    def at(self, size: float) -> float:
        """Seconds at a size; at a measured size the shrunk measurement."""
        sizes, seconds = self._sizes, self._seconds
        right = bisect_left(sizes, size)
        if 0 < right < len(sizes):
            share = (size - sizes[right - 1]) / (sizes[right] - sizes[right - 1])
            return seconds[right - 1] + share * (seconds[right] - seconds[right - 1])
        end = 0 if right == 0 else -1
        fitted = self._line.at(sizes[end])
        return seconds[end] * self._line.at(size) / fitted if fitted > 0 else seconds[end]

    @property
    def error(self) -> float | None:
        """Largest leave-one-out relative error at inner sizes; None from one point. A time too
        short to measure (0) does not count."""
        if len(self._sizes) < 2:
            return None
        found = [0.0]
        for k in range(1, len(self._sizes) - 1):
            others = dict(zip(self._sizes, self._measured, strict=True))
            left_out = others.pop(self._sizes[k])
            if left_out > 0:
                found.append(abs(_Axis(others).at(self._sizes[k]) - left_out) / left_out)
        return max(found)


# A line fits this many measurements exactly, so they show no noise.
_N_OF_A_LINE = 2


def _shrunk(sizes: list[float], seconds: list[float], line: Line, noise: float) -> list[float]:
    """Shrink each measurement towards the line by the share that noise explains."""
    if not noise or len(seconds) <= _N_OF_A_LINE:
        return seconds
    fitted = [line.at(size) for size in sizes]
    if min(fitted) <= 0:
        return seconds
    off = [y / f - 1 for y, f in zip(seconds, fitted, strict=True)]
    variance = math.fsum(x * x for x in off) / (len(off) - _N_OF_A_LINE)
    model = max(0.0, variance - noise * noise)
    share = model / (model + noise * noise)
    return [f * (1 + share * x) for f, x in zip(fitted, off, strict=True)]


class _Pass:
    """One pass (forward or backward) of one operator."""

    def __init__(
        self, points: list[Measurement], operator: Operator, field: Callable[..., float]
    ) -> None:
        full = full_shape(operator, batch=1, graph_batch=None)
        wholes = {dim: full[dim] for dim in weight_dims(operator) if dim in full}
        # A shape without a partial dim, as that of a whole loss, has all of it.
        self._partial = {
            dim: n for dim, n in full.items() if dim not in wholes and is_partial(operator, dim)
        }
        noise = statistics.median(point.relative_noise for point in points)
        self._wholes = wholes
        self._cuts: dict[str, _Axis] = {}
        by_volume = {self.volume(p.shape): field(p) for p in points if not self._cut_dims(p.shape)}
        if not by_volume:  # no measurement has whole weights: use elements only
            self._wholes = {}
            by_volume = {self.volume(p.shape): field(p) for p in points}
        self._volume = _Axis(by_volume, noise)
        most = max(by_volume)
        for dim, whole in self._wholes.items():
            parts = {
                float(p.shape[dim]): field(p)
                for p in points
                if self._cut_dims(p.shape) == [dim] and self.volume(p.shape) == most
            }
            self._cuts[dim] = _Axis({**parts, float(whole): by_volume[most]}, noise)
        self._most = most

    def volume(self, shape: dict[str, int]) -> float:
        """Elements over the dims that do not cut weights."""
        sizes = self._partial | shape
        return float(math.prod(n for dim, n in sizes.items() if dim not in self._wholes))

    def _cut_dims(self, shape: dict[str, int]) -> list[str]:
        return [dim for dim, n in self._wholes.items() if shape.get(dim, n) < n]

    def has_axis(self, shape: dict[str, int]) -> bool:
        """Whether a shape lies on an axis: at most one cut of the weights, then all else whole."""
        cuts = self._cut_dims(shape)
        return not cuts or (len(cuts) == 1 and self.volume(shape) == self._most)

    def at(self, shape: dict[str, int]) -> float:
        seconds = self._volume.at(self.volume(shape))
        for dim in self._cut_dims(shape):
            axis = self._cuts[dim]
            whole_s = axis.at(self._wholes[dim])
            seconds *= axis.at(shape[dim]) / whole_s if whole_s > 0 else 1.0
        return seconds

    @property
    def error(self) -> float | None:
        found = [axis.error for axis in (self._volume, *self._cuts.values())]
        return max((error for error in found if error is not None), default=None)


class _Curve:
    """Measurements of one operator on one device kind and dtype; fitted when first needed."""

    def __init__(self, points: list[Measurement]) -> None:
        self._points = points
        self._passes: tuple[_Pass, _Pass] | None = None
        self.exact = {tuple(point.shape.items()): point for point in points}
        self.is_noisy = any(point.relative_noise for point in points)

    def passes(self, operator: Operator) -> tuple[_Pass, _Pass]:
        """Forward and backward; operators of equal profile key have equal weights."""
        if self._passes is None:
            self._passes = (
                _Pass(self._points, operator, lambda point: point.forward_s),
                _Pass(self._points, operator, lambda point: point.backward_s),
            )
        return self._passes


class OperatorTimes:
    """Measured and fitted times of a profile; build it once per profile."""

    def __init__(self, profile: Profile) -> None:
        self._profile = profile
        groups: dict[tuple[str, str, str], list[Measurement]] = {}
        for point in profile.measurements:
            groups.setdefault((point.device_kind, point.operator, point.dtype), []).append(point)
        self._curves = {key: _Curve(points) for key, points in groups.items()}
        dtypes = {point.dtype for point in profile.measurements}
        self._only_dtype = dtypes.pop() if len(dtypes) == 1 else None

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
            dtype: profiled dtype; if None, the profile's only one, else the operator's.

        Raises:
            PlanError: the profile lacks the operator on that kind of device.
        """
        shape = operator.shape if shape is None else shape
        curve = self._curve(operator, device_kind, dtype)
        if curve is None:
            raise PlanError(self._unknown(operator, device_kind, self.dtype_of(operator, dtype)))
        point, whole = curve.exact.get(tuple(shape.items())), curve.exact.get(())
        if point is not None:
            # A measurement is shrunk if it is noisy.
            if not (curve.is_noisy and shape and curve.passes(operator)[0].has_axis(shape)):
                return OperatorTime(point.forward_s, point.backward_s)
        elif whole is not None:  # measured for the whole minibatch, of unknown shape
            if shape is operator.shape:
                return OperatorTime(whole.forward_s, whole.backward_s)
            full = full_shape(operator, batch=1, graph_batch=None)
            share = math.prod(shape.values()) / math.prod(full[dim] for dim in shape)
            return OperatorTime(whole.forward_s * share, whole.backward_s * share)
        forward, backward = curve.passes(operator)
        return OperatorTime(forward.at(shape), backward.at(shape))

    def dtype_of(self, operator: Operator, dtype: str | None = None) -> str:
        """The dtype of the times that `lookup` finds."""
        return dtype or self._only_dtype or operator.dtype

    def _curve(self, operator: Operator, device_kind: str, dtype: str | None) -> _Curve | None:
        key = device_kind, operator.profile_key, self.dtype_of(operator, dtype)
        return self._curves.get(key)

    def is_measured(
        self, operator: Operator, device_kind: str, shape: dict[str, int], dtype: str | None = None
    ) -> bool:
        """Whether `lookup` would return a measurement rather than a fit."""
        curve = self._curve(operator, device_kind, dtype)
        return curve is not None and tuple(shape.items()) in curve.exact

    def relative_error(
        self, operator: Operator, device_kind: str, dtype: str | None = None
    ) -> float | None:
        """Largest relative error of the operator's fits; None when it cannot be estimated."""
        curve = self._curve(operator, device_kind, dtype)
        if curve is None or () in curve.exact:
            return None
        errors = [one.error for one in curve.passes(operator)]
        return max((error for error in errors if error is not None), default=None)

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
            f"({operator.profile_key}, {dtype}) on {device_kind!r}: give the profile "
            "of the model that is planned, or profile it again"
        )
