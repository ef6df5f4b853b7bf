"""Measure points on this rank's device: run the model at each batch, time what is wanted.

A microbatch is run as a device of a pipeline runs it: in as many stages as there are devices, as
many of it in flight. Any other batch passes through the whole model, or through as much of it as
memory holds.
"""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from harness.domain.profile import Measurement
from harness.errors import HarnessError, ModelError, first_line
from harness.runtime.capture.capture import Captured
from harness.runtime.devices.memory import is_out_of_memory
from harness.runtime.devices.precision import Precision
from harness.runtime.devices.sampling import Budget, hold_gpu, shortest_sample_s
from harness.runtime.models import Task
from harness.runtime.profiling.shards import operator_shard
from harness.runtime.profiling.stretch import OperatorCall, Step, Stretch, steps_of, tensors_in
from harness.runtime.profiling.timer import OperatorSamples, OpTimer
from harness.runtime.profiling.verify import verify
from harness.runtime.ranks.context import Context
from harness.workloads.planning.profile_points import Point
from harness.workloads.profile.part import Part, is_microbatch, stage_bounds
from harness.workloads.profile.shard_call import ShardCall
from harness.workloads.profile.step import make_inputs, make_targets

_log = logging.getLogger(__name__)

# What a measurement is filed under: the dtype that training computes in.
DTYPE_NAMES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16"}

# Several slices of a scheduler: what else runs on a core takes its share of such a sample, whereas
# the median of shorter ones would never see it.
_SLICES_S = 0.02


def shape_text(shape: dict[str, int]) -> str:
    """A shape in one word, such as sample64xfeature256."""
    return "x".join(f"{dim}{size}" for dim, size in shape.items())


_Name = tuple[str, tuple[tuple[str, int], ...]]  # a point's key and shape


@dataclass
class Measured:
    """What this rank found: measurements, and points without one with their reasons."""

    measurements: list[Measurement] = field(default_factory=list)
    skipped: list[tuple[Point, str]] = field(default_factory=list)


def _shortest_s(device_type: str) -> float:
    """How long a sample must be to show the share of a core that the whole step gets."""
    return max(shortest_sample_s(device_type), _SLICES_S if device_type == "cpu" else 0.0)


class PointMeasurer:
    """Measures points of one model on this rank.

    Args:
        task: on the device.
        captured: of the same model, its module on the device.
        between: called after each pass over points of the whole batch.
    """

    def __init__(
        self,
        task: Task,
        captured: Captured,
        dtype: str,
        context: Context,
        budget: Budget,
        *,
        between: Callable[[], None] = lambda: None,
    ) -> None:
        self._task = task
        self._captured = captured
        self._dtype = dtype
        self._context = context
        self._precision = Precision(dtype, context.world.device)
        is_cpu = context.world.device.type == "cpu"
        self._timer = OpTimer(
            context.recorder.clock,
            budget,
            device=context.world.device,
            autocast=self._precision.autocast,
            hold=None if is_cpu else hold_gpu,
            shortest_s=_shortest_s(context.world.device.type),
            processor=time.process_time if is_cpu else None,
        )
        self._between = between
        self._saved_bytes: dict[_Name, int] = {}  # of the points that were verified
        self._samples: dict[_Name, OperatorSamples] = {}
        self._cannot: set[_Name] = set()
        self._sound: dict[int, bool] = {}
        self._recorded: set[_Name] = set()  # in this call of `measure`
        self._found = Measured()
        self._n_points = 0

    def measure(self, points: Sequence[Point]) -> Measured:
        """Measure all, in addition to what was measured of them before.

        A point whose operator runs out of memory is skipped with its reason, and not tried again.

        Raises:
            VerificationError: an operator's result is not finite.
            ModelError: an operator cannot run by itself.
        """
        points = [point for point in points if _name(point) not in self._cannot]
        self._found, self._n_points = Measured(), len(points)
        self._recorded = set()
        for samples in dict.fromkeys(point.samples for point in points):
            self._measure_batch(samples, [p for p in points if p.samples == samples])
        return self._found

    def _measure_batch(self, samples: int, points: list[Point]) -> None:
        device, graph = self._context.world.device, self._captured.graph
        n_devices = self._context.world.size
        is_micro = is_microbatch(graph, samples, n_devices)
        n_stages = n_devices if is_micro else 1
        targets = make_targets(self._task, samples, device)
        steps = steps_of(
            self._captured, lambda output: self._task.sum_loss(tensors_in(output)[0], targets)
        )
        inputs = self._captured.module.graph.find_nodes(op="placeholder")
        fed = dict(zip(inputs, make_inputs(self._task, samples, device), strict=True))
        whole = Part(steps, fed, 0, len(steps), n_stages, is_micro)
        try:
            for begin, end in stage_bounds(steps, graph, n_stages):
                self._measure_part(whole.cut(begin, end), points)
        except Exception as error:
            reason = self._reason(error, samples)
            left = [point for point in points if not self._is_done(point)]
            self._skip(left, f"the model cannot be fed {samples} samples: {reason}")

    def _measure_part(self, part: Part, points: list[Point]) -> None:
        """Measure the points of a part of the model; in halves where memory does not hold it."""
        names = part.names
        own = [p for p in points if p.operator in names and not self._is_done(p)]
        if not own:
            return
        reason = ""
        try:
            self._measure_stretch(part, own)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = self._reason(error, own[0].samples)
        if not reason:
            return
        if part.n_steps > 1:
            for half in part.halves():
                self._measure_part(half, own)
        else:
            self._skip([point for point in own if not self._is_done(point)], reason)

    def _measure_stretch(self, part: Part, points: list[Point]) -> None:
        with self._precision.autocast():
            stretch = part.stretch()
        self._verify(stretch, [point for point in points if _name(point) not in self._saved_bytes])
        can_run = [point for point in points if _name(point) in self._saved_bytes]
        waiting: dict[str, list[Point]] = defaultdict(list)
        for point in can_run:
            waiting[point.operator].append(point)
        while any(waiting.values()):
            self._time({name: left.pop(0) for name, left in waiting.items() if left}, stretch, part)
            if points[0].samples == self._captured.graph.batch:
                self._between()
        for point in can_run:
            self._record(point)
        self._context.flush()

    def _time(self, wanted: dict[str, Point], stretch: Stretch, part: Part) -> None:
        """Time one point of each of some operators."""
        done = len(self._found.measurements) + len(self._found.skipped)
        self._context.progress.update("operators", done, self._n_points, next(iter(wanted)))
        shards = {
            name: ShardCall(self._captured, point) for name, point in wanted.items() if point.dim
        }
        found = self._timer.measure(
            stretch,
            list(wanted),
            shards,
            n_in_flight=part.n_in_flight,
            is_added=part.is_added,
        )
        for name, point in wanted.items():
            self._keep(point, found[name])

    def _keep(self, point: Point, found: OperatorSamples) -> None:
        key = _name(point)
        before = self._samples.get(key)
        n_before = 0 if before is None else len(before.forward_s)
        self._samples[key] = found if before is None else before + found
        metrics = {
            "operator_forward_s": found.forward_s,
            "operator_backward_s": found.backward_s,
        }
        for metric, values in metrics.items():
            for step, value in enumerate(values, start=n_before):
                self._sample(metric, value, point, step=step)

    def _record(self, point: Point) -> None:
        samples = self._samples[_name(point)]
        measurement = Measurement(
            device_kind=self._context.world.device_kind,
            operator=point.key,
            shape=point.shape,
            dtype=DTYPE_NAMES[self._dtype],
            forward_s=samples.median_forward_s,
            backward_s=samples.median_backward_s,
            saved_bytes=self._saved_bytes[_name(point)],
            spread=round(samples.spread, 4),
            n_samples=len(samples.forward_s),
        )
        self._found.measurements.append(measurement)
        self._recorded.add(_name(point))

    def _is_done(self, point: Point) -> bool:
        return _name(point) in self._cannot | self._recorded

    # What can be timed

    def _verify(self, stretch: Stretch, points: list[Point]) -> None:
        """Run what is timed once, and find out what can be."""
        if not points:
            return

        def run(step: Step, call: OperatorCall) -> Any:
            for point in points:
                if point.operator == step.name:
                    self._verify_point(point, call)
            return call()

        with self._precision.autocast():
            stretch.forward(run)

    def _is_sound(self, samples: int) -> bool:
        """Whether the model's loss is finite; what it computes on the way need not be."""
        if samples not in self._sound:
            task, device = self._task, self._context.world.device
            inputs, targets = (
                make_inputs(task, samples, device),
                make_targets(task, samples, device),
            )
            with torch.no_grad(), self._precision.autocast():
                loss = task.sum_loss(tensors_in(task.model(*inputs))[0], targets)
            self._sound[samples] = bool(loss.isfinite())
        return self._sound[samples]

    def _verify_point(self, point: Point, call: OperatorCall) -> None:
        try:
            if point.dim:
                shard = operator_shard(self._captured, point.operator, point.dim, point.size, call)
                if shard is None:
                    self._skip([point], f"cannot be cut by {point.dim}")
                    return
                call = shard.call(call)
            is_sound = partial(self._is_sound, point.samples)
            what = f"operator {point.operator!r}"
            saved_bytes = verify(call, what, self._precision.autocast, is_sound)
            self._sample("operator_saved_bytes", saved_bytes, point)
            self._saved_bytes[_name(point)] = saved_bytes
        except Exception as error:
            if is_out_of_memory(error):  # a smaller part of the model may leave enough
                raise
            self._skip([point], self._reason(error, point.samples))

    def _sample(
        self, metric: str, value: float, point: Point, *, step: int | None = None, reason: str = ""
    ) -> None:
        why = {"reason": reason} if reason else {}
        self._context.recorder.sample(
            metric,
            value,
            step=step,
            operator=point.operator,
            signature=point.key,
            shape=shape_text(point.shape),
            dtype=self._dtype,
            **why,
        )

    def _reason(self, error: Exception, samples: int) -> str:
        """Why a point has no number; an error that is none of the point's is raised again.

        Small batches may be impossible (batch normalisation of one value); the whole one is not.
        """
        if is_out_of_memory(error):
            if self._context.world.device.type == "cuda":
                torch.cuda.empty_cache()
            return f"out of memory: {first_line(error)}"
        if isinstance(error, HarnessError):
            raise error
        if samples == self._captured.graph.batch:
            raise ModelError(f"an operator cannot run by itself: {error}") from error
        return f"cannot run: {first_line(error)}"

    def _skip(self, points: list[Point], reason: str) -> None:
        for point in points:
            _log.warning("operator %s %s: %s", point.operator, shape_text(point.shape), reason)
            self._sample("operator_skipped", 1, point, reason=reason)
            self._cannot.add(_name(point))
            self._found.skipped.append((point, reason))


def _name(point: Point) -> _Name:
    return point.key, tuple(point.shape.items())
