"""Replace operators that work in place where somebody else still reads their input."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from harness.runtime.capture.operators import function_name
from harness.runtime.tracing.functions import OpaqueFunction

# The mark, in a node's `meta`, of a module that must not change what it is given.
COPIES = "copies"
# They exist out of place, but autograd cannot derive that form.
_UNDERIVED = ("copy_", "fill_", "zero_")
_ARITHMETIC: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
}


class OnCopy(OpaqueFunction):
    """A function that changes its first argument, on a copy of that."""

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
    return bool(node.kwargs.get("inplace")) or _changes_first(node.target)


def _changes_first(target: Any) -> bool:
    """Whether a function changes its first argument, of itself."""
    if isinstance(target, torch._ops.OpOverload):
        first = next(iter(target._schema.arguments), None)
        return first is not None and first.alias_info is not None and first.alias_info.is_write
    name = function_name(target)
    is_named_so = name.endswith("_") and not name.endswith("__")
    return target in (*_ARITHMETIC, operator.setitem) or (is_named_so and target in _of_torch(name))


def _of_torch(name: str) -> list[Any]:
    """PyTorch's functions of a name."""
    return [getattr(owner, name) for owner in (torch, F) if hasattr(owner, name)]


def copying_function(target: Any) -> Any:
    """The function that computes the same out of place; `target` itself where it does already.

    Exported graphs call overloads: aten.relu_.default becomes aten.relu.default.

    Returns:
        None where there is no such function.
    """
    if not _changes_first(target):
        return target
    name = function_name(target).removesuffix("_")
    if isinstance(target, torch._ops.OpOverload):
        return getattr(getattr(torch.ops.aten, name, None), target._overloadname, None)
    return _ARITHMETIC.get(target) or next(iter(_of_torch(name)), None)


def out_of_place(graph: fx.Graph, node: fx.Node, owned: dict[str, Any]) -> fx.Node:
    """The node itself, or one that leaves its argument as it is."""
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
    """The function that computes what a function or method does, out of place or on a copy."""
    name = function_name(node.target)
    found = None
    if name not in _UNDERIVED and node.op == "call_method":
        found = getattr(Tensor, name.removesuffix("_"), None)
    elif name not in _UNDERIVED:
        found = copying_function(node.target)
    if found is not None:
        return found
    target: Any = getattr(Tensor, name) if node.op == "call_method" else node.target
    return OnCopy(target)
