"""The profile file: read what is there, add what is new, compare with the whole step."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import msgspec

from harness.domain.graph import Graph
from harness.domain.profile import Measurement, Profile, WholeStep, measurement_key
from harness.domain.sharding import has_tasks
from harness.errors import ConfigError, PlanError
from harness.measure.store import write_atomically
from harness.plan.fit import OperatorTimes
from harness.workloads.profile_points import Point


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


def missing_points(profile: Profile, kind: str, dtype: str, points: Sequence[Point]) -> list[Point]:
    """Points without a measurement on a kind of device."""
    known = {point.key for point in profile.measurements}
    return [p for p in points if measurement_key(kind, p.key, p.shape, dtype) not in known]


def with_measurements(profile: Profile, new: Sequence[Measurement]) -> Profile:
    """Add measurements; an older one of the same thing gives way."""
    found = {point.key: point for point in [*profile.measurements, *new]}
    return msgspec.structs.replace(profile, measurements=list(found.values()))


def operators_s(profile: Profile, graph: Graph, kind: str, dtype: str) -> float | None:
    """Forward plus backward of all operators at the graph's batch; None when one is missing."""
    times = OperatorTimes(profile)
    try:
        return sum(
            times.lookup(operator, kind, dtype=dtype).total_s
            for operator in filter(has_tasks, graph.operators)
        )
    except PlanError:
        return None


def fit_errors(profile: Profile, graph: Graph, kind: str, dtype: str) -> dict[str, float]:
    """Largest relative error of each operator's fitted line, by signature."""
    times = OperatorTimes(profile)
    errors = {
        operator.profile_key: times.relative_error(operator, kind, dtype)
        for operator in filter(has_tasks, graph.operators)
    }
    return {key: error for key, error in errors.items() if error is not None}


def with_whole_steps(
    profile: Profile, graph: Graph, dtype: str, seconds: dict[str, list[float]]
) -> Profile:
    """Add the median of each kind's steps, beside the sum over operators as it is now.

    Where the step is known, it becomes the latest.
    """
    steps = {(s.device_kind, s.graph_hash, s.dtype): s for s in profile.whole_steps}
    for kind, values in seconds.items():
        total_s = operators_s(profile, graph, kind, dtype)
        own = graph.content_hash()
        known = steps.get((kind, own, dtype))
        if values and known is not None:
            latest_s = statistics.median(values)
            steps[kind, own, dtype] = msgspec.structs.replace(known, latest_s=latest_s)
        elif values and total_s is not None:
            steps[kind, own, dtype] = WholeStep(
                device_kind=kind,
                batch=graph.batch or 1,
                dtype=dtype,
                step_s=statistics.median(values),
                operators_s=total_s,
                graph_hash=own,
            )
    return msgspec.structs.replace(profile, whole_steps=list(steps.values()))


def at_known_pace(
    profile: Profile, graph: Graph, new: Sequence[Measurement], seconds: dict[str, list[float]]
) -> list[Measurement]:
    """New measurements as they would have been when the profile's first ones were taken.

    Args:
        seconds: of the whole step by kind of device, taken in between the new measurements.
    """
    own = graph.content_hash()
    paces = {
        step.device_kind: statistics.median(seconds[step.device_kind]) / step.step_s
        for step in profile.whole_steps
        if step.graph_hash == own and seconds.get(step.device_kind)
    }
    return [_slower(point, 1 / paces.get(point.device_kind, 1.0)) for point in new]


def _slower(point: Measurement, factor: float) -> Measurement:
    in_place_s = point.in_place_backward_s
    return msgspec.structs.replace(
        point,
        forward_s=factor * point.forward_s,
        backward_s=factor * point.backward_s,
        in_place_backward_s=None if in_place_s is None else factor * in_place_s,
    )


def write_profile(path: Path, profile: Profile) -> None:
    """Write crash-safely; rank 0 only."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, profile.to_json())
