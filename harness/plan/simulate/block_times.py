"""Calibrated seconds of one block of an operator on one device, and its gradients.

    frozen prefix            first trained         trained
    forward | no backward    weights alone         weights and inputs

Gradients do not travel into the prefix, because nothing there is trained. A frozen operator that is
not in the prefix, which tied weights make possible, passes gradients on and has none of its own.
"""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from harness.domain.cluster import Device
from harness.domain.graph import Graph, Operator
from harness.domain.partition import SAMPLE, Block
from harness.domain.profile import Profile
from harness.domain.sharding import full_shape, has_tasks, output_sizes
from harness.plan.fit import OperatorTime, OperatorTimes
from harness.plan.simulate.options import SimulatorOptions


class BlockTimes:
    """Looks up and caches the times of blocks in a microbatch of so many samples."""

    def __init__(
        self,
        graph: Graph,
        profile: Profile,
        devices: Sequence[Device],
        samples: int,
        shapes: Sequence[dict[str, int]],
        options: SimulatorOptions,
    ) -> None:
        self._graph, self._devices, self._shapes = graph, devices, shapes
        self._samples = samples
        self._times = OperatorTimes(profile)
        self._profile, self._graph_hash = profile, graph.content_hash()
        self._frozen, self._skipped = options.frozen, options.skipped
        self._gradients = gradients_of(graph, options.frozen)
        self._seconds: dict[object, OperatorTime] = {}
        self._whole: dict[tuple[str, int], tuple[list[OperatorTime], float]] = {}

    def block_s(self, op: int, block: Block, device: int) -> OperatorTime:
        key = (op, device, tuple(stop - start for start, stop in block))
        if key not in self._seconds:
            operator = self._graph.operators[op]
            sizes = dict(zip(self._shapes[op], key[2], strict=True))
            kind, speed = self._devices[device].kind, self._devices[device].speed
            samples = sizes.get(SAMPLE, self._samples)
            dtype = self._times.dtype_of(operator)
            factor, host_s = self._profile.calibration_of(self._graph_hash, kind, samples, dtype)
            forward_s, backward_s = (factor * one_s for one_s in self._lookup(op, kind, sizes))
            if host_s:
                # Each operator's share of the host's time is its share of the device's.
                whole, all_s = self._uncut(kind, samples)
                forward_s = max(forward_s, host_s * whole[op].forward_s / all_s)
                backward_s = max(backward_s, host_s * whole[op].backward_s / all_s)
            self._seconds[key] = self._passes_s(op, forward_s / speed, backward_s / speed)
        return self._seconds[key]

    def _passes_s(self, op: int, forward_s: float, backward_s: float) -> OperatorTime:
        """Seconds of both passes, of which a profile measured both gradients.

        The input gradients of a product take as long as its forward pass, which has as many FLOPs.
        """
        operator = self._graph.operators[op]
        if operator.name in self._skipped:
            return OperatorTime(0.0, 0.0)
        to_inputs_s = min(forward_s, backward_s)
        taken_s = {
            "all": backward_s,
            "inputs": to_inputs_s,
            "weights": backward_s - to_inputs_s,
            "none": 0.0,
        }[self._gradients[op]]
        is_off = operator.name in self._frozen and operator.attrs.get("function") in _DROPOUTS
        return OperatorTime(0.0 if is_off else forward_s, taken_s)

    def _uncut(self, kind: str, samples: int) -> tuple[list[OperatorTime], float]:
        """Times of all operators, cut by samples alone, and their sum."""
        if (kind, samples) not in self._whole:
            shapes = [
                shape | {SAMPLE: samples} if SAMPLE in shape else shape for shape in self._shapes
            ]
            times = [
                self._lookup(op, kind, shape)
                if has_tasks(self._graph.operators[op])
                else OperatorTime(0.0, 0.0)
                for op, shape in enumerate(shapes)
            ]
            self._whole[kind, samples] = times, max(sum(time.total_s for time in times), 1e-30)
        return self._whole[kind, samples]

    def _lookup(self, op: int, kind: str, sizes: dict[str, int]) -> OperatorTime:
        operator, whole = self._graph.operators[op], self._shapes[op]
        if operator.shape:
            shown = output_sizes(operator, sizes)
            is_whole = all(sizes[dim] == whole[dim] for dim in sizes if dim not in shown)
            return self._times.lookup(operator, kind, shape=shown if is_whole else sizes)
        # With an unknown shape, time is in proportion to elements of all dims.
        batch = self._graph.batch or self._samples
        full = full_shape(operator, batch=batch, graph_batch=self._graph.batch)
        share = math.prod(sizes.values()) / math.prod(full.values())
        forward_s, backward_s = self._times.lookup(operator, kind)
        return OperatorTime(forward_s * share, backward_s * share)


Gradients = Literal["all", "inputs", "weights", "none"]

# Modules that evaluation mode turns off.
_DROPOUTS = ("Dropout", "Dropout2d")


def is_product(operator: Operator) -> bool:
    """Whether it multiplies by weights, whose gradients the executor may defer."""
    pads_zeros = operator.attrs.get("padding_mode", "zeros") == "zeros"
    return operator.kind in ("linear", "conv2d") and operator.trained_share > 0 and pads_zeros


def needs_gradient(graph: Graph, frozen: frozenset[str] = frozenset()) -> npt.NDArray[np.bool_]:
    """Whether each operator, or any operator before it, has weights to train, unless its output is
    of integers or truths, such as the indices of experts, which have no gradient."""
    needs = np.zeros(len(graph.operators), dtype=np.bool_)
    for i, producers in enumerate(graph.producers()):
        operator = graph.operators[i]
        is_trained = operator.trained_share > 0 and operator.name not in frozen
        is_whole = operator.dtype.startswith(("int", "uint", "bool"))
        needs[i] = not is_whole and (is_trained or any(needs[p] for p in producers))
    return needs


def gradients_of(graph: Graph, frozen: frozenset[str]) -> list[Gradients]:
    """The gradients that each operator computes."""
    before, after = needs_gradient(graph), needs_gradient(graph, frozen)
    found: list[Gradients] = []
    for i, producers in enumerate(graph.producers()):
        operator, gave = graph.operators[i], any(before[p] for p in producers)
        if before[i] and not after[i]:
            found.append("none")
        elif not is_product(operator):
            found.append("all")
        elif operator.name in frozen:
            found.append("inputs")
        else:
            found.append("weights" if gave and not any(after[p] for p in producers) else "all")
    return found
