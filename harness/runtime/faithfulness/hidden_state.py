"""State that forward keeps outside of a graph, and that two batches of equal weights do not show:
parameters that average others, and counts that choose another computation in a later step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from harness.runtime.devices.precision import has_gradients
from harness.runtime.engines.replicas import fingerprint
from harness.runtime.faithfulness.outcomes import preserved

Counter = tuple[str, str, Any]
"""Path of a module, the name of its attribute, and a key of that if it is a dict, else None."""

_FEW = 16


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
        if not values.numel() or not has_gradients(values) or _is_constant(values):
            continue
        earlier = alike.setdefault((values.shape, values.dtype, values.device), [])
        if any(_is_near(one, values) for one in earlier):
            found.append(parameter)
        earlier.append(values)
    return found


def _is_constant(values: Tensor) -> bool:
    return bool((values == values.flatten()[0]).all())


def _is_near(one: Tensor, other: Tensor) -> bool:
    pairs = ((one.flatten()[:_FEW], other.flatten()[:_FEW]), (one, other))
    return all(bool((a - b).abs().max() <= 1e-3 * a.abs().max()) for a, b in pairs)


def counters(model: nn.Module, forward: Callable[[], object]) -> list[Counter]:
    """Numbers in the modules' attributes that forward changes. Restores the model."""
    with preserved(model):
        before = _numbers(model)
        forward()
        return [key for key, value in _numbers(model).items() if before.get(key) != value]


def _numbers(model: nn.Module) -> dict[Counter, int | float]:
    return {
        (path, name, key): number
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        for key, number in (value if isinstance(value, dict) else {None: value}).items()
        if isinstance(number, int | float) and not isinstance(number, bool)
    }


def count_on(model: nn.Module, found: Sequence[Counter], n_steps: int) -> None:
    """Set counters as after some more steps."""
    for path, name, key in found:
        module = model.get_submodule(path)
        if key is None:
            setattr(module, name, getattr(module, name) + n_steps)
        else:
            getattr(module, name)[key] += n_steps
