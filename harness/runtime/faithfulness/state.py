"""State that forward changes: restored after a run, and hidden from a graph.

Two batches of equal weights do not show hidden state: parameters that average others, and counts
that choose another computation in a later step.
"""

from __future__ import annotations

import copy
import itertools
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from harness.runtime.devices.precision import has_gradients
from harness.runtime.devices.random_sources import RandomSources
from harness.runtime.engines.replicas import fingerprint
from harness.runtime.models.closures import Closure

_DEEPEST, _MOST_ENTRIES, _MOST_CONTAINERS = 3, 1000, 100_000
_CONTAINERS = (dict, list, OrderedDict, defaultdict)  # others may have an access of their own
_OF_MODULES = ("_parameters", "_buffers", "_modules")
_FEW = 16
_RESTORED = (dict, list, set)


def simple_attributes(module: nn.Module) -> dict[str, Any]:
    """A module's attributes that are numbers, strings, or lists of those."""

    def is_simple(value: Any) -> bool:
        if isinstance(value, tuple | list):
            return all(map(is_simple, value))
        return isinstance(value, bool | int | float | str | None)

    return {name: value for name, value in vars(module).items() if is_simple(value)}


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, dict) and [*container] == [*content]:
        pairs = zip(container.values(), content.values(), strict=True)
        if all(now is before for now, before in pairs):  # a frozen dict allows no change
            return
    container.clear()
    if isinstance(container, list):
        container.extend(content)
    else:
        container.update(content)


@contextmanager
def preserved(*roots: nn.Module) -> Iterator[None]:
    """Restore what forward and backward may change of modules, except parameter values, and random
    states at the block's end, also after an error; the block starts without gradients.

    Containers and tensors are restored in place, so that references to them stay valid.
    """
    modules = {id(module): module for root in roots for module in root.modules()}
    kept = []
    for module in modules.values():
        attributes = dict(module.__dict__)
        contents = {k: v.copy() for k, v in attributes.items() if isinstance(v, _RESTORED)}
        kept.append((module, attributes, contents))
    held = (x for m in modules.values() for x in (*m._buffers.values(), *m.__dict__.values()))
    plain = {id(x): x for x in held if isinstance(x, Tensor) and x.is_leaf}
    values = [(tensor, tensor.detach().clone()) for tensor in plain.values()]
    gradients = [(p, p.grad) for root in roots for p in root.parameters()]
    random_states = RandomSources()
    for root in roots:
        root.zero_grad(set_to_none=True)
    try:
        yield
    finally:
        for module, attributes, contents in kept:
            module.__dict__.clear()
            module.__dict__.update(attributes)
            for name, content in contents.items():
                _refill(attributes[name], content)
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        for parameter, gradient in gradients:
            parameter.grad = gradient
        random_states.restore()


def writes_copies(model: nn.Module, forward: Callable[[], object]) -> bool:
    """Whether forward writes a parameter that is a copy of another, as that of a teacher, whose
    average with the other has the same value until the first step. Restores the model."""
    copies = _copied_parameters(model)
    if not copies:
        return False
    values = [parameter.detach().clone() for parameter in copies]
    try:
        with preserved(model):
            with torch.no_grad():
                for parameter in copies:
                    parameter.add_(0.01 * torch.randn_like(parameter))
            before = fingerprint(model)
            forward()
            return not torch.equal(before, fingerprint(model))
    finally:
        with torch.no_grad():
            for parameter, value in zip(copies, values, strict=True):
                parameter.copy_(value)


def _copied_parameters(model: nn.Module) -> list[Tensor]:
    """Parameters that are copies of an earlier one, or nearly; constants, as in fresh norms, are
    left out. Few elements are compared first, because layers have equal shapes."""
    alike: dict[tuple[Any, ...], list[Tensor]] = {}
    found: list[Tensor] = []
    for parameter in model.parameters():
        values = parameter.detach()
        if not values.numel() or not has_gradients(values):
            continue
        if bool((values == values.flatten()[0]).all()):
            continue
        earlier = alike.setdefault((values.shape, values.dtype, values.device), [])
        if any(_is_near(one, values) for one in earlier):
            found.append(parameter)
        earlier.append(values)
    return found


def _is_near(one: Tensor, other: Tensor) -> bool:
    pairs = ((one.flatten()[:_FEW], other.flatten()[:_FEW]), (one, other))
    return all(bool((a - b).abs().max() <= 1e-3 * a.abs().max()) for a, b in pairs)


@dataclass(frozen=True, kw_only=True)
class Counter:
    """A number that forward may change.

    Attributes:
        name: of the module and its attribute, or of the function and its variable.
        container: a dict, a list, a closure's cell, or a class with the number as an attribute.
    """

    name: str
    container: Any
    key: Any

    def read(self) -> Any:
        if isinstance(self.container, dict | list):
            return self.container[self.key]
        if isinstance(self.container, type):  # without calling descriptors
            return vars(self.container)[self.key]
        return self.container.cell_contents

    def write(self, value: Any) -> None:
        if isinstance(self.container, dict | list):
            self.container[self.key] = value
        else:
            setattr(self.container, self.key, value)


def counters(model: nn.Module, forward: Callable[[], object]) -> list[Counter]:
    """Numbers that forward changes each time, unlike the length of a cache: in attributes, in the
    containers and objects that they hold, and in closures, classes and global variables of the
    user's functions. Restores them."""
    found = [(each, number) for each in _numbers(model) if (number := _number(each)) is not None]
    with preserved(model):
        forward()
        changed = [(each, number) for each, number in found if _number(each) != number]
        first = [_number(each) for each, _ in changed]
        if changed:
            forward()
        pairs = zip(changed, first, strict=True)
        counts = [each for (each, _), number in pairs if _number(each) != number]
        for each, number in changed:
            _set(each, number)
        return counts


@contextmanager
def counted_on(found: Sequence[Counter], n_steps: int) -> Iterator[None]:
    """Set counters as after some more steps, and restore them."""
    numbers = [_number(each) for each in found]
    try:
        for each, number in zip(found, numbers, strict=True):
            _set(each, number + n_steps)
        yield
    finally:
        for each, number in zip(found, numbers, strict=True):
            _set(each, number)


def _number(counter: Counter) -> Any:
    """The number at a place now; None if there is none."""
    value = _value(counter)
    if isinstance(value, itertools.count):
        return next(copy.copy(value))
    is_scalar = isinstance(value, Tensor) and not value.requires_grad and value.numel() == 1
    if isinstance(value, Tensor):
        return value.item() if is_scalar and not value.is_meta else None
    return value if type(value) in (int, float) else None


def _set(counter: Counter, number: Any) -> None:
    value = counter.read()
    if isinstance(value, itertools.count):
        counter.write(itertools.count(number))
    elif isinstance(value, Tensor):
        value.fill_(number)
    else:
        counter.write(number)


def _numbers(model: nn.Module) -> Iterator[Counter]:
    """All places with numbers that a forward of the user's code can reach."""
    modules = list(model.named_modules())
    waiting: list[tuple[str, Any, int]] = [(path, vars(part), 0) for path, part in modules]
    for kind in dict.fromkeys(type(part) for _, part in modules):
        waiting += [(f.__qualname__, f, 0) for f in vars(kind).values() if _is_users(f)]
        waiting += [(kind.__name__, kind, 0)] if _is_users(kind) else []
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_CONTAINERS:
        name, holder, depth = waiting.pop()
        if id(holder) in seen:
            continue
        seen.add(id(holder))
        for key, container, inner_key in _entries(holder):
            one = Counter(name=f"{name}.{key}".lstrip("."), container=container, key=inner_key)
            if _number(one) is not None:
                yield one
            elif depth < _DEEPEST and (value := _value(one)) is not None and _is_searched(value):
                waiting.append((one.name, value, depth + 1))


def _entries(holder: Any) -> Iterator[tuple[Any, Any, Any]]:
    """What a holder contains: a name, the container, and the key in it."""
    if isinstance(holder, FunctionType):
        cells = zip(holder.__code__.co_freevars, holder.__closure__ or (), strict=True)
        yield from ((name, cell, "cell_contents") for name, cell in cells)
        names = [name for name in holder.__code__.co_names if name in holder.__globals__]
        yield from ((name, holder.__globals__, name) for name in names)
    elif isinstance(holder, type):
        yield from ((name, holder, name) for name in vars(holder) if not name.startswith("__"))
    elif isinstance(holder, list):
        yield from ((k, holder, k) for k in range(min(len(holder), _MOST_ENTRIES)))
    else:
        inside = holder if isinstance(holder, dict) else vars(holder)
        keys = itertools.islice(list(inside), _MOST_ENTRIES)
        yield from ((key, inside, key) for key in keys if key not in _OF_MODULES)


def _value(counter: Counter) -> Any:
    """What is at a place; None if nothing is any more, or in an empty cell."""
    try:
        return counter.read()
    except (LookupError, ValueError):
        return None


def _is_users(value: Any) -> bool:
    """Whether a function or class is of a user's module, not of PyTorch or this program."""
    module = str(getattr(value, "__module__", ""))
    is_code = isinstance(value, FunctionType | type)
    return is_code and module.partition(".")[0] not in ("torch", "harness", "builtins")


def _is_searched(value: Any) -> bool:
    if isinstance(value, nn.Module | Tensor | ModuleType):
        return False
    if isinstance(value, FunctionType | type):
        return isinstance(value, FunctionType) and _is_users(value)
    is_own = isinstance(value, Closure) or _is_users(type(value))
    is_object = is_own and hasattr(value, "__dict__")
    return type(value) in _CONTAINERS or is_object
