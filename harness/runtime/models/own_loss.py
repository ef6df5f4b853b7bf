"""The loss that a model computes itself, as a function of its outputs and the labels."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor

from harness.errors import first_line
from harness.runtime.models.task import InputSpec, Task, Wrapper, logits_of, wide

# Drawing and comparing more takes seconds on every rank.
_LARGEST_CHECKED = 1 << 24  # elements
_MEANS = {
    F.cross_entropy, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
    F.binary_cross_entropy_with_logits,
}  # fmt: skip
_TOLERANCE = 1e-5  # of a loss in float64, of which parts may be in fp32
_N_CHECKED = 3  # samples


class Call(NamedTuple):
    """A call of one of torch's functions."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any

    @property
    def name(self) -> str:
        """The function's."""
        return str(getattr(self.function, "__name__", ""))


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
        counted: the slot of classes and the class that does not count, of the only cross entropy,
            which `calls` sum up; None if the model's loss is a mean over samples.
    """

    outputs: dict[str, tuple[int, ...]]
    labels: tuple[InputSpec, ...]
    calls: tuple[Call, ...]
    result: Slot
    counted: tuple[Slot, int] | None

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

    def join_labels(self, labels: Sequence[Tensor]) -> Tensor:
        """Labels as targets."""
        is_mixed = len({spec.dtype for spec in self.labels}) > 1
        return join([x.to(torch.float64) for x in labels] if is_mixed else labels)

    def _labels(self, targets: Tensor) -> list[Tensor]:
        """Undo `join_labels`."""
        found = separate(targets, [spec.shape for spec in self.labels])
        pairs = zip(found, self.labels, strict=True)
        return [x.to(spec.dtype) if x.dtype == torch.float64 else x for x, spec in pairs]

    def sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """The model's loss times the number of targets that count, or of samples."""
        read = separate(wide(outputs), list(self.outputs.values()))
        given = (*read, *self._labels(targets))
        found: Tensor = _run(self.calls, given, outputs.device)[self.result]
        return found.reshape(()) * (1 if self.counted else len(targets))

    def count(self, targets: Tensor) -> int:
        """Number of targets that count, or of samples."""
        if self.counted is None:
            return len(targets)
        slot, ignored = self.counted
        before, wanted = [], {slot}
        for call in reversed(self.calls):
            if wanted & slots_in(call.result):
                before.append(call)
                wanted |= slots_in((call.args, call.kwargs))
        given = (*[None] * len(self.outputs), *self._labels(targets))
        return int((_run(before[::-1], given, targets.device)[slot] != ignored).sum())

    def unforeseen(self, targets: Tensor) -> str:
        """As `Task.unforeseen`."""
        leaves_out = any(call.name in ("cross_entropy", "nll_loss") for call in self.calls)
        if self.counted is not None or not leaves_out:
            return ""
        for spec, label in zip(self.labels, self._labels(targets), strict=True):
            if spec.is_unforeseen(label):
                return spec.name
        return ""

    def draw(self, n_samples: int, generator: torch.Generator | None = None) -> Tensor:
        """Draw random targets, which all count."""
        drawn = [spec.draw(n_samples, generator) for spec in self.labels]
        return self.join_labels(drawn) if drawn else torch.zeros(n_samples, dtype=torch.int64)

    def flaw(self) -> str:
        """Why the loss of a batch is not made up of those of its samples, so that no part of a
        batch can compute its share; empty if it is."""
        shapes = [torch.Size((_N_CHECKED, *shape)) for shape in self.outputs.values()]
        n_elements = sum(shape.numel() for shape in shapes)
        if n_elements > _LARGEST_CHECKED:
            n_each = n_elements // _N_CHECKED
            too_many = f"its outputs have {n_each} numbers a sample, too many to check its parts"
            return "" if self._is_of_means(self.result) else too_many
        generator = torch.Generator().manual_seed(0)
        draws = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
        # Some losses take labels of the outputs' dtype alone.
        given = tuple(
            replace(s, dtype=torch.float64) if s.dtype.is_floating_point else s for s in self.labels
        )
        # Labels of an example may be alike, as masks of ones are; others need not be legal.
        free = tuple(
            replace(s, rows=None, n_values=s.n_values and max(2, s.n_values)) for s in given
        )
        forms = [(True, given, False), (False, free, False)]
        if any(spec.ignored is not None for spec in given):
            forms.append((True, given, True))
        for is_given, labels, is_masked in forms:
            drawn = replace(self, labels=labels)
            targets = drawn.draw(_N_CHECKED, generator)
            if is_masked:
                targets = drawn._with_ignored(targets)
            flaw = "its loss is not finite for random outputs, so that its parts cannot be checked"
            # Outputs may have to be positive, or probabilities, for a loss that is a number.
            for outputs in (join(draws), join([draw.softmax(-1) for draw in draws])):
                try:
                    pairs = zip(outputs.split(1), targets.split(1), strict=True)
                    whole = drawn.sum(outputs, targets)
                    parts = torch.stack([drawn.sum(*pair) for pair in pairs]).sum()
                except Exception as error:
                    reason = first_line(error)
                    flaw = f"its loss takes the example's number of samples only ({reason})"
                    continue
                if torch.allclose(whole, parts, rtol=_TOLERANCE, atol=0):
                    flaw = ""
                    break
                if torch.isfinite(whole) and torch.isfinite(parts):
                    return (
                        f"its loss of {_N_CHECKED} samples together adds up to {whole:.4g}, of "
                        f"each by itself to {parts:.4g}, so that it cannot be computed in parts"
                    )
            if flaw and is_given:
                return flaw
        return ""

    def _is_of_means(self, slot: Slot) -> bool:
        """Whether a value is a mean over samples by its form: one of torch's losses, a multiple or,
        where all samples count, a sum of such."""
        makers = [call for call in self.calls if slot in slots_in(call.result)]
        if len(makers) != 1:
            return False
        (call,) = makers
        if call.function in _MEANS:
            bound = inspect.signature(call.function).bind(*call.args, **call.kwargs)
            bound.apply_defaults()
            given = bound.arguments
            is_mean = given["reduction"] == "mean" and given.get("weight") is None
            if call.function is F.cross_entropy:
                all_count = all(spec.ignored is None for spec in self.labels)
                return self.counted is not None or (is_mean and all_count)
            return is_mean and self.counted is None
        parts = slots_in((call.args, call.kwargs))
        is_multiple = call.name in ("mul", "div") and len(parts) == 1 and call.args[0] in parts
        is_sum = call.name in ("add", "sub") and self.counted is None
        return (is_multiple or is_sum) and all(map(self._is_of_means, parts))

    def _with_ignored(self, targets: Tensor) -> Tensor:
        """Targets of which half do not count in the first sample, where an example has such."""
        labels = [label.clone() for label in self._labels(targets)]
        for spec, label in zip(self.labels, labels, strict=True):
            if spec.ignored is not None:
                first = label[0].view(-1)
                first[: (len(first) + 1) // 2] = spec.ignored
        return self.join_labels(labels)


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
        return super().has_classes and is_row

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

    def unforeseen(self, inputs: Sequence[Tensor], targets: Tensor) -> str:
        return self.own_loss.unforeseen(targets)

    def sum_loss(self, outputs: Any, targets: Tensor) -> Tensor:
        return self.own_loss.sum(logits_of(outputs), targets)


class BatchLoss(Wrapper):
    """Returns a model's loss of the whole batch, once for each sample."""

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
        return next((spec.name for spec, x in pairs if spec.is_unforeseen(x)), "")

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


def _run(calls: Iterable[Call], given: Sequence[Any], device: torch.device) -> dict[Slot, Any]:
    """Repeat calls; returns the values of slots."""
    values: dict[Slot, Any] = {Slot(k): value for k, value in enumerate(given)}
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
