"""Keep each call of torch.vmap as one operator of an export, which would open and close it by
operators of their own."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from harness.runtime.capture.operators import function_name
from harness.runtime.tracing.functions import OpaqueFunction


class Vmap(OpaqueFunction):
    """A call of torch.vmap, with those inside it."""

    def __init__(self, constants: dict[str, Any], graph: fx.Graph) -> None:
        super().__init__("vmap")
        self._run = fx.GraphModule(constants, graph)

    def __call__(self, *args: Any) -> Any:
        try:
            return self._run(*args)
        except Exception:  # of any operator, in the middle of the call
            while torch._C._functorch.maybe_current_level():
                torch._C._functorch._vmap_decrement_nesting()
            raise


def join_vmaps(module: fx.GraphModule) -> None:
    """Replace the operators of each outermost call."""
    depth, inside = 0, []
    for node in list(module.graph.nodes):
        name = function_name(node.target)
        depth += name == "_vmap_increment_nesting"
        if depth and node.op == "call_function":
            inside.append(node)
        if name == "_vmap_decrement_nesting":
            depth -= 1
            if depth == 0:
                _join(module, inside)
                inside = []


def _join(module: fx.GraphModule, inside: list[fx.Node]) -> None:
    """Replace nodes that follow one another by one call."""
    graph = module.graph
    given = dict.fromkeys(x for n in inside for x in n.all_input_nodes if x not in inside)
    read = {x: operator.attrgetter(str(x.target))(module) for x in given if x.op == "get_attr"}
    constants = {x: value for x, value in read.items() if not isinstance(value, Tensor)}
    found = [node for node in inside if any(user not in inside for user in node.users)]
    joined = fx.Graph()
    copies = {node: joined.placeholder(node.name) for node in given if node not in constants}
    copies |= {node: joined.node_copy(node) for node in constants}
    for node in inside:
        copies[node] = joined.node_copy(node, copies.__getitem__)
    results = tuple(copies[node] for node in found)
    joined.output(results[0] if len(results) == 1 else results)
    with graph.inserting_after(inside[-1]):
        held = {str(node.target): value for node, value in constants.items()}
        call = graph.call_function(
            Vmap(held, joined), tuple(x for x in given if x not in constants)
        )
    for k, node in enumerate(found):
        result = call
        if len(found) > 1:
            with graph.inserting_after(call):
                result = graph.call_function(operator.getitem, (call, k))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result, delete_user_cb=lambda user: user not in inside)
    for node in reversed(inside):
        graph.erase_node(node)
