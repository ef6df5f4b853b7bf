"""Replace operators that work in place where somebody else still reads their input."""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from harness.errors import ModelError
from harness.runtime.operators import function_name

_CALLS = ("call_module", "call_method", "call_function")
_ARITHMETIC: dict[Any, Any] = {
    operator.iadd: operator.add,
    operator.isub: operator.sub,
    operator.imul: operator.mul,
    operator.itruediv: operator.truediv,
    operator.ipow: operator.pow,
}


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
    return target in _ARITHMETIC or (is_named_so and target in _of_torch(name))


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


def check_in_place(module: fx.GraphModule, values: Collection[fx.Node]) -> None:
    """Refuse a model that reads a value again after changing it in place.

    Whether such a reader sees the change would depend on which device it runs on.

    Args:
        values: nodes that give tensors; others, such as sizes, may be read at any time.

    Raises:
        ModelError: names the operator and its reader.
    """
    place = {node: index for index, node in enumerate(module.graph.nodes)}
    modules = dict(module.named_modules())
    for node in module.graph.nodes:
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or node.op not in _CALLS:
            continue
        if not works_in_place(node, modules):
            continue
        late = [user for user in source.users if place[user] > place[node] and user in values]
        if late:
            raise ModelError(
                f"operator {node.name} changes {source.name} in place, and {late[0].name} reads "
                f"that afterwards: let it read {node.name}, or do not work in place"
            )


def out_of_place(graph: fx.Graph, node: fx.Node, owned: dict[str, Any]) -> fx.Node:
    """The node itself, or one that leaves its argument as it is.

    Raises:
        ModelError: there is no such operator.
    """
    if not works_in_place(node, owned):
        return node
    if node.op == "call_module":
        module = copy.copy(owned[str(node.target)])
        module.inplace = False
        owned[f"{node.target}_copying".replace(".", "_")] = module
        node.target = f"{node.target}_copying".replace(".", "_")
    elif node.op == "call_method":
        node.target = str(node.target).removesuffix("_")
    elif node.kwargs.get("inplace"):
        node.kwargs = {**node.kwargs, "inplace": False}
    else:
        node.target = _copying_target(node)
    return node


def _copying_target(node: fx.Node) -> Any:
    found = copying_function(node.target)
    if found is None:
        raise ModelError(
            f"operator {node.name} ({function_name(node.target)}) changes what others read, and "
            "there is no such operator out of place: do not work in place there"
        )
    return found
