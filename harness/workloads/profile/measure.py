"""Measure points on this rank's device: run the model at each batch size and time its operators.

A microbatch is run as in a pipeline: the model has as many stages as there are devices, and as many
microbatches are in flight. Any other batch passes through the whole model, or through as large a
part of it as memory holds. A shard of an operator's weights is timed in place of the operator.
"""

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from harness.domain.profile import DTYPE_NAMES, Measurement
from harness.errors import HarnessError, ModelError, first_line
from harness.runtime.capture.capture import Captured
from harness.runtime.capture.saved import tensors_within
from harness.runtime.data.synthetic import draw_batch
from harness.runtime.devices.memory import is_out_of_memory
from harness.runtime.devices.precision import Precision
from harness.runtime.devices.sampling import Budget, hold_gpu, shortest_sample_s
from harness.runtime.models.task import Task
from harness.runtime.profiling.shards import OperatorShard, operator_shard, verify
from harness.runtime.profiling.subgraph import (
    ModelPart,
    OperatorCall,
    Step,
    Subgraph,
    is_microbatch,
    stage_bounds,
    steps_of,
)
from harness.runtime.profiling.timer import OperatorSamples, OpTimer
from harness.runtime.ranks.world import Context
from harness.workloads.planning.config import Point

_log = logging.getLogger(__name__)

# Several time slices of the OS scheduler, so that each sample includes the share of other processes
# on the core, which the median of shorter samples would hide.
_SLICES_S = 0.02


def shape_text(shape: dict[str, int]) -> str:
    """Format a shape, such as sample64xfeature256."""
    return "x".join(f"{dim}{size}" for dim, size in shape.items())


def _by_shard(captured: Captured, point: Point) -> Callable[[OperatorCall], OperatorCall]:
    """Replace an operator's call by its shard's call; the shard is made at its first call, so that
    few shards are in memory at a time."""
    shard: OperatorShard | None = None

    def replaced(call: OperatorCall) -> OperatorCall:
        nonlocal shard
        if shard is None:
            shard = operator_shard(captured, point.operator, point.dim, point.size, call)
        assert shard is not None, "verification has made this shard before"
        return shard.call(call)

    return replaced


def _shortest_s(device_type: str) -> float:
    """Minimum seconds of a sample that gets the same share of a core as a whole step."""
    return max(shortest_sample_s(device_type), _SLICES_S if device_type == "cpu" else 0.0)


class PointMeasurer:
    """Measures points of one model on this rank.

    Args:
        task: the model, on the device, or on the host if it does not fit there.
        captured: its graph, with the module where the model is.
        between: called after each pass over points of the whole batch.
        n_points: of all calls of `measure` together, for the progress.
    """

    def __init__(
        self,
        task: Task,
        captured: Captured,
        dtype: str,
        context: Context,
        budget: Budget,
        *,
        between: Callable[[], None],
        n_points: int,
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
        self._saved_bytes: dict[object, int] = {}  # of verified points
        self._samples: dict[object, OperatorSamples] = {}
        self._unmeasurable: set[object] = set()
        self._has_finite_loss: dict[int, bool] = {}
        self._found: dict[object, Measurement] = {}  # in this call of `measure`
        self._n_points, self._n_done = n_points, 0

    def measure(self, points: Sequence[Point]) -> list[Measurement]:
        """Measure points, and combine their samples with those of earlier calls.

        A point whose operator runs out of memory is skipped with its reason, and not tried again.

        Raises:
            VerificationError: an operator's result is not finite.
            ModelError: an operator cannot run by itself.
        """
        self._n_done += sum(point.identity in self._unmeasurable for point in points)
        points = [point for point in points if point.identity not in self._unmeasurable]
        self._found = {}
        for samples in dict.fromkeys(point.samples for point in points):
            self._measure_batch(samples, [p for p in points if p.samples == samples])
        return list(self._found.values())

    def _measure_batch(self, samples: int, points: list[Point]) -> None:
        device, graph = self._context.world.device, self._captured.graph
        n_devices = self._context.world.size
        is_micro = is_microbatch(graph, samples, n_devices)
        n_stages = n_devices if is_micro else 1
        drawn, targets = draw_batch(self._task, samples, 0, device)
        steps = steps_of(
            self._captured, lambda output: self._task.sum_loss(tensors_within(output)[0], targets)
        )
        inputs = self._captured.module.graph.find_nodes(op="placeholder")
        fed = dict(zip(inputs, drawn, strict=True))
        whole = ModelPart(steps, fed, 0, len(steps), device, n_stages, is_micro)
        try:
            for begin, end in stage_bounds(steps, graph, n_stages):
                self._measure_part(whole.cut(begin, end), points)
        except Exception as error:
            reason = self._reason(error, samples)
            pending = [point for point in points if not self._is_done(point)]
            self._skip(pending, f"the model cannot be fed {samples} samples: {reason}")

    def _measure_part(self, part: ModelPart, points: list[Point]) -> None:
        """Measure the points of a part of the model; in halves if it does not fit into memory."""
        names = part.names
        pending = [p for p in points if p.operator in names and not self._is_done(p)]
        if not pending:
            return
        reason = ""
        try:
            with part.resident():
                self._measure_subgraph(part, pending)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = self._reason(error, pending[0].samples)
        if not reason:
            return
        if part.n_steps > 1:
            for half in part.halves():
                self._measure_part(half, pending)
        else:
            self._skip([point for point in pending if not self._is_done(point)], reason)

    def _measure_subgraph(self, part: ModelPart, points: list[Point]) -> None:
        with self._precision.autocast():
            subgraph = part.subgraph()
        self._verify(subgraph, [p for p in points if p.identity not in self._saved_bytes])
        can_run = [point for point in points if point.identity in self._saved_bytes]
        waiting: dict[str, list[Point]] = defaultdict(list)
        for point in can_run:
            waiting[point.operator].append(point)
        while any(waiting.values()):
            batch = {name: left.pop(0) for name, left in waiting.items() if left}
            self._time(batch, subgraph, part)
            if points[0].samples == self._captured.graph.batch:
                self._between()
        for point in can_run:
            self._record(point)
        self._context.flush()

    def _time(self, wanted: dict[str, Point], subgraph: Subgraph, part: ModelPart) -> None:
        """Time one point per operator, by the operator's name."""
        shards = {
            name: _by_shard(self._captured, point) for name, point in wanted.items() if point.dim
        }
        found = self._timer.measure(
            subgraph,
            list(wanted),
            shards,
            n_in_flight=part.n_in_flight,
            is_added=part.is_added,
            show=lambda share: self._context.progress.update(
                "operators", self._n_done + int(share * len(wanted)), self._n_points
            ),
        )
        for name, point in wanted.items():
            self._keep(point, found[name])
        self._n_done += len(wanted)

    def _keep(self, point: Point, found: OperatorSamples) -> None:
        key = point.identity
        before = self._samples.get(key)
        n_before = 0 if before is None else len(before.forward_s)
        self._samples[key] = found if before is None else before + found
        for metric, values in (
            ("operator_forward_s", found.forward_s),
            ("operator_backward_s", found.backward_s),
        ):
            for step, value in enumerate(values, start=n_before):
                self._sample(metric, value, point, step=step)

    def _record(self, point: Point) -> None:
        samples = self._samples[point.identity]
        self._found[point.identity] = Measurement(
            device_kind=self._context.world.device_kind,
            operator=point.key,
            shape=point.shape,
            dtype=DTYPE_NAMES[self._dtype],
            forward_s=samples.median_forward_s,
            backward_s=samples.median_backward_s,
            saved_bytes=self._saved_bytes[point.identity],
            spread=round(samples.spread, 4),
            n_samples=len(samples.forward_s),
        )

    def _is_done(self, point: Point) -> bool:
        return point.identity in self._unmeasurable | self._found.keys()

    # Verification

    def _verify(self, subgraph: Subgraph, points: list[Point]) -> None:
        """Run each point once, verify its result and skip points that cannot be timed."""
        if not points:
            return

        def run(step: Step, call: OperatorCall) -> Any:
            for point in points:
                if point.operator == step.name:
                    self._verify_point(point, call)
            return call()

        with self._precision.autocast():
            subgraph.forward(run)

    def _is_sound(self, samples: int) -> bool:
        """Whether the model's loss is finite, even if an operator's result is not."""
        if samples not in self._has_finite_loss:
            task = self._task
            inputs, targets = draw_batch(task, samples, 0, self._context.world.device)
            with torch.no_grad(), self._precision.autocast():
                loss = task.sum_loss(tensors_within(task.model(*inputs))[0], targets)
            self._has_finite_loss[samples] = bool(loss.isfinite())
        return self._has_finite_loss[samples]

    def _verify_point(self, point: Point, call: OperatorCall) -> None:
        try:
            if point.dim:
                shard = operator_shard(self._captured, point.operator, point.dim, point.size, call)
                if shard is None:
                    self._skip([point], f"cannot be cut by {point.dim}")
                    return
                call = shard.call(call)
            is_sound = partial(self._is_sound, point.samples)
            subject = f"operator {point.operator!r}"
            saved_bytes = verify(call, subject, self._precision.autocast, is_sound)
            self._sample("operator_saved_bytes", saved_bytes, point)
            self._saved_bytes[point.identity] = saved_bytes
        except Exception as error:
            if is_out_of_memory(error):  # a smaller part of the model may leave enough
                raise
            self._skip([point], self._reason(error, point.samples))

    def _sample(
        self, metric: str, value: float, point: Point, *, step: int | None = None, reason: str = ""
    ) -> None:
        extra = {"reason": reason} if reason else {}
        self._context.recorder.sample(
            metric,
            value,
            step=step,
            operator=point.operator,
            signature=point.key,
            shape=shape_text(point.shape),
            dtype=self._dtype,
            **extra,
        )

    def _reason(self, error: Exception, samples: int) -> str:
        """Say why a point cannot be measured; raises errors that are not specific to the point.

        Small batches may be impossible (batch norm of one value), the whole batch must not be.
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
            self._unmeasurable.add(point.identity)
        self._n_done += len(points)
