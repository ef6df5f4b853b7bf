"""Split off the loss that a model computes itself, so that any strategy can compute it.

A run on fake tensors records the calls of torch's functions. Those that lead from the model's
outputs and the labels to the loss are repeated by `OwnLoss`; the labels become the targets, and the
model is trained without them. A loss that this cannot express stays inside the model.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from torch import Tensor
from torch.overrides import TorchFunctionMode

from harness.runtime.capture.saved import tensors_within
from harness.runtime.models.loss_parts import flaw_of, labels_left_out
from harness.runtime.models.own_loss import Call, OwnLoss, SampleCount, Slot
from harness.runtime.models.task import InputSpec, named_outputs

_READS = {"item", "tolist", "numpy", "equal", "allclose", "__bool__", "__float__", "__int__"}
_CHECKS = {"isfinite", "isinf", "isnan"}  # of which the branch for finite values is trained
_OTHER_COUNT = object()  # stands for a number of a call that is no multiple of that of samples


class CallRecorder(TorchFunctionMode):
    """Records the calls in its block."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._sharing: defaultdict[int, dict[int, Tensor]] = defaultdict(dict)  # by memory

    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = tensors_within((args, kwargs))
        versions = [0 if x.is_inference() else x._version for x in given]
        result = function(*args, **(kwargs or {}))
        for x in (*given, *tensors_within(result)):
            self._sharing[_memory(x)][id(x)] = x
        written: dict[int, Tensor] = {}
        for x, version in zip(given, versions, strict=True):
            if x is result if x.is_inference() else x._version != version:
                written |= self._sharing[_memory(x)]
        self.calls.append(Call(function, args, kwargs or {}, result, [*written.values()]))
        return result


def _memory(x: Tensor) -> int:
    """Of a tensor, or of itself if it has none of its own, as sparse ones."""
    return int(x.untyped_storage()._cdata) if torch._C._has_storage(x) else id(x)


class SplitLoss(NamedTuple):
    """A loss that is split off a model.

    Attributes:
        labels: their positions among the model's inputs.
        also_read: those that the outputs depend on too.
        before: the functions that lead from the inputs to the outputs that the loss reads.
    """

    loss: OwnLoss
    labels: tuple[int, ...]
    also_read: frozenset[int]
    before: tuple[Callable[..., Any], ...]

    def is_made_of(self, run: ModelRun) -> bool:
        """Whether a run without labels computed its outputs by the same functions."""
        named = named_outputs(run.output)
        read = [named.get(name) for name in self.loss.outputs]
        if not all(isinstance(x, Tensor) for x in read):
            return False
        found = _Trail(run.calls).to(read, (), run.given)  # type: ignore[arg-type]
        return self.before == _functions(run.calls, found)


def loss_name(output: Any) -> str | None:
    """The name of the loss among a model's outputs; in a tuple it is the only tensor without a dim
    that has a gradient."""
    named = named_outputs(output)
    if "loss" in named:
        loss = named["loss"]
        return "loss" if isinstance(loss, Tensor) and loss.numel() == 1 else None
    if type(output) is not tuple:
        return None
    tensors = {name: x for name, x in named.items() if isinstance(x, Tensor)}
    found = [name for name, x in tensors.items() if not x.dim() and x.requires_grad]
    return found[0] if len(found) == 1 and len(tensors) > 1 else None


class ModelRun(NamedTuple):
    """A run of a model: its output, its inputs and torch's calls."""

    output: Any
    given: Sequence[Tensor]
    calls: Sequence[Call]

    @property
    def n_samples(self) -> int:
        return len(self.given[0])

    def outputs(self, loss: str) -> dict[str, Tensor]:
        """The other outputs than the loss that have a row for each sample, each once; an input is
        none."""
        named = named_outputs(self.output)
        n, known = self.n_samples, {id(named[loss]), *map(id, self.given)}
        tensors = {key: x for key, x in named.items() if isinstance(x, Tensor)}
        first = {id(x): key for key, x in reversed(tensors.items()) if x.shape[:1] == (n,)}
        names = {key for place, key in first.items() if place not in known}
        return {key: x for key, x in tensors.items() if key in names}


def split_loss(
    name: str, run: ModelRun, specs: Sequence[InputSpec], rerun: Callable[[], ModelRun]
) -> SplitLoss | str:
    """Split off the loss of a model that was called on fake tensors.

    Returns a reason instead where the loss reads other values than outputs and inputs, or is no
    mean over samples.

    Args:
        name: of the loss among the outputs.
        specs: describe the model's inputs.
        rerun: runs the model with another number of samples.
    """
    again = rerun()
    outputs, others = run.outputs(name), again.outputs(name)
    outputs = {key: x for key, x in outputs.items() if key in others}
    given, trail = run.given, _Trail(run.calls)
    loss: Tensor = named_outputs(run.output)[name]
    found = trail.to([loss], outputs.values(), given)
    read = {key: x for key, x in outputs.items() if id(x) in found.ends}
    labels = tuple(k for k, x in enumerate(given) if id(x) in found.ends)
    if found.unknown or not read:
        return "its loss reads values that it does not return"
    ends = [others[key] for key in outputs]
    refound = _Trail(again.calls).to([named_outputs(again.output)[name]], ends, again.given)
    if _functions(run.calls, found) != _functions(again.calls, refound):
        return (
            f"its loss of {run.n_samples} samples is computed by other functions than that of "
            f"{again.n_samples}"
        )
    for call in (each for each in run.calls if each.name in _READS):
        path = trail.to(tensors_within(call.args), outputs.values(), given)
        is_check = any(run.calls[k].name in _CHECKS for k in path.calls)
        if not is_check and not path.ends.isdisjoint(map(id, read.values())):
            return f"its loss depends on values that {call.name.strip('_')}() reads"
    before = trail.to(read.values(), (), given)
    also_read = frozenset(k for k in labels if id(given[k]) in before.ends)
    kept = (*read.values(), *(given[k] for k in also_read))
    if any(trail.is_written_in(found, x) for x in kept):
        return "it changes in place what its loss reads"
    pairs = zip(sorted(found.calls), sorted(refound.calls), strict=True)
    sizes = run.n_samples, again.n_samples
    originals = [_with_counts(run.calls[k], again.calls[j], *sizes) for k, j in pairs]
    if any(x is _OTHER_COUNT for x in pytree.tree_leaves([call[1:3] for call in originals])):
        return (
            "its loss reads a number that depends on the number of samples, but not in proportion"
        )
    slots = {id(x): Slot(k) for k, x in enumerate((*read.values(), *(given[k] for k in labels)))}
    own_calls = [_with_slots(call, slots) for call in originals]
    # A cross entropy beside other terms is a mean over samples, as they are.
    flaws = []
    for steps, counted in (_summed(own_calls, originals), (own_calls, None)):
        own = OwnLoss(
            outputs={key: tuple(x.shape[1:]) for key, x in read.items()},
            labels=tuple(specs[k] for k in labels),
            calls=tuple(steps),
            result=slots[id(loss)],
            counted=counted,
        )
        flaws.append(flaw_of(own))
        if not flaws[-1]:
            break
    else:
        return flaws[0]
    own = replace(own, left_out=labels_left_out(own))
    return SplitLoss(own, labels, also_read, _functions(run.calls, before))


class _Found(NamedTuple):
    """What leads to a tensor: numbers of calls, tensors to stop at that were met, and others that
    no call made."""

    calls: set[int]
    ends: set[int]
    unknown: set[int]


class _Trail:
    """The calls that made or changed each tensor."""

    def __init__(self, calls: Sequence[Call]) -> None:
        self._calls = calls
        self._makers: defaultdict[int, list[int]] = defaultdict(list)
        self._writers: defaultdict[int, list[int]] = defaultdict(list)
        for number, call in enumerate(calls):
            given = tensors_within((call.args, call.kwargs))
            for key in {id(x) for x in tensors_within(call.result)} - {id(x) for x in given}:
                self._makers[key].append(number)
            for x in call.written:
                self._writers[id(x)].append(number)

    def to(
        self, goals: Iterable[Tensor], outputs: Iterable[Tensor], given: Iterable[Tensor]
    ) -> _Found:
        """What leads to tensors, going back to outputs, as they are returned, and inputs."""
        whole, stops = {id(x) for x in outputs}, {id(x) for x in given}
        found = _Found(set(), set(), set())
        waiting, seen = [id(x) for x in goals], set[int]()
        while waiting:
            key = waiting.pop()
            if key in seen:
                continue
            seen.add(key)
            if key in whole or key in stops:
                found.ends.add(key)
            elif not self._makers[key]:
                found.unknown.add(key)
            for number in () if key in whole else (*self._makers[key], *self._writers[key]):
                found.calls.add(number)
                call = self._calls[number]
                waiting += [id(x) for x in tensors_within((call.args, call.kwargs))]
        return found

    def is_written_in(self, found: _Found, x: Tensor) -> bool:
        """Whether a tensor is changed after the first call of a trail that reads it."""
        readers = (
            number
            for number in found.calls
            if any(x is y for y in tensors_within(self._calls[number][1:3]))
        )
        return max(self._writers[id(x)], default=-1) >= min(readers, default=math.inf)


def _functions(calls: Sequence[Call], found: _Found) -> tuple[Callable[..., Any], ...]:
    return tuple(calls[k].function for k in sorted(found.calls))


def _with_counts(call: Call, other: Call, n_samples: int, n_others: int) -> Call:
    """Replace numbers of a call that change with the samples, as the same call of another number of
    samples shows."""

    def count_of(one: Any, more: Any) -> Any:
        if type(one) is not type(more) or not isinstance(one, int | float) or one == more:
            return one
        is_multiple = one % n_samples == 0 and one * n_others == more * n_samples
        return SampleCount(int(one) // n_samples) if is_multiple else _OTHER_COUNT

    leaves, structure = pytree.tree_flatten((call.args, call.kwargs))
    others, other_structure = pytree.tree_flatten((other.args, other.kwargs))
    if structure != other_structure:
        return call
    counted = pytree.tree_unflatten(list(map(count_of, leaves, others)), structure)
    return call._replace(args=counted[0], kwargs=counted[1])


def _with_slots(call: Call, slots: dict[int, Slot]) -> Call:
    """Replace the tensors of a call; those that it makes get new slots."""

    def slot_of(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return slots.setdefault(id(leaf), Slot(len(slots)))

    args, kwargs = pytree.tree_map(slot_of, (call.args, call.kwargs))
    result = pytree.tree_map(slot_of, call.result)
    written = [slots[id(x)] for x in call.written if id(x) in slots]
    return Call(call.function, args, kwargs, result, written)


def _summed(
    calls: list[Call], originals: Sequence[Call]
) -> tuple[list[Call], tuple[Slot, int, int] | None]:
    """Let the only cross entropy sum over its targets; returns the slot of its targets, the number
    of classes and the class that does not count. None if there are others, classes have weights, or
    its targets are probabilities, of which all samples count.

    Args:
        originals: the calls with tensors in the place of slots.
    """
    places = [k for k, call in enumerate(calls) if call.function is F.cross_entropy]
    if len(places) != 1:
        return calls, None
    (place,) = places
    given = calls[place].arguments
    whole = originals[place].arguments
    if whole["target"].is_floating_point():
        return calls, None
    target, is_mean = given["target"], given["reduction"] == "mean"
    if not isinstance(target, Slot) or given["weight"] is not None or not is_mean:
        return calls, None
    changed = calls[place]._replace(args=(), kwargs=given | {"reduction": "sum"})
    found = [changed if k == place else call for k, call in enumerate(calls)]
    logits = whole["input"]
    return found, (target, logits.shape[min(1, logits.dim() - 1)], given["ignore_index"])
