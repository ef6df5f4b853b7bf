"""Select the samples of a global batch that a device reads, and split them by microbatch."""

from __future__ import annotations

from collections.abc import Callable

import torch

from harness.domain.graph import Graph, Operator
from harness.domain.partition import SAMPLE, Interval, cut_dim
from harness.domain.sharding import full_blocks, full_shape, has_tasks
from harness.domain.strategy import Strategy
from harness.runtime.capture.capture import Captured
from harness.runtime.data.batch import Batch
from harness.runtime.engines.engine import Share
from harness.runtime.executor.run.flight import Flight
from harness.runtime.executor.run.phases import Phases


class Feed:
    """One device's share of every batch.

    Attributes:
        samples: positions in the global batch, in the order in which the device reads them.
    """

    def __init__(self, captured: Captured, strategy: Strategy, device: int) -> None:
        self._intervals = sample_intervals(captured.graph, strategy, device)
        self._microbatches = cut_dim(strategy.batch, strategy.n_microbatches)
        inputs = captured.module.graph.find_nodes(op="placeholder")
        self._input_names = tuple(node.name for node in inputs)
        self.samples = [at for start, stop in self._intervals for at in range(start, stop)]

    def fetch(
        self, fetch: Callable[[], Batch], phases: Phases, device: torch.device
    ) -> Batch | None:
        """This rank's samples, on its device; None if it reads none."""
        if not self.samples:
            return None
        phases.begin("data")
        batch = fetch()
        phases.begin("host_to_device", n_bytes=batch.n_bytes)
        batch = batch.to(device)
        phases.end()  # so that posting receives counts as neither
        return batch

    def split(
        self, batch: Batch | None, share: Share, scale: float, *, is_asynchronous: bool
    ) -> list[Flight]:
        """Make one flight for each microbatch.

        Args:
            batch: this device's samples, in order; None if it reads none.
            scale: factor of the losses, without effect on their reported values.
            is_asynchronous: each microbatch's loss is a mean of its own.
        """
        flights = []
        at = 0
        n_targets = max(1, share.n_targets())
        for (start, stop), (first, last) in zip(self._intervals, self._microbatches, strict=True):
            n = stop - start
            mean_over = max(1, share.n_targets(first, last)) if is_asynchronous else n_targets
            part = None
            if batch is not None and n:
                part = Batch(
                    tuple(x[at : at + n] for x in batch.inputs), batch.targets[at : at + n]
                )
            flights.append(
                Flight(
                    part,
                    (start - first, stop - first),
                    self._input_names,
                    weight=scale / mean_over,
                    loss_share=mean_over / n_targets / scale,
                )
            )
            at += n
        return flights


def sample_intervals(graph: Graph, strategy: Strategy, device: int) -> list[Interval]:
    """The samples of the global batch that a device needs, one interval per microbatch.

    An interval covers all samples of inputs and targets that the device's tasks read; it may be
    empty.
    """
    index = graph.index()
    readers = [
        op
        for op in graph.operators
        if has_tasks(op)
        and (op.kind == "loss" or any(not has_tasks(graph.operators[index[n]]) for n in op.inputs))
    ]
    found: list[Interval] = []
    for start, stop in cut_dim(strategy.batch, strategy.n_microbatches):
        needed = [
            _read_samples(op, plan.partition, k, graph, stop - start)
            for op in readers
            for plan in (strategy.operators[op.name],)
            for k, held_by in enumerate(plan.devices)
            if held_by == device
        ]
        low = min((interval[0] for interval in needed), default=0)
        high = max((interval[1] for interval in needed), default=0)
        found.append((start + low, start + high))
    return found


def _read_samples(
    operator: Operator, cuts: dict[str, int | list[int]], k: int, graph: Graph, samples: int
) -> Interval:
    shape = full_shape(operator, batch=samples, graph_batch=graph.batch)
    block = full_blocks(operator, cuts, batch=samples, graph_batch=graph.batch)[k]
    intervals = dict(zip(shape, block, strict=True))
    if SAMPLE not in intervals:
        return 0, samples
    (low, high), size = intervals[SAMPLE], shape[SAMPLE]
    return low * samples // size, -(-high * samples // size)
