"""Measure points on this rank's device: walk the model at each batch, time what is wanted."""

from __future__ import annotations

import itertools
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from harness.domain.graph import Graph
from harness.domain.profile import Measurement
from harness.errors import HarnessError, ModelError, first_line
from harness.runtime.caches import CacheFlush
from harness.runtime.capture import Captured
from harness.runtime.context import Context
from harness.runtime.executor.deferred import in_place, in_place_bytes, inputs_only, joined_bytes
from harness.runtime.memory import is_out_of_memory
from harness.runtime.models import Task
from harness.runtime.node_walk import NodeWalk, Visit
from harness.runtime.op_shards import shard_call
from harness.runtime.op_timer import (
    OperatorCall,
    OperatorSamples,
    OpTimer,
    as_leaves,
    hold_gpu,
    tensors_in,
)
from harness.runtime.precision import Precision
from harness.runtime.sampling import Budget, shortest_sample_s
from harness.workloads.profile_points import Point
from harness.workloads.profile_step import make_inputs, make_targets

_log = logging.getLogger(__name__)

# What a measurement is filed under: the dtype that training computes in.
DTYPE_NAMES = {"fp32": "float32", "tf32": "tf32", "bf16": "bfloat16"}

# Several slices of a scheduler: what else runs on a core takes its share of such a sample, whereas
# the median of shorter ones would never see it.
_SLICES_S = 0.02


def shape_text(shape: dict[str, int]) -> str:
    """A shape in one word, such as sample64xfeature256."""
    return "x".join(f"{dim}{size}" for dim, size in shape.items())


def is_microbatch(graph: Graph, samples: int, n_devices: int) -> bool:
    """Whether so many samples are fewer than each device's part of the batch."""
    assert graph.batch is not None, "a captured graph has a batch"
    return samples < graph.batch // n_devices


def step_bytes(graph: Graph, operator: str, samples: int, n_devices: int) -> float:
    """About what a device that computes an operator goes through in a step of so many samples:
    parameters, their gradients and outputs, of a microbatch those of a stage.
    """
    assert graph.batch is not None, "a captured graph has a batch"
    shares = {op.name: 1.0 for op in graph.operators}
    if is_microbatch(graph, samples, n_devices):
        shares = _stage_shares(graph, operator, n_devices)
    part = samples / graph.batch
    return sum(
        shares[op.name] * (2 * op.parameter_bytes + part * op.activation_bytes)
        for op in graph.operators
    )


def _stage_shares(graph: Graph, operator: str, n_devices: int) -> dict[str, float]:
    """How much of each operator belongs to the stage around one of them: neighbours in graph order
    that have one n-th of the model's FLOPs, itself in the middle as far as the model reaches.
    """
    flops = [max(op.forward_flops + op.backward_flops, 1.0) for op in graph.operators]
    ends = list(itertools.accumulate(flops))
    at = [op.name for op in graph.operators].index(operator)
    width = ends[-1] / n_devices
    begin = min(max(ends[at] - flops[at] / 2 - width / 2, 0.0), ends[-1] - width)
    return {
        op.name: max(0.0, min(end, begin + width) - max(end - own, begin)) / own
        for op, own, end in zip(graph.operators, flops, ends, strict=True)
    }


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
        flush: passes what the rest of a step goes through through the cache.
        between: called after each point of the whole batch.
    """

    def __init__(
        self,
        task: Task,
        captured: Captured,
        dtype: str,
        context: Context,
        budget: Budget,
        *,
        flush: CacheFlush,
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
            flush=flush,
            hold=None if is_cpu else hold_gpu,
            shortest_s=_shortest_s(context.world.device.type),
            processor=time.process_time if is_cpu else None,
        )
        self._between = between
        self._samples: dict[_Name, OperatorSamples] = {}
        self._variants: dict[tuple[str, _Name], OperatorSamples] = {}
        self._cannot: set[_Name] = set()
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
        for samples in dict.fromkeys(point.samples for point in points):
            wanted: dict[str, list[Point]] = {}
            for point in points:
                if point.samples == samples:
                    wanted.setdefault(point.operator, []).append(point)
            self._measure_batch(samples, wanted)
        return self._found

    def _measure_batch(self, samples: int, wanted: dict[str, list[Point]]) -> None:
        def visit(name: str, call: OperatorCall) -> None:
            for point in wanted.pop(name, []):
                self._measure_point(point, call)

        try:
            output = self._walk(samples, set(wanted), visit)
            visit("loss", self._loss_call(output, samples))
        except Exception as error:
            reason = self._reason(error, samples)
            left = [point for points in wanted.values() for point in points]
            self._skip(left, f"the model cannot be fed {samples} samples: {reason}")

    def _walk(self, samples: int, names: set[str], visit: Visit) -> Tensor:
        operators = {node: name for name, node in self._captured.nodes.items()}
        autocast = self._precision.autocast
        walk = NodeWalk(self._captured.module, operators, names, visit, autocast)
        return walk.walk(*make_inputs(self._task, samples, self._context.world.device))

    def _loss_call(self, output: Tensor, samples: int) -> OperatorCall:
        targets = make_targets(self._task, samples, output.device)
        leaf = as_leaves(output, has_gradient=True)
        return OperatorCall(self._task.sum_loss, (leaf, targets), {})

    def _measure_point(self, point: Point, call: OperatorCall) -> None:
        context = self._context
        done = len(self._found.measurements) + len(self._found.skipped)
        context.progress.update("operators", done, self._n_points, point.operator)
        try:
            shard = _shard_call(point, call, self._captured)
            if shard is None:
                self._skip([point], f"cannot be cut by {point.dim} alone")
                return
            self._record(point, shard)
        except Exception as error:
            self._skip([point], self._reason(error, point.samples))
        if point.samples == self._captured.graph.batch:
            self._between()
        context.flush()

    def _record(self, point: Point, call: OperatorCall) -> None:
        world = self._context.world
        before = self._samples.get(_name(point))
        found = self._timer.measure(
            call,
            f"operator {point.operator!r}",
            before,
            n_between=self._n_between(point),
        )
        self._samples[_name(point)] = found
        variants_s = self._variants_s(point, call)
        n_before = 0 if before is None else len(before.forward_s)
        measurement = Measurement(
            device_kind=world.device_kind,
            operator=point.key,
            shape=point.shape,
            dtype=DTYPE_NAMES[self._dtype],
            forward_s=statistics.median(found.forward_s),
            backward_s=statistics.median(found.backward_s),
            saved_bytes=found.saved_bytes,
            spread=round(found.spread, 4),
            n_samples=len(found.forward_s),
            **variants_s,
        )
        for step, value in list(enumerate(found.forward_s))[n_before:]:
            self._sample("operator_forward_s", value, point, step=step)
        for step, value in list(enumerate(found.backward_s))[n_before:]:
            self._sample("operator_backward_s", value, point, step=step)
        if before is None:
            self._sample("operator_saved_bytes", found.saved_bytes, point)
        self._found.measurements.append(measurement)

    def _n_between(self, point: Point) -> float:
        graph, n_devices = self._captured.graph, self._context.world.size
        return step_bytes(graph, point.operator, point.samples, n_devices)

    def _variants_s(self, point: Point, call: OperatorCall) -> dict[str, float]:
        """Backward seconds as the executor may carry the pass out instead, by BACKWARD_VARIANTS:
        the gradient of large weights written where it stays, that of a microbatch added to what is
        there; that of inputs alone. Only those that it trains so on this device."""
        device, module = self._context.world.device, call.function
        is_fed_back = any(x.requires_grad for x in tensors_in((call.args, call.kwargs)))
        if not isinstance(module, nn.Module) or not is_fed_back:
            return {}
        graph, n_devices = self._captured.graph, self._context.world.size
        instead: dict[str, nn.Module | None] = {}
        if in_place_bytes(device) < math.inf:
            is_added = is_microbatch(graph, point.samples, n_devices)
            instead["in_place_backward_s"] = in_place(module, is_added=is_added)
        if joined_bytes(device) < math.inf:
            instead["input_backward_s"] = inputs_only(module)
        found = {
            field: self._variant_s(point, field, OperatorCall(other, call.args, call.kwargs))
            for field, other in instead.items()
            if other is not None
        }
        if found:
            module.zero_grad(set_to_none=True)
        return found

    def _variant_s(self, point: Point, field: str, call: OperatorCall) -> float:
        key = field, _name(point)
        before = self._variants.get(key)
        found = self._variants[key] = self._timer.measure(
            call,
            f"operator {point.operator!r} ({field})",
            before,
            n_between=self._n_between(point),
        )
        n_before = 0 if before is None else len(before.backward_s)
        for step, value in list(enumerate(found.backward_s))[n_before:]:
            self._sample(f"operator_{field}", value, point, step=step)
        return statistics.median(found.backward_s)

    def _sample(
        self, metric: str, value: float, point: Point, *, step: int | None = None, reason: str = ""
    ) -> None:
        told = {"reason": reason} if reason else {}
        self._context.recorder.sample(
            metric,
            value,
            step=step,
            operator=point.operator,
            signature=point.key,
            shape=shape_text(point.shape),
            dtype=self._dtype,
            **told,
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


def _shard_call(point: Point, call: OperatorCall, captured: Captured) -> OperatorCall | None:
    """The call that a point measures: the operator itself, or a part of its weights; or none."""
    if not point.dim:
        return call
    return shard_call(captured, point.operator, point.dim, point.size, call)
