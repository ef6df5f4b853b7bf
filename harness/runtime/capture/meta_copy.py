"""Copy a model without the memory of its tensors: to the meta device, or into fake tensors."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

_META = torch.device("meta")

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def meta_copy(module: ModuleT) -> ModuleT:
    """Copy a module to the meta device; shared tensors stay shared.

    Never copies a tensor on its own device, where a second model may not fit and would raise the
    measured memory peak.
    """
    return copy.deepcopy(module, stand_ins(module, lambda tensor: tensor.detach().to(_META)))


def fake_copy(module: ModuleT, mode: FakeTensorMode) -> ModuleT:
    """Copy a module into fake tensors on its own device, or on the CPU if that is the meta device;
    shared tensors stay shared."""
    return copy.deepcopy(module, stand_ins(module, lambda tensor: fake(tensor, mode)))


def fake(tensor: Tensor, mode: FakeTensorMode) -> Tensor:
    """A fake tensor of the same layout and dtype, on the CPU for one on the meta device."""
    device = torch.device("cpu") if tensor.is_meta else tensor.device
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)


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
