"""Gradient hooks of parameters, run once per step on the summed gradient.

Autograd would run them separately on the gradient of each microbatch and device.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from harness.runtime.executor.geometry.slices import WeightSlice

Hook = Callable[[Any], Any]


class ParameterHooks:
    """Removes the hooks of a model's parameters, and runs them when gradients are complete.

    Operators that use such a parameter are never cut along the parameter's dims.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before: dict[str, list[Hook]] = {}
        self._after: dict[str, list[Hook]] = {}
        for name, parameter in model.named_parameters():
            self._before[name] = _take_hooks(parameter._backward_hooks)
            self._after[name] = _take_hooks(parameter._post_accumulate_grad_hooks)

    def first(self) -> str | None:
        """The name of a parameter with a hook; None if there is none."""
        return next(
            (name for name in self._before if self._before[name] or self._after[name]), None
        )

    @torch.no_grad()
    def run(self, parameters: Mapping[WeightSlice, nn.Parameter]) -> None:
        """Run the hooks of each parameter; hooks that may replace the gradient come first."""
        for piece, parameter in parameters.items():
            if parameter.grad is None:
                continue
            for hook in self._before.get(piece.name, ()):
                replaced = hook(parameter.grad)
                if replaced is not None and replaced is not parameter.grad:
                    parameter.grad.copy_(replaced)  # in place, because buckets refer to it
            for hook in self._after.get(piece.name, ()):
                hook(parameter)


def _take_hooks(hooks: Any) -> list[Hook]:
    found = list(hooks.values()) if hooks else []
    if hooks:
        hooks.clear()
    return found
