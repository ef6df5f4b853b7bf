"""Copy a model without the memory of its tensors, for shape computations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

_META = torch.device("meta")

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def meta_copy(module: ModuleT) -> ModuleT:
    """Copy a module to the meta device; shared tensors stay shared.

    Never copies a tensor on its own device, where a second model may not fit and would raise the
    measured memory peak.
    """
    return copy.deepcopy(module, stand_ins(module, lambda tensor: tensor.detach().to(_META)))


def stand_ins(module: nn.Module, make: Callable[[Tensor], Tensor]) -> dict[int, object]:
    """The memo with which `deepcopy` replaces each tensor of a module by `make` of it."""
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(make(parameter), parameter.requires_grad)
        for parameter in module.parameters()
    }
    memo |= {id(buffer): make(buffer) for buffer in module.buffers()}
    # The old weight_norm stores its computed weight, which deepcopy refuses.
    for owner in module.modules():
        computed = (x for x in vars(owner).values() if isinstance(x, Tensor) and not x.is_leaf)
        memo |= {id(x): make(x) for x in computed}
    return memo
