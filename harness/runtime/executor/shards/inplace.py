"""Replace in-place operators whose input has other readers."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from harness.runtime.tracing.constructs import OpaqueFunction, function_name
from harness.runtime.tracing.patches import setitem

# Key in a node's `meta` for modules that must not change their input.
COPIES = "copies"
# Functions whose out-of-place form autograd cannot differentiate.
_UNDERIVED = ("copy_", "fill_", "zero_")
_ARITHMETIC: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
}


class OnCopy(OpaqueFunction):
    """Calls an in-place function on a copy of its first argument."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function_name(function).removesuffix("_"))
        self._function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        output = args[0].clone()
        self._function(output, *args[1:], **kwargs)
        return output


def works_in_place(node: fx.Node, owned: dict[str, Any]) -> bool:
    """Whether an emitted node changes its first argument."""
    if node.op == "call_module":
        return bool(getattr(owned[str(node.target)], "inplace", False))
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    return bool(node.kwargs.get("inplace")) or changes_first(node.target)


def changes_first(target: Any) -> bool:
    """Whether a function always changes its first argument."""
    if isinstance(target, torch._ops.OpOverload):
        first = next(iter(target._schema.arguments), None)
        return first is not None and first.alias_info is not None and first.alias_info.is_write
    name = function_name(target)
    is_named_so = name.endswith("_") and not name.endswith("__")
    return target in (*_ARITHMETIC, operator.setitem) or (is_named_so and target in _of_torch(name))


def _of_torch(name: str) -> list[Any]:
    """PyTorch's functions with a name."""
    return [getattr(owner, name) for owner in (torch, F) if hasattr(owner, name)]


def copying_function(target: Any) -> Any:
    """The out-of-place form of a function; `target` itself if it is out of place.

    Exported graphs call overloads: aten.pow_.Scalar becomes aten.pow.Tensor_Scalar.

    Returns:
        None if there is no such function.
    """
    if not changes_first(target):
        return target
    name = function_name(target).removesuffix("_")
    if isinstance(target, torch._ops.OpOverload):
        packet = getattr(torch.ops.aten, name, None)
        forms = [getattr(packet, each) for each in (packet.overloads() if packet else ())]
        return next((form for form in forms if _types(form) == _types(target)), None)
    return _ARITHMETIC.get(target) or next(iter(_of_torch(name)), None)


def _types(overload: torch._ops.OpOverload) -> list[str]:
    return [str(each.type) for each in overload._schema.arguments]


def out_of_place(node: fx.Node, owned: dict[str, Any]) -> fx.Node:
    """Change an in-place node so that it does not change its argument; returns the node.

    Args:
        owned: modules by path, to which that of the node is added.
    """
    if not works_in_place(node, owned):
        return node
    if node.op == "call_module":
        module = copy.copy(owned[str(node.target)])
        module.inplace = False
        owned[f"{node.target}_copying".replace(".", "_")] = module
        node.target = f"{node.target}_copying".replace(".", "_")
    elif node.kwargs.get("inplace"):
        node.kwargs = {**node.kwargs, "inplace": False}
    else:
        node.op, node.target = "call_function", copying_call(node)
    return node


def copying_call(node: fx.Node) -> Any:
    """An out-of-place form of an in-place function or method, on a copy if there is no other."""
    name = function_name(node.target)
    found = None
    if name not in _UNDERIVED and node.op == "call_method":
        found = getattr(Tensor, name.removesuffix("_"), None)
    elif name not in _UNDERIVED:
        found = copying_function(node.target)
    if found is not None:
        return found
    target: Any = getattr(Tensor, name) if node.op == "call_method" else node.target
    return OnCopy(setitem if target is operator.setitem else target)
