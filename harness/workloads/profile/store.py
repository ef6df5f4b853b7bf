"""Read the profile file, add measurements, and compare operators with whole steps."""

import statistics
from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from harness.domain.graph import Graph
from harness.domain.profile import Measurement, OptimizerTime, Profile, WholeStep, measurement_key
from harness.domain.sharding import full_shape, has_tasks, output_sizes
from harness.errors import ConfigError, PlanError
from harness.plan.fit import OperatorTimes
from harness.workloads.planning.config import Point


def read_profile(path: Path, model: str, dtype: str) -> Profile:
    """Load the profile; an empty one if there is no file.

    Raises:
        GraphError: the file is malformed.
        ConfigError: the file is of another model or dtype.
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
            "--profile-file, because a profile holds one dtype"
        )
    return profile


def missing_points(
    profile: Profile, kind: str, dtype: str, points: Sequence[Point], min_samples: int
) -> list[Point]:
    """Points without a measurement on a kind of device, or with too few samples (left by a run that
    ended before its last round)."""
    known = {
        point.key
        for point in profile.measurements
        if point.n_samples is None or point.n_samples >= min_samples
    }
    return [p for p in points if measurement_key(kind, p.key, p.shape, dtype) not in known]


def with_measurements(profile: Profile, new: Sequence[Measurement]) -> Profile:
    """Add measurements; they replace older ones of the same point."""
    found = {point.key: point for point in [*profile.measurements, *new]}
    return msgspec.structs.replace(profile, measurements=list(found.values()))


def _operators_s(
    profile: Profile, graph: Graph, kind: str, dtype: str, samples: int
) -> float | None:
    """Sum forward and backward of all operators; None if one is not known."""
    times, total_s = OperatorTimes(profile), 0.0
    for operator in filter(has_tasks, graph.operators):
        full = full_shape(operator, batch=samples, graph_batch=graph.batch)
        shape = output_sizes(operator, full)
        try:
            total_s += times.lookup(operator, kind, shape=shape, dtype=dtype).total_s
        except PlanError:
            return None
    return total_s


def fit_errors(profile: Profile, graph: Graph, kind: str, dtype: str) -> dict[str, float]:
    """Largest relative error of each operator's fitted line, by signature."""
    times = OperatorTimes(profile)
    errors = {
        operator.profile_key: times.relative_error(operator, kind, dtype)
        for operator in filter(has_tasks, graph.operators)
    }
    return {key: error for key, error in errors.items() if error is not None}


# Seconds of whole steps, by kind of device and samples.
StepValues = dict[tuple[str, int], list[float]]


def with_whole_steps(
    profile: Profile, graph: Graph, dtype: str, seconds: StepValues, queued: Collection[str] = ()
) -> Profile:
    """Set each kind's whole step to the median, with the current sum over its operators.

    Args:
        queued: kinds of devices, such as GPUs, that run later what the host queues.
    """
    graph_hash = graph.content_hash()
    steps = {(s.device_kind, s.graph_hash, s.dtype, s.batch): s for s in profile.whole_steps}
    for (kind, samples), values in seconds.items():
        operators_s = _operators_s(profile, graph, kind, dtype, samples)
        if values and operators_s:
            steps[kind, graph_hash, dtype, samples] = WholeStep(
                device_kind=kind,
                batch=samples,
                dtype=dtype,
                step_s=statistics.median(values),
                operators_s=operators_s,
                graph_hash=graph_hash,
                is_queued=kind in queued,
            )
    return msgspec.structs.replace(profile, whole_steps=list(steps.values()))


def with_optimizer(
    profile: Profile, variant: str, kinds: Sequence[str], rates: Sequence[float]
) -> Profile:
    """Add the time of an optimizer's step: the median over the devices of each kind.

    Args:
        kinds: device kind of each rank.
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
