"""A copy of a model without memory, for what asks for its shapes alone."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor, nn

_META = torch.device("meta")

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def meta_copy(module: ModuleT) -> ModuleT:
    """A copy on the meta device; what several names share is shared there too.

    No tensor is copied where it is: beside a model on a GPU a second one need not fit, and would
    count among its peaks of memory.
    """
    memo: dict[int, object] = {
        id(parameter): nn.Parameter(parameter.detach().to(_META), parameter.requires_grad)
        for parameter in module.parameters()
    }
    memo |= {id(buffer): buffer.detach().to(_META) for buffer in module.buffers()}
    # The old weight_norm keeps the weight that it computed, which a plain copy refuses.
    for owner in module.modules():
        computed = (x for x in vars(owner).values() if isinstance(x, Tensor) and not x.is_leaf)
        memo |= {id(x): x.detach().to(_META) for x in computed}
    return copy.deepcopy(module, memo)
