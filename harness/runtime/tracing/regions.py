"""Operators that run under torch.autocast.

Autocast chooses dtypes by device and does not support the meta device, so meta tensors get the
dtypes of fake tensors on the real device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._pytree import tree_map

from harness.runtime.tracing.functions import OpaqueFunction


@dataclass(frozen=True)
class AutocastRegion:
    """The arguments of a `torch.autocast` context.

    Attributes:
        device_type: `meta` is that of the inputs: a model that names the device of its inputs was
            traced on the meta device.
        dtype: None is the default of the device.
    """

    device_type: str
    dtype: torch.dtype | None
    is_enabled: bool

    def enter(self, inputs: Any) -> torch.autocast:
        """A new context with the same arguments.

        Args:
            inputs: tensors, which may be nested.
        """
        return torch.autocast(self.device_of(inputs), self.dtype, self.is_enabled)

    def device_of(self, inputs: Any) -> str:
        """The type of the device on which an operator runs."""
        if self.device_type != "meta":
            return self.device_type
        found: list[str] = []
        tree_map(lambda x: found.append(x.device.type) if isinstance(x, Tensor) else None, inputs)
        return next((name for name in found if name != "meta"), "cpu")

    def __str__(self) -> str:
        if not self.is_enabled:
            return "off"
        return "default" if self.dtype is None else str(self.dtype).removeprefix("torch.")


def _in_region(region: AutocastRegion, call: Callable[..., Any], tensors: Any, *args: Any) -> Any:
    """Call a function in a region; on the meta device, with the real device's dtypes.

    Args:
        tensors: the first argument of `call`, which may be nested.
    """
    if not _is_meta((tensors, args)):
        with region.enter((tensors, args)):
            return call(tensors, *args)
    plain = call(tensors, *args)
    with FakeTensorMode() as mode, torch.no_grad(), region.enter(()):

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            with mode:
                return torch.empty(value.shape, dtype=value.dtype, device=region.device_of(()))

        found = call(*tree_map(fake, (tensors, *args)))
    return tree_map(lambda x, like: x.to(like.dtype) if isinstance(x, Tensor) else x, plain, found)


def _is_meta(values: Any) -> bool:
    found: list[bool] = []
    tree_map(lambda x: found.append(isinstance(x, Tensor) and x.is_meta), values)
    return any(found)


class AutocastFunction(OpaqueFunction):
    """Runs a function, or a method given by name, in a region."""

    def __init__(self, name: str, target: Any, region: AutocastRegion) -> None:
        super().__init__(name)
        self._target, self.region = target, region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def call(tensors: Any, *_: Any) -> Any:
            args, kwargs = tensors
            if isinstance(self._target, str):
                return getattr(args[0], self._target)(*args[1:], **kwargs)
            return self._target(*args, **kwargs)

        return _in_region(self.region, call, (args, kwargs))


class AutocastModule(nn.Module):
    """Runs a module in a region."""

    def __init__(self, module: nn.Module, region: AutocastRegion) -> None:
        super().__init__()
        self.module, self.region = module, region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        def call(tensors: Any, weights: dict[str, Tensor]) -> Any:
            args, kwargs = tensors
            return functional_call(self.module, weights, args, kwargs)

        if not _is_meta((args, kwargs)):
            with self.region.enter((args, kwargs)):
                return self.module(*args, **kwargs)
        weights = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return _in_region(self.region, call, (args, kwargs), weights)
