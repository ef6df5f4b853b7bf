"""Copy a model to the meta device, for shape computations."""

from __future__ import annotations

import copy
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
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach().to(_META), parameter.requires_grad)
        for parameter in module.parameters()
    }
    memo |= {id(buffer): buffer.detach().to(_META) for buffer in module.buffers()}
    # The old weight_norm stores its computed weight, which deepcopy refuses.
    for owner in module.modules():
        computed = (x for x in vars(owner).values() if isinstance(x, Tensor) and not x.is_leaf)
        memo |= {id(x): x.detach().to(_META) for x in computed}
    return copy.deepcopy(module, memo)
