"""Whether a model's loss of a batch is made up of the losses of its samples.

A few samples with random outputs and labels are computed together and one by one. A loss may leave
out some labels or weight them, so labels get such special values too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from harness.errors import first_line
from harness.runtime.models.own_loss import Call, OwnLoss, Slot, join, slots_in
from harness.runtime.models.task import IGNORED

# Drawing and comparing more takes seconds on every rank.
_LARGEST_CHECKED = 1 << 24  # elements
_CLASS_LOSSES = {F.cross_entropy, F.nll_loss}
_MEANS = {
    F.cross_entropy, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss,
    F.binary_cross_entropy_with_logits,
}  # fmt: skip
_COMPARISONS = (
    "eq", "ne", "lt", "le", "gt", "ge", "__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__",
)  # fmt: skip
# What may be computed of a mean; "abs" or "clamp" bends it, maybe not where random outputs are.
_LINEAR = {
    "add", "iadd", "radd", "sub", "isub", "rsub", "neg", "mul", "imul", "rmul", "div", "idiv",
    "truediv", "itruediv", "mean", "sum", "stack", "cat", "view", "reshape", "squeeze", "unsqueeze",
    "getitem", "clone", "contiguous", "to", "type", "type_as", "float", "double", "nan_to_num",
}  # fmt: skip
_TOLERANCE = 1e-5  # of a loss in float64, of which parts may be in fp32
_N_CHECKED = 4  # samples


def flaw_of(own: OwnLoss) -> str:
    """Why no part of a batch can compute its share of a loss; empty if it can."""
    if n_too_many := _too_many(own):
        too_many = f"its outputs have {n_too_many} numbers a sample, too many to check its parts"
        return "" if _is_of_means(own, own.result) else too_many
    for call in own.calls:
        if call.function in _CLASS_LOSSES:
            options = call.arguments
            if options["weight"] is not None and options["reduction"] == "mean":
                return f"its {call.name} has weights of classes"
    # Some losses take labels of the outputs' dtype alone.
    given = tuple(
        replace(s, dtype=torch.float64) if s.dtype.is_floating_point else s for s in own.labels
    )
    # Labels of an example may be alike, as masks of ones are; others need not be legal.
    free = tuple(replace(s, rows=None, n_values=s.n_values and max(2, s.n_values)) for s in given)
    known, other = replace(own, labels=given), replace(own, labels=free)
    ignored = {k: s.ignored for k, s in enumerate(given) if s.ignored is not None}
    flaw = _flaw(known, {}, is_legal=True) or _bend(known) or _flaw(other, {})
    if ignored and not flaw:
        flaw = _flaw(known, ignored, is_legal=True)
    if flaw or _is_of_means(own, own.result):
        return flaw
    inside = ({k: v} for k, v in _special_labels(own) if not _is_outside(own, k, v))
    return next(filter(None, (_flaw(known, special) for special in inside)), "")


def labels_left_out(own: OwnLoss) -> tuple[tuple[int, ...], ...]:
    """By label, values that no label of the example has, and of which a sample's share would
    differ."""
    if own.counted is not None:
        return ()
    found: list[list[int]] = [[] for _ in own.labels]
    for position, value in _special_labels(own):
        if _is_outside(own, position, value) and (_too_many(own) or _flaw(own, {position: value})):
            found[position].append(int(value))
    return tuple(map(tuple, found))


def _too_many(own: OwnLoss) -> int:
    """Numbers of a sample's outputs where they are too many to draw and compare."""
    n_each = sum(torch.Size(shape).numel() for shape in own.outputs.values())
    return n_each if _N_CHECKED * n_each > _LARGEST_CHECKED else 0


def _flaw(own: OwnLoss, special: Mapping[int, float], *, is_legal: bool = False) -> str:
    """Why a loss of random outputs, and of labels of which some have a special value, is not made
    up of its samples' losses.

    Args:
        is_legal: the labels are, so that the loss has to be a number.
    """
    draws, targets = _drawn(own)
    targets = _with_special(own, targets, special)
    flaw = "its loss is not finite for random outputs, so that its parts cannot be checked"
    # Outputs may have to be positive, or probabilities, for a loss that is a number.
    for outputs in (join(draws), join([draw.softmax(-1) for draw in draws])):
        try:
            pairs = zip(outputs.split(1), targets.split(1), strict=True)
            whole = own.sum(outputs, targets)
            parts = torch.stack([own.sum(*pair) for pair in pairs]).sum()
        except Exception as error:
            flaw = (
                f"its loss of {_N_CHECKED} samples, or of each by itself, cannot be computed "
                f"({first_line(error)})"
            )
            continue
        if torch.allclose(whole, parts, rtol=_TOLERANCE, atol=0):
            return ""
        if torch.isfinite(whole) and (torch.isfinite(parts) or special):
            return (
                f"its loss of {_N_CHECKED} samples together adds up to {whole:.4g}, of "
                f"each by itself to {parts:.4g}, so that it cannot be computed in parts"
            )
    return flaw if is_legal else ""


def _drawn(own: OwnLoss) -> tuple[list[Tensor], Tensor]:
    """Random outputs, and targets."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(_N_CHECKED, *shape) for shape in own.outputs.values()]
    draws = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    return draws, own.draw(_N_CHECKED, generator)


def _bend(own: OwnLoss) -> str:
    """Why a loss may be another function of a mean than a linear one; empty if it is none."""
    draws, targets = _drawn(own)
    means = set[Slot]()
    try:
        values = own.values(join(draws), targets)
    except Exception:  # it takes probabilities alone
        values = own.values(join([draw.softmax(-1) for draw in draws]), targets)
    for call in own.calls:
        read = slots_in((call.args, call.kwargs))
        if read and all(x in means or torch.numel(values[x]) == 1 for x in read):
            means |= slots_in(call.result)
            if call.name.strip("_") not in _LINEAR:
                return f"it computes {call.name} of a mean over samples"
    return ""


def _with_special(own: OwnLoss, targets: Tensor, special: Mapping[int, float]) -> Tensor:
    """Targets of which half of the first sample's have a value, by the label's position."""
    if not special:
        return targets
    labels = [label.clone() for label in own.labels_of(targets)]
    for position, value in special.items():
        first = labels[position][0].view(-1)
        first[: (len(first) + 1) // 2] = value
    return own.join_labels(labels)


def _special_labels(own: OwnLoss) -> Iterator[tuple[int, float]]:
    """Values that a loss may leave out or weight, each with the position of its label: the first
    and the last class, NaN, the class that does not count, and what values are compared with."""
    found = set[float]()
    for call in own.calls:
        compared = call.args if call.name in _COMPARISONS else ()
        for value in (x for x in compared if isinstance(x, int | float)):
            found |= {value} if value == IGNORED else {value - 1, value, value + 1}
        if call.function in _CLASS_LOSSES:
            found.add(call.arguments["ignore_index"])
    for position, spec in enumerate(own.labels):
        if spec.n_values is None:
            yield from ((position, value) for value in {*found, 0.0, math.nan})
        elif spec.dtype != torch.bool:
            held = torch.iinfo(spec.dtype)
            whole = {int(x) for x in found if held.min <= x <= held.max}
            yield from ((position, value) for value in sorted(whole | {0, spec.n_values - 1}))


def _is_outside(own: OwnLoss, position: int, value: float) -> bool:
    """Whether an integer is none of the example's."""
    n_values = own.labels[position].n_values
    return n_values is not None and not 0 <= value < n_values


def _is_of_means(own: OwnLoss, slot: Slot) -> bool:
    """Whether a value is a mean over samples by its form: one of torch's losses, a multiple or,
    where all samples count, a sum of such."""
    makers = [call for call in own.calls if slot in slots_in((call.result, call.written))]
    if len(makers) != 1:
        return False
    (call,) = makers
    if call.function in _MEANS:
        if own.counted is not None:
            return call.function is F.cross_entropy
        given = call.arguments
        all_count = not any(map(_is_selection, own.calls))
        if call.function is F.cross_entropy:
            all_count = all_count and given["ignore_index"] == IGNORED
            all_count = all_count and all(spec.ignored is None for spec in own.labels)
        return all_count and given["reduction"] == "mean" and given.get("weight") is None
    parts = slots_in((call.args, call.kwargs))
    is_multiple = call.name in ("mul", "div") and len(parts) == 1 and call.args[0] in parts
    is_sum = call.name in ("add", "sub") and own.counted is None
    return (is_multiple or is_sum) and all(_is_of_means(own, part) for part in parts)


def _is_selection(call: Call) -> bool:
    """Whether values may choose how many elements a call returns."""
    is_indexed = call.name == "__getitem__" and bool(slots_in(call.args[1:]))
    return is_indexed or call.name == "masked_select"
