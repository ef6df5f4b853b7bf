"""Refuse a user's data that ranks read unlike, because each rank takes its samples by index."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from harness.errors import DataError
from harness.runtime.data.batch import BatchedData, Readers
from harness.runtime.data.own import OwnData
from harness.runtime.engines.replicas import fingerprint_of
from harness.runtime.models.task import Task
from harness.runtime.ranks.gather import gather_numbers, gather_objects, raise_on_all_ranks
from harness.runtime.ranks.world import World

# A sample that is flipped at random is read alike so often with a probability of 3 %.
_N_READINGS = 6
# Of readings that change one time in ten, this many pairs show a change in 99.8 % of cases.
_N_READ_TWICE = 32


class GivenData:
    """The data that a program gives for a use, such as training, opened once.

    The last data of each use are kept, because they remember how many targets count. All ranks
    compare the first, and not each part of a stream, for which they would wait.
    """

    def __init__(self, task: Task, seed: int, world: World, readers: Readers) -> None:
        self._task, self._seed, self._world, self._readers = task, seed, world, readers
        self._last: dict[str, tuple[Any, OwnData]] = {}
        self._compared: set[str] = set()

    def opened(self, use: str, data: Any) -> OwnData:
        """Raises DataError: samples do not fit the model, or ranks have other data."""

        def open_it() -> None:
            if use not in self._last or self._last[use][0] is not data:
                self._last[use] = data, OwnData("the data", data, self._task, self._seed)

        if use in self._compared:
            open_it()
        else:
            raise_on_all_ranks(open_it, self._world)
            check_same("the data", self._last[use][1], self._world, self._readers)
            self._compared.add(use)
        return self._last[use][1]


def check_same(name: str, data: BatchedData, world: World, readers: Readers = ()) -> None:
    """Refuse data that differ between ranks, because each takes samples by index; all ranks must
    call it.

    Args:
        name: subject of the error.
        readers: under the executor; see `check_read_once`.

    Raises:
        DataError: on every rank; names the lengths that differ, or, of a user's data, the first,
            middle or last sample.
    """
    n = len(data)
    lengths = [round(count) for count in gather_numbers(n, world)]
    if rank := _first_unlike(lengths):
        raise DataError(
            f"{name} has {lengths[0]} samples on rank 0 and {lengths[rank]} on rank {rank}: give "
            "every rank the same, on every host"
        )
    if n == 0 or world.size == 1 or not isinstance(data, OwnData):
        return
    own: list[list[int]] = []
    indices = sorted({0, n // 2, n - 1})
    raise_on_all_ranks(lambda: own.extend(_fingerprint(data, index) for index in indices), world)
    for index, *found in zip(indices, *gather_objects(world, own), strict=True):
        rank = _first_unlike(found)
        if rank and all(found):
            raise DataError(
                f"sample {index} of {name} is another on rank {rank} than on rank 0, so that "
                "samples would be left out: give every rank the same data, and random_split a "
                "generator that all seed alike"
            )
    check_read_once(name, data, readers, world)


def _first_unlike(values: Sequence[Any]) -> int:
    """The first rank whose value is not rank 0's; 0 if there is none."""
    return next((rank for rank, value in enumerate(values) if value != values[0]), 0)


def _fingerprint(data: BatchedData, index: int) -> list[int]:
    """That of a sample; empty if a reading differs from the first, because the data have a random
    generator of their own."""
    first, *others = (
        [number for t in (*one.inputs, one.targets) for number in fingerprint_of(t).tolist()]
        for one in (data[index] for _ in range(_N_READINGS))
    )
    return first if all(other == first for other in others) else []


def changed_columns(data: BatchedData, *, is_next_epoch: bool = False) -> dict[int, int]:
    """Inputs, by number, and after them the targets that change when they are read again, or in the
    next epoch, because they are augmented at random, with a sample of which they do."""
    found: dict[int, int] = {}
    later = len(data) if is_next_epoch and isinstance(data, OwnData) else 0
    for index in range(0, len(data), -(-len(data) // _N_READ_TWICE)):
        first, second = ((*one.inputs, one.targets) for one in (data[index], data[index + later]))
        for column, (one, other) in enumerate(zip(first, second, strict=True)):
            if not torch.equal(one, other):
                found.setdefault(column, index)
    return found


def check_read_once(name: str, data: BatchedData, readers: Readers, world: World) -> None:
    """Refuse data that change when they are read again, because they have a random generator of
    their own, where several ranks read what changes of a sample; all ranks must call it.

    Args:
        name: subject of the error.

    Raises:
        DataError: on every rank.
    """
    if _read_together(readers, range(len(readers))) is None:
        return
    own: dict[int, int] = {}
    raise_on_all_ranks(lambda: own.update(changed_columns(data)), world)
    changed = {column: at for found in gather_objects(world, own) for column, at in found.items()}
    if pair := _read_together(readers, changed):
        raise DataError(
            f"sample {min(changed.values())} of {name} is not the same when it is read again, and "
            f"ranks {pair[0]} and {pair[1]} would train by unlike readings of the same samples: "
            "draw augmentation from torch's, numpy's or Python's global generator, or use "
            "ddp"
        )


def _read_together(readers: Readers, columns: Iterable[int]) -> tuple[int, int] | None:
    """Two ranks that read some of these columns of the same sample; None if there are none."""
    read = sorted({one for column in columns for one in readers[column]})
    for (rank, (start, stop)), (other, (first, last)) in itertools.combinations(read, 2):
        if rank != other and max(start, first) < min(stop, last):
            return rank, other
    return None
