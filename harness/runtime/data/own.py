"""A user's own data set: `--data package.module:factory`.

The factory returns a data set with a length and samples by index (`torch.utils.data.Dataset`, a
list, one of Hugging Face's), or a pair of one to train by and one that is held out. A sample is a
dict of the model's inputs and of the label by name, or a tuple of them in their order.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from harness.errors import DataError, HarnessError, first_line
from harness.inputs import one_line, shorten
from harness.runtime.data.batch import Batch, BatchedData
from harness.runtime.devices.random_sources import RandomSources, seed_all
from harness.runtime.models.task import InputSpec, Task
from harness.runtime.models.user_code import UserFunction

_log = logging.getLogger(__name__)

# Epochs whose samples tell whether augmentation changes the number of labels that count.
_N_EPOCHS = 5
# What a label is called where the model gives it no name.
_LABEL_NAMES = ("labels", "label", "targets", "target", "y")


def factory_of(name: str) -> UserFunction:
    """The function that --data names."""
    return UserFunction(name, "--data", DataError)


def open_own(name: str, offered: Mapping[str, Any], task: Task, *, is_held_out: bool) -> OwnData:
    """Make a user's data set.

    Args:
        name: value of --data.
        offered: arguments of which the factory takes those that it has. Every rank seeds Python,
            numpy and torch by its `seed` before the call, so that a random split is the same.

    Raises:
        DataError: the factory is missing or fails, or its samples do not fit the task.
    """
    before = RandomSources()
    seed_all(offered["seed"])
    try:
        built = factory_of(name).call(offered)
    finally:
        before.restore()
    pair = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
    samples = pair[is_held_out]
    if is_held_out and samples is None:
        raise DataError(
            f"--evaluate measures held-out samples, --data {name!r} returned an object of type "
            f"{type(built).__name__}: return a pair (trained by, held out)"
        )
    return OwnData(f"--data {name!r}", samples, task, offered["seed"])


class OwnData(BatchedData):
    """Batches of a user's samples, in the order of a task's inputs.

    Sample i of epoch e has the number e * length + i. If reading samples draws random numbers, as
    augmentation does, the generators are seeded by the sample's number before. So all ranks and
    strategies, and a run that is resumed, read a sample alike; training's own numbers stay.

    Args:
        name: subject of errors: what the user calls the data.
        samples: has a length and samples by index; a sample depends on its index only, and on
            random numbers of torch, Python and numpy.
        seed: of the random numbers that reading draws.

    Raises:
        DataError: it has no length or samples by index, or the first does not fit the task.
    """

    def __init__(self, name: str, samples: Any, task: Task, seed: int = 0) -> None:
        self._name, self._samples, self._task, self._seed = name, samples, task, seed
        self._is_drawn = self._is_recounted = False
        self._specs = (*task.inputs, *task.labels)
        self._names = {spec.name for spec in self._specs}
        names = [spec.name for spec in self._specs]
        places = [int(name[6:]) for name in names if re.fullmatch(r"input_\d+", name)]
        is_tuple = len(places) == len(names)  # the example is, labels included
        self._order = [sorted(places).index(k) for k in places] if is_tuple else range(len(names))
        self._n_counted: dict[int, int] = {}
        is_indexed = hasattr(samples, "__len__") and hasattr(samples, "__getitem__")
        if not is_indexed or isinstance(samples, IterableDataset):
            raise DataError(
                f"{name} is of type {type(samples).__name__}, which has no length or no samples "
                "by index: each rank takes its samples by index, so give a map-style Dataset"
            )
        try:
            n_samples = len(samples)
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(first_line(error))}"
            raise DataError(f"{name} does not tell its length ({reason}): mend it") from error
        if n_samples:
            before = RandomSources()
            self._look_at(self._fetch([0])[0])
            probes = [0, n_samples // 2, n_samples - 1]
            self._fetch(probes[1:])
            self._is_drawn = before.digests() != RandomSources().digests()
            before.restore()
            if self._is_drawn and self._is_masked:
                epochs = [[k + epoch * n_samples for k in probes] for epoch in range(_N_EPOCHS)]
                self._is_recounted = len({tuple(map(self._count, each)) for each in epochs}) > 1

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, numbers: list[int]) -> Batch:
        found, indices = self._fetch(numbers), [number % len(self) for number in numbers]
        rows = [self._tensors(index, one) for index, one in zip(indices, found, strict=True)]
        columns = [torch.stack(column) for column in zip(*rows, strict=True)]
        for spec, column in zip(self._specs, columns, strict=True):
            if spec.n_rows is not None:
                wrong = (column < 0) | (column >= spec.n_rows)
                problem = (
                    f" in {spec.name}, and the model's embedding has {spec.n_rows} rows: give "
                    f"numbers from 0 to {spec.n_rows - 1}, or the model a larger vocabulary"
                )
                self._refuse_numbers(indices, column, wrong, "", problem)
        inputs = tuple(columns[: len(self._task.inputs)])
        targets = self._task.targets_among(inputs)
        if targets is None:
            targets = self._task.join_labels(columns[len(inputs) :], len(indices))
        if counted := self._task.classes_of(targets):
            classes, n, ignored = counted
            wrong = ((classes < 0) | (classes >= n)) & (classes != ignored)
            hint = f", or {ignored} where none counts" if self._is_masked else ""
            problem = f", and the model has {n} classes: give labels from 0 to {n - 1}{hint}"
            self._refuse_numbers(indices, classes, wrong, "label ", problem)
        self._check_foreseen(indices, inputs, targets)
        if not self._is_masked:
            for index, target in zip(indices, targets.split(1), strict=True):
                if self._task.count_targets(target) != self._task.n_targets:
                    raise self._error(index, "has a label that does not count: drop the sample")
        return Batch(inputs, targets)

    def _refuse_numbers(
        self, indices: list[int], found: Tensor, wrong: Tensor, kind: str, problem: str
    ) -> None:
        """Refuse numbers that an embedding or the logits lack, which on a GPU would end the process
        unnamed."""
        if wrong.any():
            first = int(wrong.flatten().nonzero()[0])
            row, number = first * len(indices) // wrong.numel(), int(found.flatten()[first])
            raise self._error(indices[row], f"has {kind}{number}{problem}")

    def _check_foreseen(
        self, indices: list[int], inputs: Sequence[Tensor], targets: Tensor
    ) -> None:
        """Refuse labels that do not count where the loss was found to be a mean over samples."""
        if label := self._task.unforeseen(inputs, targets):
            raise self._error(
                indices[0],
                f"or one near it has {label}, and the example of the model has none: "
                "give the example such a label, so that the loss is that of whole batches",
            )

    @property
    def _is_masked(self) -> bool:
        """Whether a sample may have targets that do not count."""
        return bool(self._task.target_shape)

    def count_targets(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """Number of targets that count, of each sample. Where it may differ, samples are read, also
        on ranks that train by others: once, or in every epoch where augmentation changes it."""
        if not self._is_masked:
            return (self._task.n_targets,) * len(numbers)
        if self._is_recounted:
            return tuple(map(self._count, numbers))
        indices = [number % len(self) for number in numbers]
        for index in indices:
            if index not in self._n_counted:
                self._n_counted[index] = self._count(index)
        return tuple(self._n_counted[index] for index in indices)

    def _count(self, number: int) -> int:
        return self._task.count_targets(self.__getitems__([number]).targets)

    def checked(self, batches: Iterator[Batch], indices: Iterator[list[int]]) -> Iterator[Batch]:
        """Batches of some samples, whose targets that count are as many as `count_targets` found.

        Raises:
            DataError: they are not, so that the mean loss would be wrong.
        """
        for batch, own in zip(batches, indices, strict=False):
            for index, targets in zip(own, batch.targets.split(1), strict=True):
                n_found = self._task.count_targets(targets)
                if n_found != (n_counted := self._n_counted.get(index, n_found)):
                    raise self._error(
                        index,
                        f"has {n_found} labels that count, and had {n_counted} before: let it have "
                        "equally many in all epochs, or draw them from torch's, numpy's or "
                        "Python's global generator",
                    )
            yield batch

    def _error(self, index: int, problem: str) -> DataError:
        return DataError(f"sample {index} of {self._name} {problem}")

    def _fetch(self, numbers: list[int]) -> Sequence[Any]:
        indices, others = [number % len(self) for number in numbers], ""
        found: list[Any] = []
        try:
            if self._is_drawn:
                read: Iterable[Any] = self._drawn(numbers)
            elif hasattr(self._samples, "__getitems__"):
                others = "or another of its batch " if len(indices) > 1 else ""
                read = self._samples.__getitems__(indices)
            else:
                read = (self._samples[index] for index in indices)
            for sample in read:
                found.append(self._named(sample))
        except HarnessError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {one_line(first_line(error))}"
            problem = f"{others}cannot be read ({reason})"
            raise self._error(indices[len(found)], problem) from error
        return found

    def _drawn(self, numbers: list[int]) -> Iterator[Any]:
        """Samples whose reading draws random numbers."""
        before = RandomSources()
        try:
            for number in numbers:
                digest = hashlib.blake2b(f"{self._seed} {number}".encode(), digest_size=4)
                seed_all(int.from_bytes(digest.digest()))
                yield self._samples[number % len(self)]
        finally:
            before.restore()

    def _named(self, sample: Any) -> Any:
        """The values by name of a dict, or of a pair of a dict and the label."""
        is_pair = isinstance(sample, tuple | list) and len(sample) == 2
        if is_pair and isinstance(sample[0], Mapping) and not isinstance(sample[1], Mapping):
            sample = {**sample[0], _LABEL_NAMES[0]: sample[1]}
        return dict(self._flat(sample)) if isinstance(sample, Mapping) else sample

    def _flat(self, values: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        """A sample by name, where the example nests inputs in dicts and tuples."""
        for key, value in values.items():
            name = f"{prefix}{key}"
            has_parts = name not in self._names and any(
                known.startswith(f"{name}_") for known in self._names
            )
            parts = dict(enumerate(value)) if isinstance(value, tuple | list) else value
            if has_parts and isinstance(parts, Mapping):
                yield from self._flat(parts, f"{name}_")
            else:
                yield name, value

    def _look_at(self, sample: Any) -> None:
        """Check the first sample; tell of what the model does not read."""
        tensors = self._tensors(0, sample)
        inputs, labels = tensors[: len(self._task.inputs)], tensors[len(self._task.inputs) :]
        if isinstance(sample, Mapping):
            unread = sample.keys() - {spec.name for spec in self._specs} - {self._label(sample)}
            if unread:
                _log.warning(
                    "%s: the model does not read %s: where it should, add it to the example of the "
                    "model", self._name, ", ".join(sorted(map(str, unread))),
                )  # fmt: skip
        is_shifted = self._task.loss == "own" or not self._task.target_shape
        if not is_shifted and any(torch.equal(x, y) for x in inputs for y in labels):
            _log.warning(
                "%s: the labels of sample 0 are an input, and the loss does not shift them: where "
                "the model computes a loss, add labels to the example of the model", self._name
            )  # fmt: skip

    def _label(self, sample: Mapping[str, Any]) -> str:
        """The name of the label in a dict, where the model gives it none."""
        known = [name for name in _LABEL_NAMES if name in sample]
        others = sample.keys() - {spec.name for spec in self._task.inputs}
        return known[0] if known else str(next(iter(others))) if len(others) == 1 else "labels"

    def _values(self, index: int, sample: Any) -> Iterable[Any]:
        if isinstance(sample, Mapping):
            names = [spec.name or self._label(sample) for spec in self._specs]
            if missing := [name for name in names if name not in sample]:
                raise self._error(
                    index,
                    f"has {', '.join(map(str, sample))}, and the model takes {', '.join(names)}: "
                    f"add {missing[0]}, or leave it out of the example of the model",
                )
            return [sample[name] for name in names]
        if isinstance(sample, tuple | list) and len(sample) == len(self._specs):
            return [sample[k] for k in self._order]
        n_given = f" of length {len(sample)}" if isinstance(sample, tuple | list) else ""
        places = sorted(range(len(self._specs)), key=self._order.__getitem__)
        names = [self._specs[k].name or "label" for k in places]
        raise self._error(
            index,
            f"is of type {type(sample).__name__}{n_given}, and the model takes {len(names)} "
            f"({', '.join(names)}): return a dict of them by name, or a tuple in this order",
        )

    def _tensors(self, index: int, sample: Any) -> list[Tensor]:
        pairs = zip(self._specs, self._values(index, sample), strict=True)
        return [self._tensor(index, spec, value) for spec, value in pairs]

    def _tensor(self, index: int, spec: InputSpec, value: Any) -> Tensor:
        name = spec.name or "label"
        try:
            tensor = torch.as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise self._error(
                index,
                f"has {name} of type {type(value).__name__}, which makes no tensor "
                f"({one_line(str(error))}): return a tensor, numbers or an array of native byte "
                "order",
            ) from error
        otherwise = f"let the model {'take it' if spec.name else 'return a loss of its own'}"
        if tuple(tensor.shape) != spec.shape:
            raise self._error(
                index,
                f"has {name} of shape {tuple(tensor.shape)}, and the model takes {spec.shape}: "
                f"pad, cut or resize it in the data set, or {otherwise}",
            )
        is_binary = not spec.name and self._task.loss == "binary_cross_entropy"
        if is_binary and not ((tensor == 0) | (tensor == 1)).all():
            raise self._error(
                index,
                f"has label {shorten(value)}, and the loss of one logit is the binary cross "
                f"entropy: give labels of 0 and 1, or {otherwise}",
            )
        is_alike = is_binary or _is_real(tensor.dtype) == _is_real(spec.dtype)
        if tensor.dtype != spec.dtype and not is_alike:
            raise self._error(
                index,
                f"has {name} of {tensor.dtype} ({shorten(value)}), and the model takes "
                f"{spec.dtype}: convert it in the data set, or {otherwise}",
            )
        found = tensor.to(spec.dtype)
        if not _is_real(spec.dtype):
            given = tensor.long()
            if (wrong := found.long() != given).any():
                raise self._error(
                    index,
                    f"has {name} {given[wrong][0]}, which {spec.dtype} of the model's example "
                    "cannot hold: give the example a wider dtype",
                )
        return found


def _is_real(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


class PaddedData(BatchedData):
    """The first samples of a data set in whole batches, filled with its sample 0; if any were, one
    more batch has that sample alone, by which its part of the loss can be subtracted.

    Attributes:
        n_filled: how often sample 0 fills a batch.
    """

    def __init__(self, data: BatchedData, n_samples: int, batch: int) -> None:
        self._data, self._n_samples = data, n_samples
        self.n_filled = -n_samples % batch
        self._length = n_samples + self.n_filled + (batch if self.n_filled else 0)

    def __len__(self) -> int:
        return self._length

    def __getitems__(self, indices: list[int]) -> Batch:
        return self._data.__getitems__([k if k < self._n_samples else 0 for k in indices])
