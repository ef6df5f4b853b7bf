"""Select the samples of a global batch that a device reads, and split them by microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from harness.domain.partition import Interval, cut_dim
from harness.domain.strategy import Strategy
from harness.runtime.capture.capture import Captured
from harness.runtime.data.batch import Batch, Readers
from harness.runtime.engines.engine import Share, fetch_batch
from harness.runtime.engines.phases import Phases
from harness.runtime.executor.geometry.layout import Layout
from harness.runtime.executor.run.flight import Flight


class Feed:
    """One device's share of every batch.

    Args:
        layouts: by size of microbatch.

    Attributes:
        samples: positions in the global batch, in the order in which the device reads them.
        readers: of a microbatch.
    """

    def __init__(
        self, captured: Captured, strategy: Strategy, layouts: Mapping[int, Layout], device: int
    ) -> None:
        self._microbatches = cut_dim(strategy.batch, strategy.n_microbatches)
        inputs = captured.module.graph.find_nodes(op="placeholder")
        self._input_names = tuple(node.name for node in inputs)
        readers = {size: _readers(layout, self._input_names) for size, layout in layouts.items()}
        self.readers = readers[max(readers)]
        read = {size: _read_samples(found, device) for size, found in readers.items()}
        self._intervals = [
            (first + start, first + stop)
            for first, last in self._microbatches
            for start, stop in (read[last - first],)
        ]
        self.samples = [at for start, stop in self._intervals for at in range(start, stop)]

    def fetch(
        self, fetch: Callable[[], Batch], phases: Phases, device: torch.device
    ) -> Batch | None:
        """This rank's samples, on its device; None if it reads none."""
        if not self.samples:
            return None
        batch = fetch_batch(fetch, phases, device)
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


def _readers(layout: Layout, names: Sequence[str]) -> Readers:
    """The devices whose tasks read samples of a microbatch, by input and then of the targets."""
    found: dict[str, list[tuple[int, Interval]]] = {name: [] for name in names}
    for want in layout.wants:
        if not want.pieces:
            found[want.value].append((want.device, want.block[0]))
    losses = (op.name for op in layout.graph.operators if op.kind == "loss")
    parts = (part for name in losses for part in layout.parts[name])
    targets = [(part.device, layout.sample_interval(part)) for part in parts]
    return [*found.values(), targets]


def _read_samples(readers: Readers, device: int) -> Interval:
    """The interval of a microbatch that covers all samples of inputs and targets that a device's
    tasks read; it may be empty."""
    read = [interval for column in readers for reader, interval in column if reader == device]
    starts, stops = zip(*read, strict=True) if read else ([0], [0])
    return min(starts), max(stops)
