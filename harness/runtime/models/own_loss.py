"""The loss that a model computes itself, as a function of its outputs and the labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from harness.runtime.models.task import IGNORED, InputSpec, Task, Wrapper, logits_of, wide

# Functions of the numbers of classes, and those that change a label's shape or dtype alone.
_OF_CLASSES = {"cross_entropy", "nll_loss", "multi_margin_loss", "one_hot", "gather", "scatter_"}
_SAME = {"long", "to", "view", "reshape", "squeeze", "unsqueeze", "flatten", "__getitem__"}


class Call(NamedTuple):
    """A call of one of torch's functions.

    Attributes:
        written: known tensors whose memory it changes.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    written: Sequence[Any] = ()

    @property
    def name(self) -> str:
        """The function's."""
        return str(getattr(self.function, "__name__", ""))

    @property
    def arguments(self) -> dict[str, Any]:
        """By name, with defaults."""
        bound = inspect.signature(self.function).bind(*self.args, **self.kwargs)
        bound.apply_defaults()
        return dict(bound.arguments)


@dataclass(frozen=True)
class Slot:
    """Stands for a tensor in a call."""

    number: int


@dataclass(frozen=True)
class SampleCount:
    """Stands for a multiple of the number of samples in a call."""

    factor: int


@dataclass(frozen=True, kw_only=True, repr=False)
class OwnLoss:
    """A model's loss as a function of its outputs and the labels.

    Attributes:
        outputs: shapes, without the sample dim, of the outputs that it reads, by name.
        labels: several are flattened and concatenated, as float64 if their dtypes differ; and so
            are several outputs.
        calls: in order; slots stand for tensors, the first ones for outputs and labels, and a
            SampleCount for a number that grows with the samples.
        result: the loss's slot.
        counted: the slot of classes, their number and the class that does not count, of the only
            cross entropy, which `calls` sum up; None if the loss is a mean over samples.
        left_out: by label, values that do not count as others do, of which the example has none.
    """

    outputs: dict[str, tuple[int, ...]]
    labels: tuple[InputSpec, ...]
    calls: tuple[Call, ...]
    result: Slot
    counted: tuple[Slot, int, int] | None
    left_out: tuple[tuple[int, ...], ...] = ()

    def __deepcopy__(self, memo: object) -> OwnLoss:
        return self

    def __repr__(self) -> str:
        steps = [f"{c.name} {c.args} {c.kwargs}" for c in self.calls]
        return f"{self.outputs} {self.labels} {steps} {self.result}"

    @property
    def target_shape(self) -> tuple[int, ...]:
        """Of one sample's targets."""
        if len(self.labels) == 1:
            return self.labels[0].shape
        return (sum(torch.Size(s.shape).numel() for s in self.labels),) if self.labels else ()

    @property
    def target_dtype(self) -> torch.dtype:
        dtypes = {spec.dtype for spec in self.labels}
        return torch.float64 if len(dtypes) > 1 else next(iter(dtypes), torch.int64)

    @property
    def has_classes(self) -> bool:
        """Whether it takes the label as the number of a class."""
        alike = {Slot(len(self.outputs))}
        for call in self.calls:
            read = slots_in((call.args, call.kwargs)) & alike
            if read and call.name in _OF_CLASSES:
                return True
            if read and call.name in _SAME:
                alike |= slots_in(call.result)
        return False

    def join_labels(self, labels: Sequence[Tensor]) -> Tensor:
        """Labels as targets."""
        is_mixed = len({spec.dtype for spec in self.labels}) > 1
        return join([x.to(torch.float64) for x in labels] if is_mixed else labels)

    def labels_of(self, targets: Tensor) -> list[Tensor]:
        """Undo `join_labels`."""
        found = separate(targets, [spec.shape for spec in self.labels])
        pairs = zip(found, self.labels, strict=True)
        return [x.to(spec.dtype) if x.dtype == torch.float64 else x for x, spec in pairs]

    def values(self, outputs: Tensor, targets: Tensor) -> dict[Slot, Any]:
        """Of all slots."""
        read = separate(wide(outputs), list(self.outputs.values()))
        return _run(self.calls, (*read, *self.labels_of(targets)), outputs.device)

    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The model's loss times the number of targets that count, or of samples."""
        found: Tensor = self.values(outputs, targets)[self.result]
        return found.reshape(()) * (1 if self.counted else len(targets))

    def count(self, targets: Tensor) -> int:
        """Number of targets that count, or of samples."""
        found = self.classes_of(targets)
        return len(targets) if found is None else int((found[0] != found[2]).sum())

    def classes_of(self, targets: Tensor) -> tuple[Tensor, int, int] | None:
        """As `Task.classes_of`."""
        if self.counted is None:
            return None
        slot, n_classes, ignored = self.counted
        before, wanted = [], {slot}
        for call in reversed(self.calls):
            if wanted & slots_in((call.result, call.written)):
                before.append(call)
                wanted |= slots_in((call.args, call.kwargs))
        given = (*[None] * len(self.outputs), *self.labels_of(targets))
        return _run(before[::-1], given, targets.device)[slot], n_classes, ignored

    def unforeseen(self, targets: Tensor) -> str:
        """As `Task.unforeseen`."""
        if any(self.left_out):
            labels = zip(self.labels, self.labels_of(targets), self.left_out, strict=True)
            for spec, label, values in labels:
                for value in values:
                    if (label == value).any():
                        return f"{spec.name} of {value}"
        return ""

    def draw(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw random targets, which all count."""
        drawn = [spec.draw(n_samples, generator) for spec in self.labels]
        return self.join_labels(drawn) if drawn else torch.zeros(n_samples, dtype=torch.int64)


@dataclass(frozen=True, kw_only=True)
class LabelledTask(Task):
    """A task whose loss the model defines.

    Attributes:
        positions: of the labels among the inputs, if the model reads them for more than its loss.
    """

    own_loss: OwnLoss
    positions: tuple[int, ...] = ()

    @property
    def n_targets(self) -> int:
        return self.own_loss.count(self.own_loss.draw(1))

    @property
    def has_classes(self) -> bool:
        shapes = [*self.own_loss.outputs.values()]
        is_row = len(shapes) == 1 and len(shapes[0]) == 1 and shapes[0][0] > 1
        return super().has_classes and is_row and self.own_loss.has_classes

    @property
    def target_dtype(self) -> torch.dtype:
        return self.own_loss.target_dtype

    def draw_targets(self, n_samples: int, *, generator: torch.Generator | None = None) -> Tensor:
        return self.own_loss.draw(n_samples, generator)

    @property
    def labels(self) -> tuple[InputSpec, ...]:
        return () if self.positions else self.own_loss.labels

    def join_labels(self, labels: Sequence[Tensor], n_samples: int) -> Tensor:
        if not labels:
            return self.own_loss.draw(n_samples)
        return self.own_loss.join_labels(labels)

    def targets_among(self, inputs: Sequence[Tensor]) -> Tensor | None:
        labels = [inputs[k] for k in self.positions]
        return self.own_loss.join_labels(labels) if labels else None

    def count_targets(self, targets: Tensor) -> int:
        return self.own_loss.count(targets)

    def classes_of(self, targets: Tensor) -> tuple[Tensor, int, int] | None:
        return self.own_loss.classes_of(targets)

    def unforeseen(self, inputs: Sequence[Tensor], targets: Tensor) -> str:
        return self.own_loss.unforeseen(targets)

    def sum_loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return self.own_loss.sum(logits_of(outputs), targets)

    def for_metrics(self, outputs: Tensor, targets: Tensor) -> tuple[Any, Any]:
        own, labels = self.own_loss, self.own_loss.labels_of(targets)
        read = separate(outputs, list(own.outputs.values()))
        named = dict(zip([spec.name for spec in own.labels], labels, strict=True))
        return (
            dict(zip(own.outputs, read, strict=True)) if len(read) > 1 else outputs,
            named if len(labels) > 1 else targets,
        )


class BatchLoss(Wrapper):
    """Returns a model's loss of the whole batch, once for each sample.

    Args:
        reason: why the loss stays in the model.
    """

    def __init__(self, model: nn.Module, reason: str) -> None:
        super().__init__(model)
        self.reason = reason

    def forward(self, *inputs: Tensor) -> Tensor:
        loss: Tensor = self.model(*inputs)
        return loss.reshape(1).expand(inputs[0].shape[0])


@dataclass(frozen=True, kw_only=True)
class BatchLossTask(Task):
    """A task whose model is a BatchLoss; no operator reads its targets.

    Attributes:
        reason: why the loss stays in the model.
    """

    reason: str

    @property
    def labels(self) -> tuple[InputSpec, ...]:
        return ()

    def join_labels(self, labels: Sequence[Tensor], n_samples: int) -> Tensor:
        return self.draw_targets(n_samples)

    def draw_targets(self, n_samples: int, *, generator: torch.Generator | None = None) -> Tensor:
        return torch.zeros(n_samples, dtype=torch.int64)

    def unforeseen(self, inputs: Sequence[Tensor], targets: Tensor) -> str:
        pairs = zip(self.inputs, inputs, strict=True)
        found = (f"{spec.name} of {IGNORED}" for spec, x in pairs if spec.is_unforeseen(x))
        return next(found, "")

    def sum_loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return wide(logits_of(outputs)).sum()


def join(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors of equally many samples; one alone keeps its shape."""
    if len(tensors) == 1:
        return tensors[0]
    return torch.cat([tensor.reshape(tensor.shape[0], -1) for tensor in tensors], dim=1)


def separate(joined: Tensor, shapes: Sequence[tuple[int, ...]]) -> list[Tensor]:
    """Undo `join`."""
    if len(shapes) < 2:
        return [joined][: len(shapes)]
    sizes = [torch.Size(shape).numel() for shape in shapes]
    parts = joined.split(sizes, dim=1)
    pairs = zip(parts, shapes, strict=True)
    return [part.reshape(-1, *shape).contiguous() for part, shape in pairs]


def slots_in(value: Any) -> set[Slot]:
    """The slots in the arguments or the result of a call."""
    return {leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Slot)}


def _run(calls: Sequence[Call], given: Sequence[Any], device: torch.device) -> dict[Slot, Any]:
    """Repeat calls; returns the values of slots. What is given keeps its values."""
    values: dict[Slot, Any] = {Slot(k): value for k, value in enumerate(given)}
    written = slots_in([call.written for call in calls]) & values.keys()
    values |= {slot: values[slot].clone() for slot in written}
    n_samples = next(len(value) for value in given if value is not None)

    def filled(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return device
        if isinstance(leaf, SampleCount):
            return leaf.factor * n_samples
        return values[leaf] if isinstance(leaf, Slot) else leaf

    for call in calls:
        args, kwargs = pytree.tree_map(filled, (call.args, call.kwargs))
        found = pytree.tree_leaves(call.function(*args, **kwargs))
        slots = pytree.tree_leaves(call.result)
        values |= {s: x for s, x in zip(slots, found, strict=True) if isinstance(s, Slot)}
    return values
