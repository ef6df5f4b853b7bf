"""Hooks on gradients of parameters, run once a step on what has been added up.

Autograd would run them on the gradient of each microbatch and each device by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from harness.runtime.executor.geometry.slices import WeightSlice

Hook = Callable[[Any], Any]


class ParameterHooks:
    """Takes the hooks off a model's parameters, and runs them when their gradients are whole.

    Operators that use such a parameter are never cut along it.
    """

    def __init__(self, model: nn.Module) -> None:
        self._before: dict[str, list[Hook]] = {}
        self._after: dict[str, list[Hook]] = {}
        for name, parameter in model.named_parameters():
            self._before[name] = _taken(parameter._backward_hooks)
            self._after[name] = _taken(parameter._post_accumulate_grad_hooks)

    @torch.no_grad()
    def run(self, parameters: Mapping[WeightSlice, nn.Parameter]) -> None:
        """Hand each gradient to its parameter's hooks: first those that may replace it."""
        for piece, parameter in parameters.items():
            if parameter.grad is None:
                continue
            for hook in self._before.get(piece.name, ()):
                replaced = hook(parameter.grad)
                if replaced is not None and replaced is not parameter.grad:
                    parameter.grad.copy_(replaced)  # where buckets look for it
            for hook in self._after.get(piece.name, ()):
                hook(parameter)


def _taken(hooks: Any) -> list[Hook]:
    found = list(hooks.values()) if hooks else []
    if hooks:
        hooks.clear()
    return found
