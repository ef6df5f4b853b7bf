"""Turn products by a transposed weight into single operators that can be cut as linear layers, and
apply linear layers to values whose samples are a dim of their own.

GPT-2 in transformers multiplies by a weight (inputs, outputs): `addmm` between two views. PyTorch's
attention merges steps and samples into rows, (steps, samples, width) -> (rows, width), for its last
linear layer; rows in the order of the steps could not be cut by samples.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, fx

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
_ADDMM = torch.ops.aten.addmm.default
_LINEAR = torch.ops.aten.linear.default


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply (..., inputs) by a weight (inputs, outputs)."""
    rows = x.reshape(-1, x.shape[-1])
    product = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return product.view(*x.shape[:-1], weight.shape[1])


def keep_dims(module: fx.GraphModule) -> None:
    """Replace view to rows, linear layer, view of the rows by a view and a linear layer."""
    for node in module.graph.find_nodes(op="call_function", target=_LINEAR):
        before, after = node.args[0], next(iter(node.users), None)
        if len(node.users) != 1 or not isinstance(before, fx.Node) or after is None:
            continue
        if {before.target, after.target} - {*_VIEWS} or not _keeps_width(node, after):
            continue
        source, (*_, width) = before.args[0], cast("list[Any]", before.args[1])
        sizes = cast("list[Any]", after.args[1])
        with module.graph.inserting_before(after):
            wide = module.graph.call_function(_VIEWS[1], (source, [*sizes[:-1], width]))
            kept = module.graph.call_function(_LINEAR, (wide, *node.args[1:]))
        wide.meta, kept.meta = {**before.meta}, {**after.meta}
        wide.meta["val"] = before.meta["val"].new_empty((*after.meta["val"].shape[:-1], width))
        _replace(module.graph, (before, node, after), kept)
    module.recompile()


def _replace(graph: fx.Graph, chain: tuple[fx.Node, fx.Node, fx.Node], made: fx.Node) -> None:
    """Put a new node in the place of a chain; its first node stays if others read it."""
    first, middle, last = chain
    last.replace_all_uses_with(made)
    graph.erase_node(last)
    graph.erase_node(middle)
    if not first.users:
        graph.erase_node(first)


def _keeps_width(node: fx.Node, after: fx.Node) -> bool:
    found, made = node.meta.get("val"), after.meta.get("val")
    if not isinstance(found, Tensor) or not isinstance(made, Tensor):
        return False
    return found.dim() == 2 and made.dim() > 2 and str(found.shape[-1]) == str(made.shape[-1])


def join_projections(module: fx.GraphModule) -> None:
    """Replace view, addmm by a parameter, view."""
    for node in module.graph.find_nodes(op="call_function", target=_ADDMM):
        found = _parts(node)
        if found is None:
            continue
        before, after = found
        bias, _, weight = node.args
        with module.graph.inserting_before(after):
            joined = module.graph.call_function(transposed_linear, (before.args[0], weight, bias))
        joined.meta = {**after.meta}
        _replace(module.graph, (before, node, after), joined)
    module.recompile()


def _parts(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """The views before and after a product of equally many dims."""
    if len(node.args) != 3 or node.kwargs or len(node.users) != 1:
        return None
    bias, before, weight = node.args
    (after,) = node.users
    if not isinstance(before, fx.Node) or {before.target, after.target} - {*_VIEWS}:
        return None
    if any(not isinstance(x, fx.Node) or x.op != "get_attr" for x in (bias, weight)):
        return None
    source = before.args[0]
    given, made = (x.meta.get("val") for x in (source, after) if isinstance(x, fx.Node))
    if not isinstance(given, Tensor) or not isinstance(made, Tensor):
        return None
    is_kept = list(map(str, given.shape[:-1])) == list(map(str, made.shape[:-1]))
    return (before, after) if is_kept and given.dim() > 1 else None
