"""Split tuples between operators into their tensors, because a strategy places single tensors.

`lstm(x, state)` becomes `lstm(x, (state[0], state[1]))`.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import Tensor, fx, nn

from harness.errors import ModelError
from harness.runtime.capture.operators import CONCATENATIONS
from harness.runtime.executor.shards.inplace import changes_first
from harness.runtime.models.task import choose_logits, named_outputs
from harness.runtime.tracing.constructs import function_name


def split_tuples(module: fx.GraphModule, values: dict[fx.Node, Any]) -> bool:
    """Rewrite a traced model; return whether it changed.

    Args:
        values: the value of each node, on any device.
    """
    readers = [
        (user, node)
        for node, value in values.items()
        if node.op != "output" and _holds_tensors(value)
        for user in list(node.users)
        if user.op != "output" and user.target is not operator.getitem
    ]
    for user, node in readers:
        with module.graph.inserting_before(user):
            parts = _parts(module.graph, node, values[node])
        given = {n: n for n in user.all_input_nodes} | {node: parts}
        user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), given.__getitem__)
    return bool(readers)


class OutputTuple(nn.Module):
    """Calls a module and returns its named outputs as a tuple."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        return tuple(named_outputs(self.module(*args, **kwargs)).values())


def index_fields(module: fx.GraphModule, values: dict[fx.Node, Any]) -> None:
    """Read fields by their positions: `sort(x).values` becomes `sort(x)[0]`; a module's dict or
    dataclass becomes a tuple."""
    for node, value in values.items():
        names = _names_of(node, value)
        if not names:
            continue
        for user in list(node.users):
            field: Any = user.args[1] if user.target in (getattr, operator.getitem) else None
            if field in names:
                user.target, user.args = operator.getitem, (node, names.index(field))
        if not isinstance(value, tuple):
            _return_tuple(module, node, names, type(value).__name__)


def _return_tuple(module: fx.GraphModule, node: fx.Node, names: list[str], kind: str) -> None:
    whole = OutputTuple(module.get_submodule(str(node.target)))
    node.target = f"{node.target}_tuple"
    module.add_submodule(node.target, whole)
    for user in list(node.users):
        if user.op == "output":
            position = choose_logits({name: k for k, name in enumerate(names)}, kind)
            with module.graph.inserting_after(node):
                user.args = (module.graph.call_function(operator.getitem, (node, position)),)


def _names_of(node: fx.Node, value: Any) -> list[str]:
    if isinstance(value, tuple):
        return list(getattr(type(value), "__match_args__", ())) if _holds_tensors(value) else []
    return list(named_outputs(value)) if node.op == "call_module" else []


def _holds_tensors(value: Any) -> bool:
    return isinstance(value, tuple | list) and any(
        isinstance(part, Tensor) or _holds_tensors(part) for part in value
    )


def _parts(graph: fx.Graph, node: fx.Node, value: Any) -> Any:
    if not _holds_tensors(value):
        return node
    return tuple(
        _parts(graph, graph.call_function(operator.getitem, (node, k)), part)
        for k, part in enumerate(value)
    )


def drop_empty_parts(module: fx.GraphModule, values: dict[fx.Node, Any]) -> bool:
    """Leave tensors without elements out of concatenations, and writes of them; return whether
    there were any.

    A rotary embedding of all features concatenates them with the features that it leaves alone.
    """
    found = False
    for node in list(values):
        parts = node.args[0] if node.args else None
        if changes_first(node.target) and any(_is_empty(values[n]) for n in node.all_input_nodes):
            node.replace_all_uses_with(node.all_input_nodes[0])
            module.graph.erase_node(node)
            found = True
        if function_name(node.target) not in CONCATENATIONS or not isinstance(parts, list | tuple):
            continue
        kept = [part for part in parts if not _is_empty(values.get(part))]
        if 0 < len(kept) < len(parts):
            node.args = (kept, *node.args[1:])
            found = True
    if found:
        empty = {node for node, value in values.items() if _is_empty(value)}
        module.graph.eliminate_dead_code(lambda node: node not in empty)
        module.recompile()
    return found


def _is_empty(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 0


def check_sizes(values: dict[fx.Node, Any]) -> None:
    """Raise ModelError for a result without elements, because no strategy can cut it."""
    for node, value in values.items():
        if _is_empty(value) and node.op != "get_attr":
            raise ModelError(
                f"operator {node.name} gives a tensor without elements, of shape "
                f"{tuple(value.shape)}: leave it out of the model"
            )
