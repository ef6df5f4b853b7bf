"""The profile file: read what is there, add what is new, compare with the whole step."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.domain.graph import Graph, Operator
from harness.domain.profile import (
    BACKWARD_VARIANTS,
    Measurement,
    OptimizerTime,
    Profile,
    WholeStep,
    measurement_key,
)
from harness.domain.sharding import full_shape, has_tasks, output_sizes
from harness.errors import ConfigError, PlanError
from harness.measure.statistics import median_error
from harness.measure.store import write_atomically
from harness.plan.fit import OperatorTime, OperatorTimes
from harness.workloads.planning.profile_points import Point


def read_profile(path: Path, model: str, dtype: str) -> Profile:
    """The file's profile; an empty one when there is none.

    Raises:
        GraphError: malformed.
        ConfigError: of another model or dtype.
    """
    if not path.exists():
        return Profile(model=model, measurements=[])
    profile = Profile.load(path)
    if profile.model != model:
        raise ConfigError(
            f"{path} profiles {profile.model!r}, not {model!r}: give another --profile-file"
        )
    others = {point.dtype for point in profile.measurements} - {dtype}
    if others:
        raise ConfigError(
            f"{path} was measured in {', '.join(sorted(others))}, not {dtype}: give another "
            "--profile-file, for planning takes one dtype from a file"
        )
    return profile


def missing_points(
    profile: Profile, kind: str, dtype: str, points: Sequence[Point], min_samples: int
) -> list[Point]:
    """Points without a measurement on a kind of device, or with one of too few samples: a run that
    was killed wrote it before its last round."""
    known = {
        point.key
        for point in profile.measurements
        if point.n_samples is None or point.n_samples >= min_samples
    }
    return [p for p in points if measurement_key(kind, p.key, p.shape, dtype) not in known]


def with_measurements(profile: Profile, new: Sequence[Measurement]) -> Profile:
    """Add measurements; an older one of the same thing gives way."""
    found = {point.key: point for point in [*profile.measurements, *new]}
    return msgspec.structs.replace(profile, measurements=list(found.values()))


def _passes_s(
    profile: Profile, graph: Graph, kind: str, dtype: str, samples: int
) -> tuple[float, float] | None:
    """Forward and backward of all operators; None when one is missing."""
    times = OperatorTimes(profile)

    def time_of(operator: Operator) -> OperatorTime:
        full = full_shape(operator, batch=samples, graph_batch=graph.batch)
        shape = output_sizes(operator, full)
        return times.lookup(operator, kind, shape=shape, dtype=dtype)

    try:
        found = list(map(time_of, filter(has_tasks, graph.operators)))
    except PlanError:
        return None
    return sum(one.forward_s for one in found), sum(one.backward_s for one in found)


def _forward_share(forward_s: float, backward_s: float) -> float | None:
    """None where a pass takes no time."""
    return forward_s / (forward_s + backward_s) if min(forward_s, backward_s) > 0 else None


def fit_errors(profile: Profile, graph: Graph, kind: str, dtype: str) -> dict[str, float]:
    """Largest relative error of each operator's fitted line, by signature."""
    times = OperatorTimes(profile)
    errors = {
        operator.profile_key: times.relative_error(operator, kind, dtype)
        for operator in filter(has_tasks, graph.operators)
    }
    return {key: error for key, error in errors.items() if error is not None}


# Standard deviation of what sharing a machine mostly changes.
_SHARED = 0.1

# What whole steps took, by kind of device and samples.
StepValues = dict[tuple[str, int], list[float]]


def with_whole_steps(
    profile: Profile,
    graph: Graph,
    dtype: str,
    seconds: StepValues,
    forward_shares: StepValues,
) -> Profile:
    """Add the median of each kind's steps, beside the sum over operators as it is now.

    Where the step is known, it becomes the latest; where only that of another number of samples
    is, its drift is taken for this one's.

    Args:
        forward_shares: of what each of the steps computed.
    """
    own, known = graph.content_hash(), profile.whole_steps
    now = _at_present(profile, own, seconds)
    steps = {(s.device_kind, s.graph_hash, s.dtype, s.batch): s for s in known}
    for (kind, samples), values in seconds.items():
        if not values:
            continue
        key, latest_s = (kind, own, dtype, samples), statistics.median(values)
        forward_share = statistics.median(forward_shares[kind, samples])
        if key in steps:
            steps[key] = msgspec.structs.replace(
                steps[key], latest_s=latest_s, forward_share=forward_share
            )
            continue
        passes_s = _passes_s(profile, graph, kind, dtype, samples)
        if passes_s is None:
            continue
        is_first = not any(s.device_kind == kind and s.graph_hash == own for s in known)
        steps[key] = WholeStep(
            device_kind=kind,
            batch=samples,
            dtype=dtype,
            step_s=latest_s / now.drift(own, kind, samples),
            operators_s=sum(passes_s),
            graph_hash=own,
            forward_share=forward_share,
            operators_forward_share=_forward_share(*passes_s),
            latest_s=None if is_first else latest_s,
        )
    return msgspec.structs.replace(profile, whole_steps=list(steps.values()))


def knows_alone(profile: Profile, graph: Graph, kinds: Sequence[str], dtype: str) -> bool:
    """Whether a graph's step was timed alone on each kind of device, one of so many devices."""
    known = {
        step.device_kind
        for step in profile.whole_steps
        if (step.graph_hash, step.dtype) == (graph.content_hash(), dtype)
        if step.alone_ratio is not None and step.n_devices == len(kinds)
    }
    return known >= set(kinds)


def with_alone(
    profile: Profile, graph: Graph, dtype: str, factors: Sequence[StepValues], n_devices: int
) -> Profile:
    """Add what share of its time each step takes alone, of so many devices: the product of the
    factors' medians, each drawn to 1, which machines that share nothing have, by its noise."""
    own = graph.content_hash()

    def told(step: WholeStep) -> WholeStep:
        key = step.device_kind, step.batch
        found = [values[key] for values in factors if key in values]
        if not found or (step.graph_hash, step.dtype) != (own, dtype):
            return step
        ratio = math.prod(map(_drawn_to_one, found))
        return msgspec.structs.replace(step, alone_ratio=ratio, n_devices=n_devices)

    return msgspec.structs.replace(profile, whole_steps=list(map(told, profile.whole_steps)))


def _drawn_to_one(ratios: list[float]) -> float:
    """Their median, the less of it the larger its standard error."""
    weight = _SHARED**2 / (_SHARED**2 + median_error(ratios) ** 2)
    return 1 + weight * (statistics.median(ratios) - 1)


def _at_present(profile: Profile, graph_hash: str, seconds: StepValues) -> Profile:
    """The profile with the latest of a graph's steps that it knows."""
    steps = []
    for step in profile.whole_steps:
        values = seconds.get((step.device_kind, step.batch))
        if values and step.graph_hash == graph_hash:
            step = msgspec.structs.replace(step, latest_s=statistics.median(values))
        steps.append(step)
    return msgspec.structs.replace(profile, whole_steps=steps)


def without_drift(
    profile: Profile, graph: Graph, new: Sequence[Measurement], seconds: StepValues
) -> list[Measurement]:
    """New measurements as they would have been when the profile's first ones were taken.

    Args:
        seconds: of whole steps, taken in between the new measurements.
    """
    own, batch = graph.content_hash(), graph.batch or 1
    now = _at_present(profile, own, seconds)
    return [
        _slower(point, 1 / now.drift(own, point.device_kind, point.shape.get("sample", batch)))
        for point in new
    ]


def _slower(point: Measurement, factor: float) -> Measurement:
    fields = ("forward_s", "backward_s", *BACKWARD_VARIANTS)
    measured = {field: getattr(point, field) for field in fields}
    slower = {field: factor * s for field, s in measured.items() if s is not None}
    return msgspec.structs.replace(point, **slower)


def with_optimizer(
    profile: Profile, variant: str, kinds: Sequence[str], rates: Sequence[float]
) -> Profile:
    """Add the speed of an optimizer's step: the median over the devices of each kind.

    Args:
        kinds: of all ranks' devices.
        rates: seconds per byte of parameters, by rank.
    """
    by_kind: dict[str, list[float]] = {}
    for kind, rate in zip(kinds, rates, strict=True):
        by_kind.setdefault(kind, []).append(rate)
    new = [
        OptimizerTime(device_kind=kind, optimizer=variant, s_per_byte=statistics.median(found))
        for kind, found in by_kind.items()
    ]
    known = {(time.device_kind, time.optimizer): time for time in [*profile.optimizers, *new]}
    return msgspec.structs.replace(profile, optimizers=list(known.values()))


def write_profile(path: Path, profile: Profile) -> None:
    """Write crash-safely; rank 0 only."""
    write_atomically(path, profile.to_json())
