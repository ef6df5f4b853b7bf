"""Operators of a traced graph for constructs that torch.fx has no node for, and marks of its nodes.

Marks are in the `meta` of nodes, for facts that an operator's target does not show.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from harness.errors import ModelError

# Keys of `Node.meta`: computed with gradients off; is the `data` of a tensor; hooks on its
# gradient; whether it writes a buffer.
NO_GRAD = "harness_no_grad"
IS_DATA = "harness_is_data"
HOOKS = "harness_hooks"
WRITES = "harness_writes"
AUTOCAST = "harness_autocast"
# Keys of `GraphModule.meta`: names of the buffers that forward writes, and of those from which
# constants of the graph were computed.
WRITTEN, FOLDED = "harness_written", "harness_folded"

CALLS = ("call_function", "call_method", "call_module")
_VIEWS = (
    "getitem", "view", "reshape", "transpose", "permute", "t", "narrow", "select", "squeeze",
    "unsqueeze", "expand", "chunk", "split", "unbind", "flatten", "detach", "diagonal", "getattr",
    "numpy_T", "mT", "ravel", "reshape_as", "contiguous",
)  # fmt: skip


class ConstructError(ModelError):
    """The model uses a construct that a graph cannot represent."""


def is_view(node: fx.Node) -> bool:
    """Whether a node may share memory with its first argument."""
    return node.op in CALLS and function_name(node.target) in _VIEWS


def function_name(target: Any) -> str:
    """The bare name of an fx target: `add` for operator.add, torch.add and aten.add.Tensor."""
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return str(target.overloadpacket.__name__)
    return str(getattr(target, "__name__", target))


def callable_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> Callable[..., Any]:
    """The function, method or module that a node calls."""
    target: Any = node.target
    if node.op == "call_module":
        return modules[target]
    if node.op == "call_method":
        return lambda x, *args, **kwargs: getattr(x, target)(*args, **kwargs)
    return target  # type: ignore[no-any-return]


def argument_of(node: fx.Node, position: int, *names: str, default: Any = None) -> Any:
    """An argument of a call by its position, or by one of its names."""
    if position < len(node.args):
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)


# Gradient of a tensor -> its replacement, or None to keep it.
GradientHook = Callable[[Tensor], Tensor | None]


def detach(value: Any) -> Any:
    """Detach a tensor, or each tensor of a tuple or list; return other values unchanged."""
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, tuple | list) and not isinstance(value, torch.Size):
        return type(value)(detach(part) for part in value)
    return value


class OpaqueFunction(ABC):
    """A callable that torch.fx does not trace into; copies of a graph share it."""

    def __init__(self, name: str) -> None:
        self.__name__ = self.__qualname__ = name
        self.__module__ = __name__

    def __deepcopy__(self, memo: object) -> OpaqueFunction:
        return self

    @abstractmethod
    def __call__(self, *args: Any) -> Any:
        """Compute it."""


class CustomFunction(OpaqueFunction):
    """A call of a `torch.autograd.Function`.

    Args:
        fixed: arguments that a graph cannot represent, by position.
    """

    def __init__(self, function: type[torch.autograd.Function], fixed: dict[int, Any]) -> None:
        super().__init__(function.__name__)
        self.function, self._fixed = function, fixed

    def __call__(self, *args: Any) -> Any:
        given = iter(args)
        n_args = len(args) + len(self._fixed)
        values = [self._fixed[k] if k in self._fixed else next(given) for k in range(n_args)]
        if self.writes_inputs:
            values = [x.clone() if isinstance(x, Tensor) else x for x in values]
        return self.function.apply(*values)

    @property
    def writes_inputs(self) -> bool:
        """Whether it may change its inputs in place."""
        codes = (getattr(self.function, name) for name in ("forward", "setup_context"))
        names = [n for f in codes for n in getattr(getattr(f, "__code__", None), "co_names", ())]
        return "mark_dirty" in names


class ReadBuffer(OpaqueFunction):
    """Copies a buffer's value at the start of forward."""

    def __init__(self, name: str) -> None:
        super().__init__(f"read_{name.replace('.', '_')}")

    def __call__(self, buffer: Tensor) -> Tensor:
        return buffer.clone()


class WriteBuffer(OpaqueFunction):
    """Stores a value in a buffer and returns a copy."""

    def __init__(self, name: str) -> None:
        super().__init__(f"write_{name.replace('.', '_')}")

    def __call__(self, buffer: Tensor, value: Tensor) -> Tensor:
        with torch.no_grad():
            return buffer.copy_(value).clone()


def copied(target: Tensor, source: Any, *_: Any) -> Tensor:
    """Out-of-place `target.copy_(source)`."""
    return target.clone().copy_(source)


class GradientHooks(OpaqueFunction):
    """The identity in forward; in backward, calls hooks on the gradient in order."""

    def __init__(self, hooks: Sequence[GradientHook]) -> None:
        super().__init__("register_hook")
        self.hooks = list(hooks)

    def __call__(self, x: Tensor) -> Tensor:
        output = x.clone()
        if output.requires_grad:
            for hook in self.hooks:
                output.register_hook(hook)
        return output
