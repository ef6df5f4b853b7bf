"""Copy a model without the memory of its tensors: to the meta device, or into fake tensors."""

from __future__ import annotations

import copy
import gc
import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn.modules.batchnorm import _NormBase

_META = torch.device("meta")
# It logs a traceback of fifty lines for an error that the caller reports in one, or handles.
logging.getLogger("torch._subclasses.fake_tensor").disabled = True

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_Cached = type(lru_cache(len))


def meta_copy(module: ModuleT) -> ModuleT:
    """Copy a module to the meta device; shared tensors stay shared.

    Never copies a tensor on its own device, where a second model may not fit and would raise the
    measured memory peak.
    """
    copied = copy.deepcopy(module, stand_ins(module, lambda tensor: tensor.detach().to(_META)))
    for part in copied.modules():
        if isinstance(part, _NormBase) and part.momentum is None:
            part.momentum = 0.0  # because the number of batches, by which it averages, has no value
    return copied


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
    # The old weight_norm stores its computed weight, which deepcopy refuses; an attribute that is
    # computed of weights is on the meta device where they are.
    for owner in module.modules():
        others = (x for x in vars(owner).values() if isinstance(x, Tensor))
        memo |= {id(x): make(x) for x in others if x.is_meta or not x.is_leaf}
    return memo


@contextmanager
def restored_buffers(model: nn.Module) -> Iterator[None]:
    """Restore a model's buffers after the block, because hooks of its copies may write them."""
    held = [
        (part._buffers, name, buffer, buffer._version, buffer.detach().clone())
        for part in model.modules()
        for name, buffer in part._buffers.items()
        if buffer is not None
    ]
    try:
        yield
    finally:
        for table, name, buffer, version, value in held:
            table[name] = buffer
            if buffer._version != version:
                with torch.no_grad():
                    buffer.copy_(value)


@contextmanager
def forgotten_stand_ins(model: nn.Module) -> Iterator[None]:
    """After the block, clear each `lru_cache` that holds tensors, remove fake and traced ones from
    dicts of the modules and classes of a model's code, and restore attributes of the objects that
    modules hold (a scheduler of noise), because its next call would read them.
    """
    held = [x for part in model.modules() for x in vars(part).values() if hasattr(x, "__dict__")]
    owned = [(vars(x), dict(vars(x))) for x in held if not isinstance(x, type)]
    try:
        yield
    finally:
        for now, before in owned:
            for key in [k for k, x in now.items() if isinstance(x, FakeTensor | fx.Proxy)]:
                del now[key]
                now |= {key: before[key]} if key in before else {}
        # A cache refers to its type, so these are found without a look at all objects.
        for each in gc.get_referrers(_Cached):
            if type(each) is _Cached and _holds_tensors(each):
                each.cache_clear()
        for cached in _dicts_of_code(model):
            for key, value in list(cached.items()):
                values = value if isinstance(value, tuple | list) else (value,)
                if any(isinstance(x, FakeTensor | fx.Proxy) for x in values):
                    del cached[key]


def _holds_tensors(cached: object) -> bool:
    """Whether tensors or proxies are in a cache, or in the tuples, lists and dicts there."""
    held, seen = gc.get_referents(cached), set[int]()
    while held:
        if any(issubclass(kind, Tensor | fx.Proxy) for kind in {*map(type, held)}):  # few kinds
            return True
        inner = {id(x): x for x in held if isinstance(x, tuple | list | dict)}
        held = gc.get_referents(*(x for k, x in inner.items() if k not in seen))
        seen |= inner.keys()
    return False


def _dicts_of_code(model: nn.Module) -> Iterator[dict[Any, Any]]:
    """Dicts that are variables where the parts of a model are written, or attributes of classes
    there."""
    for name in {type(part).__module__ for part in model.modules()}:
        if name in sys.modules and not name.startswith("torch."):
            held = list(vars(sys.modules[name]).values())
            of_classes = [vars(x).values() for x in held if isinstance(x, type)]
            yield from (x for x in chain(held, *of_classes) if type(x) is dict)
