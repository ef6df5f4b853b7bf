"""The profile workload: time each operator of a model on each kind of device.

Ranks with the same kind of device divide the operators among themselves.
"""

from __future__ import annotations

import logging
import platform
from datetime import UTC, datetime
from itertools import chain
from pathlib import Path
from typing import Any

import msgspec
import torch

from harness.domain.profile import DTYPE_NAMES, Measurement, MeasurementKey, Profile, graph_beside
from harness.errors import first_line
from harness.measure.places import check_place
from harness.measure.store import write_atomically
from harness.runtime.capture.capture import Captured, capture
from harness.runtime.devices.memory import is_out_of_memory, move_model, record_peaks, reset_peak
from harness.runtime.devices.precision import set_tensor_cores
from harness.runtime.faithfulness.held import hold_once
from harness.runtime.models import build_task
from harness.runtime.models.shared_build import build_on_host
from harness.runtime.models.task import Task
from harness.runtime.models.user_code import code_digest
from harness.runtime.ranks.gather import (
    broadcast_result,
    gather_numbers,
    gather_values,
    run_on_rank_0,
    wait_for_all,
)
from harness.runtime.ranks.world import Context
from harness.workloads.common.contract import Workload
from harness.workloads.planning.config import Point, ProfileConfig, points_of, profile_cases
from harness.workloads.planning.inputs import check_profile
from harness.workloads.profile.measure import PointMeasurer
from harness.workloads.profile.step import (
    StepSampler,
    TimedParameters,
    gather_steps,
    optimizer_s_per_byte,
)
from harness.workloads.profile.store import (
    fit_errors,
    missing_points,
    read_profile,
    with_measurements,
    with_optimizer,
    with_whole_steps,
)
from harness.workloads.profile.table import profile_text

# Minimum number of samples of the whole step on each rank.
_N_STEPS = 16

_log = logging.getLogger(__name__)


class _Profiler:
    """Profiles a model on this rank; all ranks call the same methods."""

    def __init__(self, config: ProfileConfig, context: Context) -> None:
        self._config = config
        self._context = context
        self._dtype = DTYPE_NAMES[config.dtype]
        self._path = config.path(context.run_dir.parent)
        world = context.world
        self._kind = world.device_kind
        self._kinds = gather_values(self._kind, str, world)
        # Ranks with this kind of device, which divide the points among themselves.
        self._alike = [rank for rank, kind in enumerate(self._kinds) if kind == self._kind]
        _log.info("capturing %s as a graph, and comparing the graph with the model", config.model)
        self._task, self._captured = task, captured = _prepare(config, context)
        results = context.run_dir.parent
        run_on_rank_0(lambda: _hold(captured, task, config, results), world)
        self.graph = captured.graph
        self.profile = broadcast_result(
            lambda: read_profile(self._path, config.model, self._dtype), Profile, world
        )
        self._new: dict[MeasurementKey, Measurement] = {}
        counts = config.counts(world.size)
        self._points = points_of(self.graph, counts, counts)

    def run(self) -> dict[str, Any]:
        """Measure missing points, and write the file after each batch size of each round.

        Whole steps are timed in between even if the file holds them, because calibration scales
        the file's operators to the current speed of the devices.
        """
        steps = self._step_sampler()
        sizes = dict.fromkeys(point.samples for point in self._points)
        by_size = [[p for p in self._points if p.samples == size] for size in sizes]
        batches = [self._assigned(points) for points in by_size]
        _log.info("timing %d operators and parts of them", sum(map(len, batches)))
        measurer = PointMeasurer(
            self._task,
            self._captured,
            self._config.dtype,
            self._context,
            self._config.budget(self._context.world.device.type),
            between=steps.take_when_due if steps is not None else lambda: None,
            n_points=self._config.rounds * sum(map(len, batches)),
        )
        for _ in range(self._config.rounds):
            for batch in batches:
                self._gather(measurer.measure(batch))
                self._write()
        while steps is not None and steps.n_taken < _N_STEPS:
            steps.take()
        self._compare(steps)
        self._time_optimizer()
        self._write()
        return {
            "profile": str(self._path),
            "graph": str(graph_beside(self._path)),
            "n_measured": len(self._new),
            "n_known": len(self.profile.measurements) - len(self._new),
            "code_digest": code_digest(self._config.model),
        }

    def _time_optimizer(self) -> None:
        """Time an optimizer step on every device if the file lacks it for any kind."""
        kinds, options = self._kinds, self._config.optimizer_options()
        if all(self.profile.optimizer_s_per_byte(kind, options.variant) for kind in kinds):
            return
        world, recorder = self._context.world, self._context.recorder
        self._context.progress.update("optimizer", 0, 1, self._config.optimizer)
        timed = TimedParameters.of(self.graph, world.size)
        rate = optimizer_s_per_byte(timed, options, world.device)
        recorder.sample("optimizer_s_per_byte", rate)
        wait_for_all(world)
        rates = gather_numbers(rate, world)
        self.profile = with_optimizer(self.profile, options.variant, kinds, rates)

    def _assigned(self, points: list[Point]) -> list[Point]:
        """Select this rank's share of the missing points."""
        missing = missing_points(
            self.profile, self._kind, self._dtype, points, self._config.min_samples
        )
        return missing[self._alike.index(self._context.world.rank) :: len(self._alike)]

    def _gather(self, found: list[Measurement]) -> None:
        """Gather all ranks' measurements into the profile."""
        world = self._context.world
        wait_for_all(world)  # because kinds of device take very different times
        new = list(chain.from_iterable(gather_values(found, list[Measurement], world)))
        self._new |= {point.key: point for point in new}
        self.profile = with_measurements(self.profile, new)

    def _write(self) -> None:
        if self._context.world.is_first:
            profile = _with_provenance(self.profile, self._context.world.hostnames)
            write_atomically(self._path, profile.to_json())
            write_atomically(graph_beside(self._path), self.graph.to_json())

    def _step_sampler(self) -> StepSampler | None:
        """Make and warm up the sampler of whole steps; None if they need too much memory."""
        self._context.progress.update("whole step", 0, 1, self._config.model)
        task, config = self._task, self._config
        device, recorder = self._context.world.device, self._context.recorder
        if _is_on_host(task) and device.type != "cpu":
            reason = "the model does not fit on the device"
            recorder.sample("model_step_skipped", 1, reason=reason)
            return None
        try:
            sampler = StepSampler(
                task, config.batch_size, config.dtype, device, recorder, is_compiled=config.compile
            )
            for _ in range(config.warm_up):
                sampler.take()
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            task.model.zero_grad(set_to_none=True)
            recorder.sample("model_step_skipped", 1, reason=first_line(error))
            return None
        sampler.restart()
        return sampler

    def _compare(self, steps: StepSampler | None) -> None:
        """Store whole steps with the sums over operators, by kind of device and batch size."""
        world = self._context.world
        wait_for_all(world)
        measured = {} if steps is None else steps.seconds
        seconds = gather_steps(measured, self._kinds, world)
        types = gather_values(world.device.type, str, world)
        queued = {kind for kind, of in zip(self._kinds, types, strict=True) if of != "cpu"}
        self.profile = with_whole_steps(self.profile, self.graph, self._dtype, seconds, queued)
        self._write()
        if world.is_first:
            self._record_comparison()

    def _record_comparison(self) -> None:
        recorder, graph_hash = self._context.recorder, self.graph.content_hash()
        for step in self.profile.whole_steps:
            if step.graph_hash == graph_hash and step.dtype == self._dtype:
                labels: dict[str, Any] = {"device_kind": step.device_kind, "batch": step.batch}
                recorder.sample("profile_calibration", step.calibration, **labels)
        for kind in dict.fromkeys(self._kinds):
            errors = fit_errors(self.profile, self.graph, kind, self._dtype)
            for key, error in errors.items():
                recorder.sample("profile_fit_error", error, device_kind=kind, signature=key)


def _with_provenance(profile: Profile, hostnames: list[str]) -> Profile:
    """Add hosts, date and versions of the newest measurements."""
    provenance = {
        "source": "measured",
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "hosts": " ".join(dict.fromkeys(hostnames)),
        "date_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return msgspec.structs.replace(profile, provenance=provenance)


def _prepare(config: ProfileConfig, context: Context) -> tuple[Task, Captured]:
    """Build the model on this rank's device, or on the host if it does not fit there, and capture
    its graph."""
    set_tensor_cores(config.dtype, context.world.device)
    task = build_on_host(lambda: build_task(config.model, config.model_options()), context.world)
    place = context.world.device
    try:
        # Before capture, which fixes the devices of new tensors.
        move_model(task.model, place, is_channels_last=config.channels_last)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        place = torch.device("cpu")
        move_model(task.model, place, is_channels_last=config.channels_last)
    captured = capture(task, config.batch_size, config.model)
    captured.module.to(place)  # moves constants, too
    return task, captured


def _hold(captured: Captured, task: Task, config: ProfileConfig, results: Path) -> None:
    """Compare the graph with the model, on the host if its gradients do not fit on the device."""
    try:
        hold_once(captured, task, config.model, config.dtype, results)
    except Exception as error:
        if not is_out_of_memory(error) or _is_on_host(task):
            raise
        for model in (task.model, captured.module):
            model.zero_grad(set_to_none=True)
            model.to("cpu")
        hold_once(captured, task, config.model, config.dtype, results)


def _is_on_host(task: Task) -> bool:
    return next(task.model.parameters()).device.type == "cpu"


def run_profile(config: ProfileConfig, context: Context) -> dict[str, Any]:
    """Measure every operator that the profile file lacks; rank 0 writes file and graph.

    Raises:
        VerificationError: an operator's result is not finite.
        ModelError: the captured graph trains differently from the model.
        ConfigError: the file is of another model or dtype.
    """
    reset_peak(context.world.device)
    try:
        return _Profiler(config, context).run()
    finally:
        record_peaks(context.world.device, context.recorder)


def _check(config: ProfileConfig, results: Path) -> None:
    check_place("--profile-file", config.profile_file)
    check_profile(config, results)


WORKLOAD = Workload(
    config=ProfileConfig, cases=profile_cases, body=run_profile, table=profile_text, check=_check
)
