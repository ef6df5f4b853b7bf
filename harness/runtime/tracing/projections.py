"""Turn products by a transposed weight into single operators that can be cut as linear layers.

GPT-2 in transformers multiplies by a weight (inputs, outputs): `addmm` between two views.
"""

from __future__ import annotations

import torch
from torch import Tensor, fx

_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default)
_ADDMM = torch.ops.aten.addmm.default


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply (..., inputs) by a weight (inputs, outputs)."""
    rows = x.reshape(-1, x.shape[-1])
    product = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return product.view(*x.shape[:-1], weight.shape[1])


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
        after.replace_all_uses_with(joined)
        for each in (after, node):
            module.graph.erase_node(each)
        if not before.users:
            module.graph.erase_node(before)
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
