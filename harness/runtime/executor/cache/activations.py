"""The cached values of one rank: recording them, exchanging their rows, and training on them; the
frozen prefix of an engine, which they replace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from harness.measure.recorder import Clock
from harness.runtime.data.batch import Batch, BatchedData
from harness.runtime.executor.cache.boundary import Rest
from harness.runtime.executor.cache.store import Rows
from harness.runtime.executor.geometry.slices import WeightSlice
from harness.runtime.executor.program.program import DataKey, Program, Recorded
from harness.runtime.executor.state.weights import Holders, Use, Weights
from harness.runtime.ranks.gather import gather_objects
from harness.runtime.ranks.messages import start_messages
from harness.runtime.ranks.world import World

# Bytes of a message: large enough for the bandwidth of a link, small beside the memory of a rank.
_MESSAGE_BYTES = 8 << 20

Samples = np.ndarray[tuple[int], np.dtype[np.int64]]


class Activations:
    """The values at frozen boundaries, by name and sample.

    Args:
        memory_bytes: shared memory that all values together may take on this rank.
        directory: for the rows beyond it.
    """

    def __init__(self, n_samples: int, memory_bytes: int, directory: Path) -> None:
        self.n_samples, self._limit, self._directory = n_samples, memory_bytes, directory
        self._rows: dict[str, Rows] = {}

    def write(self, value: str, samples: Sequence[int], tensor: Tensor) -> None:
        self._of(value, tensor).write(samples, tensor)

    def read(self, value: str, samples: Sequence[int]) -> Tensor:
        """The rows of samples, which must be held."""
        return self._rows[value].read(samples)

    def rows(self, value: str) -> Rows | None:
        """The rows of a value; None if there are none."""
        return self._rows.get(value)

    def keep_only(self, values: Collection[str]) -> None:
        """Free all other values."""
        for value in [value for value in self._rows if value not in values]:
            self._rows.pop(value).close()

    @property
    def n_bytes(self) -> tuple[int, int]:
        """Bytes in shared memory and on disk."""
        rows = self._rows.values()
        return sum(one.memory_bytes for one in rows), sum(one.disk_bytes for one in rows)

    def _of(self, value: str, like: Tensor) -> Rows:
        if value not in self._rows:
            left = self._limit - self.n_bytes[0]
            self._rows[value] = Rows(like, self.n_samples, left, self._directory)
        return self._rows[value]

    def survey(self, values: Sequence[str], world: World) -> HeldRows:
        """What all ranks hold; all ranks must call it."""
        none = np.zeros(self.n_samples, dtype=np.bool_)
        known = [self._rows.get(value) for value in values]
        held = np.stack([none if rows is None else rows.holds() for rows in known])
        found = {value: self._rows[value].like(1) for value in values if value in self._rows}
        parts = gather_objects(world, (np.packbits(held, axis=1), found))
        shape = (len(values), self.n_samples)
        whole = [np.unpackbits(bits, axis=1, count=shape[1]).astype(np.bool_) for bits, _ in parts]
        like = {value: tensor for _, found in parts for value, tensor in found.items()}
        return HeldRows(tuple(values), np.stack(whole), like)

    def exchange(self, survey: HeldRows, readers: Collection[int], world: World) -> None:
        """Bring to every reader the rows that it lacks; all ranks must call it."""
        for index, value in enumerate(survey.values):
            moves = list(survey.moves(index, readers))
            if not any(world.rank in (source, target) for source, target, _ in moves):
                continue
            rows = self._of(value, survey.like[value])
            each = max(1, _MESSAGE_BYTES // rows.row_bytes)
            n_rounds = max(-(-len(samples) // each) for _, _, samples in moves)
            for k in range(n_rounds):
                chunk = slice(k * each, (k + 1) * each)
                parts = [(s, t, samples[chunk].tolist()) for s, t, samples in moves]
                _send_and_receive(rows, [part for part in parts if part[2]], world)


class HeldRows(NamedTuple):
    """The samples that each rank holds of some values.

    Attributes:
        held: by rank, value and sample.
        like: a row of each value that some rank holds.
    """

    values: tuple[str, ...]
    held: np.ndarray[tuple[int, int, int], np.dtype[np.bool_]]
    like: dict[str, Tensor]

    def missing(self) -> list[int]:
        """The samples of which no rank holds a row of some value."""
        found: list[int] = np.flatnonzero(~self.held.any(axis=0).all(axis=0)).tolist()
        return found

    def moves(self, index: int, readers: Collection[int]) -> Iterator[tuple[int, int, Samples]]:
        """(source, target, samples) of the rows of a value that readers lack.

        Each reader asks the ranks after it first, so that all send about as much.
        """
        n_ranks = len(self.held)
        for target in sorted(readers):
            lacking = ~self.held[target, index]
            for source in [(target + k) % n_ranks for k in range(1, n_ranks)]:
                taken = lacking & self.held[source, index]
                if taken.any():
                    yield source, target, np.flatnonzero(taken)
                lacking &= ~taken

    def n_bytes(self, readers: Collection[int]) -> dict[tuple[int, int], int]:
        """Bytes that an exchange moves, by (sender, reader)."""
        found = Counter[tuple[int, int]]()
        for index, value in enumerate(self.values):
            for source, target, samples in self.moves(index, readers):
                found[source, target] += len(samples) * self.like[value].nbytes
        return dict(found)


def _send_and_receive(
    rows: Rows, parts: Sequence[tuple[int, int, list[int]]], world: World
) -> None:
    """One message for each (source, target, samples)."""
    received: list[tuple[list[int], Tensor]] = []
    operations: list[dist.P2POp] = []
    for source, target, samples in parts:
        if source == world.rank:
            flat = rows.read(samples).contiguous().reshape(-1).view(torch.uint8).to(world.wire)
            operations.append(dist.P2POp(dist.isend, flat, target))
        elif target == world.rank:
            n_bytes = len(samples) * rows.row_bytes
            flat = torch.empty(n_bytes, dtype=torch.uint8, device=world.wire)
            operations.append(dist.P2POp(dist.irecv, flat, source))
            received.append((samples, flat))
    for work in start_messages(operations):
        work.wait()
    for samples, flat in received:
        like = rows.like(len(samples))
        rows.write(samples, flat.to("cpu").view(like.dtype).view(like.shape))


class CachedData(BatchedData):
    """A data set for an engine that skips frozen layers.

    Args:
        data: the data set of the whole model.
        is_read: whether this rank computes on cached values; other ranks read targets only.
    """

    def __init__(self, data: Any, activations: Activations, rest: Rest, *, is_read: bool) -> None:
        self.data = data
        self._activations, self._rest, self._is_read = activations, rest, is_read

    def __len__(self) -> int:
        return len(self.data)

    def __getitems__(self, indices: list[int]) -> Batch:
        batch: Batch = self.data.__getitems__(indices)
        values = self._rest.values
        if self._is_read:
            cached = tuple(self._activations.read(value, indices) for value in values)
        else:
            cached = tuple(torch.empty(0) for _ in values)
        return Batch((*cached, *(batch.inputs[k] for k in self._rest.kept)), batch.targets)


# Frozen segments that are timed: enough for a mean, few enough for events of a GPU.
_MOST_TIMED = 512


@dataclass
class Tap:
    """Takes the values of one engine's microbatches.

    Attributes:
        samples: the samples of the step's global batch, in order; empty: nothing is recorded.
    """

    activations: Activations
    clock: Clock
    samples: Sequence[int] = ()
    n_steps: int = 0  # that were timed
    _marks: list[tuple[Any, Any]] = field(default_factory=list)

    def begin(self, samples: Sequence[int]) -> None:
        self.samples = samples
        self.n_steps += self.is_timing

    @property
    def is_timing(self) -> bool:
        """Whether frozen segments are still timed."""
        return len(self._marks) < _MOST_TIMED

    def take(self, rows: Recorded, tensor: Tensor, first: int) -> None:
        """Record rows of a value.

        Args:
            first: the microbatch's first sample within the batch.
        """
        if self.samples:
            start, stop = rows.samples
            self.activations.write(rows.value, self.samples[first + start : first + stop], tensor)

    def timed(self, compute: Callable[[], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        """Compute a frozen segment, and time it."""
        start = self.clock.mark()
        found = compute()
        self._marks.append((start, self.clock.mark()))
        return found

    def step_s(self) -> float:
        """Seconds of this rank's frozen segments in a step; waits for the device."""
        self.clock.settle()
        at = self.clock.seconds_at
        return sum(at(end) - at(start) for start, end in self._marks) / max(1, self.n_steps)


class Parked(NamedTuple):
    """A slice that no operator of an engine uses, because the cache replaces its layer.

    Attributes:
        tensor: on the ranks that hold it.
    """

    devices: tuple[int, ...]
    tensor: Tensor | None


@dataclass(frozen=True, kw_only=True)
class Prefix:
    """The frozen prefix of one engine.

    Attributes:
        n_frozen: layers that it does not train.
        n_skipped: those of them that it does not compute.
        rest: the model that it computes; None: the whole one.
        parked: weights of the skipped layers, which stay where they were.
        tap: records values at the boundary; None: nothing is recorded.
    """

    n_frozen: int = 0
    n_skipped: int = 0
    rest: Rest | None = None
    parked: Mapping[WeightSlice, Parked] = field(default_factory=dict)
    tap: Tap | None = None

    def is_read(self, program: Program) -> bool:
        """Whether a segment of a program reads cached values."""
        values = () if self.rest is None else self.rest.values
        keys = (key for segments in program.stages.values() for s in segments for key in s.inputs)
        return any(isinstance(key, DataKey) and key.value in values for key in keys)

    def park(self, weights: Weights, holders: Holders) -> None:
        """Hold the parked slices."""
        used = {piece.name for piece, _ in holders.items()}
        for piece, (devices, tensor) in self.parked.items():
            if piece.name in used:
                continue
            for device in devices:
                holders.add([piece], Use(device, stage=0, position=0))
            if tensor is not None:
                weights.hold(piece, tensor)
