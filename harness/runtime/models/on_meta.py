"""Build a model without memory for its weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from harness.runtime.tracing.patches import replaced


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Move each parameter to the meta device when a module registers it.

    Buffers and other tensors are real, because constructors read some of them
    (`torch.linspace(...).tolist()`) and a graph contains values that are computed from others.
    """
    register: Any = nn.Module.register_parameter

    def registered(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, parameter)
        if isinstance(parameter, nn.Parameter) and type(parameter) is nn.Parameter:
            _move(parameter)

    with replaced(nn.Module, "register_parameter", registered):
        yield


def _move(parameter: nn.Parameter) -> None:
    """Move a parameter in place, so that a second name of it stays tied."""
    if parameter.is_meta:
        return
    moved = nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
    torch.utils.swap_tensors(parameter, moved)
