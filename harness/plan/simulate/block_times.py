"""Calibrated seconds of one block of an operator on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from harness.domain.cluster import Device
from harness.domain.graph import Graph
from harness.domain.partition import Block, volume
from harness.domain.profile import Profile
from harness.domain.sharding import full_shape, output_sizes
from harness.plan.fit import OperatorTimes
from harness.plan.simulate.frozen import gradients_of, passes_s


class BlockSeconds(NamedTuple):
    """Seconds of one block on one device."""

    forward_s: float
    backward_s: float


class BlockTimes:
    """Looks up and caches the times of blocks.

    Args:
        samples: number in the microbatch.
        shapes: shapes of the operators for a microbatch.
        frozen: names of the operators that are not trained.
        skipped: those of them that take no time.
    """

    def __init__(
        self,
        graph: Graph,
        profile: Profile,
        devices: Sequence[Device],
        samples: int,
        shapes: Sequence[dict[str, int]],
        frozen: frozenset[str] = frozenset(),
        skipped: frozenset[str] = frozenset(),
    ) -> None:
        self._skipped = skipped
        self._graph, self._devices, self._shapes = graph, devices, shapes
        self._samples = samples
        self._times = OperatorTimes(profile)
        self._profile, self._graph_hash = profile, graph.content_hash()
        self._frozen, self._gradients = frozen, gradients_of(graph, frozen)
        self._seconds: dict[object, BlockSeconds] = {}

    def block_s(self, op: int, block: Block, device: int) -> BlockSeconds:
        """Seconds of one block on one device."""
        key = (op, device, tuple(stop - start for start, stop in block))
        if key not in self._seconds:
            operator = self._graph.operators[op]
            sizes = dict(zip(self._shapes[op], key[2], strict=True))
            kind = self._devices[device].kind
            samples = sizes.get("sample", self._samples)
            dtype = self._times.dtype_of(operator)
            calibration = self._profile.calibration_of(self._graph_hash, kind, samples, dtype)
            factor = calibration / self._devices[device].speed
            shown = output_sizes(operator, sizes)
            is_whole = all(sizes[dim] == self._shapes[op][dim] for dim in sizes if dim not in shown)
            if operator.shape:
                shape = shown if is_whole else sizes
                time = self._times.lookup(operator, kind, shape=shape)
            else:
                # With an unknown shape, time is in proportion to elements.
                time = self._times.lookup(operator, kind)
                factor *= volume(block) / self._full_volume(op)
            seconds = passes_s(
                operator,
                self._gradients[op],
                is_frozen=operator.name in self._frozen,
                forward_s=time.forward_s * factor,
                backward_s=time.backward_s * factor,
            )
            is_skipped = operator.name in self._skipped
            self._seconds[key] = BlockSeconds(0.0, 0.0) if is_skipped else BlockSeconds(*seconds)
        return self._seconds[key]

    def _full_volume(self, op: int) -> float:
        """Elements of the output at the graph's batch, with partial dims."""
        batch = self._graph.batch or self._samples
        full = full_shape(self._graph.operators[op], batch=batch, graph_batch=self._graph.batch)
        return float(np.prod(list(full.values())))
