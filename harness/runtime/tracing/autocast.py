"""Record a model's torch.autocast contexts during tracing, and run its operators in them.

Autocast chooses dtypes by device and does not support the meta device, so meta tensors get the
dtypes of fake tensors on the real device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map

from harness.runtime.capture.saved import tensors_within
from harness.runtime.tracing.constructs import (
    AUTOCAST,
    CALLS,
    OpaqueFunction,
    function_name,
    is_view,
)
from harness.runtime.tracing.patches import replaced


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
        names = (x.device.type for x in tensors_within(inputs))
        return next((name for name in names if name != "meta"), "cpu")

    def __str__(self) -> str:
        if not self.is_enabled:
            return "off"
        return "default" if self.dtype is None else str(self.dtype).removeprefix("torch.")


def _in_region(region: AutocastRegion, call: Callable[..., Any], *args: Any) -> Any:
    """Call a function in a region; on the meta device, with the real device's dtypes."""
    if not _is_meta(args):
        with region.enter(args):
            return call(*args)
    plain = call(*args)
    # A counter of FLOPs has counted the call already.
    with _disable_current_modes(), FakeTensorMode() as mode, torch.no_grad(), region.enter(()):

        def fake(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            with mode:
                return torch.empty(value.shape, dtype=value.dtype, device=region.device_of(()))

        found = call(*tree_map(fake, args))
    return tree_map(lambda x, like: x.to(like.dtype) if isinstance(x, Tensor) else x, plain, found)


def _is_meta(values: Any) -> bool:
    return any(x.is_meta for x in tensors_within(values))


class AutocastFunction(OpaqueFunction):
    """Runs a function, or a method given by name, in a region."""

    def __init__(self, name: str, target: Any, region: AutocastRegion) -> None:
        super().__init__(name)
        self._target, self.region = target, region

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        def call(args: Any, kwargs: Any) -> Any:
            if isinstance(self._target, str):
                return getattr(args[0], self._target)(*args[1:], **kwargs)
            return self._target(*args, **kwargs)

        return _in_region(self.region, call, args, kwargs)


class AutocastModule(nn.Module):
    """Runs a module in a region."""

    def __init__(self, module: nn.Module, region: AutocastRegion) -> None:
        super().__init__()
        self.module, self.region = module, region

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not _is_meta((args, kwargs)):
            with self.region.enter((args, kwargs)):
                return self.module(*args, **kwargs)
        weights = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        return _in_region(self.region, functional_call, self.module, weights, args, kwargs)


# Functions whose output dtype autocast does not change.
_UNAFFECTED = (
    "size", "dim", "to", "float", "double", "half", "bfloat16", "type", "contiguous", "detach",
)  # fmt: skip


class Regions:
    """The stack of autocast contexts that are open at a point of tracing."""

    def __init__(self) -> None:
        self._entered: list[AutocastRegion] = []

    @property
    def innermost(self) -> AutocastRegion | None:
        return self._entered[-1] if self._entered else None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Patch torch.autocast to keep the stack up to date."""
        initialize: Any = torch.autocast.__init__
        enter: Any = torch.autocast.__enter__
        leave: Any = torch.autocast.__exit__
        on_meta: WeakKeyDictionary[Any, AutocastRegion] = WeakKeyDictionary()

        def initialized(
            context: Any, device_type: str, dtype: Any = None, enabled: bool = True, *args: Any
        ) -> None:
            # A model is traced on the meta device, for which PyTorch has no autocast.
            is_meta = device_type == "meta"
            initialize(context, "cpu" if is_meta else device_type, dtype, enabled, *args)
            if is_meta:
                on_meta[context] = AutocastRegion("meta", dtype, enabled)

        def entered(context: Any) -> Any:
            region = AutocastRegion(context.device, context.fast_dtype, context._enabled)
            self._entered.append(on_meta.get(context, region))
            return enter(context)

        def left(context: Any, *args: Any) -> Any:
            self._entered.pop()
            return leave(context, *args)

        with (
            replaced(torch.autocast, "__init__", initialized),
            replaced(torch.autocast, "__enter__", entered),
            replaced(torch.autocast, "__exit__", left),
        ):
            yield


def keep_regions(module: fx.GraphModule) -> None:
    """Wrap every operator traced under autocast in its region."""
    for node in list(module.graph.nodes):
        region = node.meta.get(AUTOCAST)
        if region is None or node.op not in CALLS or is_view(node):
            continue
        if node.op == "call_module":
            path = f"{node.target}_autocast_{region}"
            inner = module.get_submodule(str(node.target))
            module.add_submodule(path, AutocastModule(inner, region))
            node.target = path
        elif function_name(node.target) not in _UNAFFECTED:
            target: Any = AutocastFunction(function_name(node.target), node.target, region)
            node.op, node.target = "call_function", target
    module.recompile()
