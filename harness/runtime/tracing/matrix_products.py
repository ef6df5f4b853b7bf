"""Keep dims apart in products of matrices of an export, so that they can be cut along them.

Linear layers: GPT-2 in transformers multiplies by a weight (inputs, outputs), `addmm` between two
views. PyTorch's attention merges steps and samples into rows, (steps, samples, width) -> (rows,
width), for its last linear layer; rows in the order of the steps could not be cut by samples.

Stacks of matrices, so that they can be cut by heads:

    (samples, heads, rows, width) -> view (samples * heads, rows, width) --+
                                                                           bmm -> view (samples,
    (samples, heads, width, rows) -> view (samples * heads, width, rows) --+      heads, rows, rows)

becomes one matmul of four dims. Softmax, dropout and scaling between such views follow.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from harness.runtime.tracing.dim_rules import LINEAR, is_size, operator_name
from harness.runtime.tracing.module_calls import is_of_layer, without_call

_ATEN = torch.ops.aten
_VIEWS = (_ATEN.view.default, _ATEN.reshape.default)
_VIEW_NAMES = ("view", "reshape", "_unsafe_view")
_POINTWISE = ("mul", "div", "add", "sub", "to", "contiguous", "clone", "dropout", "type_as", "neg")
_WITH_DIMS = {"softmax": 1, "transpose": 2, "gather": 1}  # number of dims among the arguments
_PRODUCTS = ("bmm", "baddbmm")


def transposed_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply (..., inputs) by a weight (inputs, outputs)."""
    rows = x.reshape(-1, x.shape[-1])
    product = rows @ weight if bias is None else torch.addmm(bias, rows, weight)
    return product.view(*x.shape[:-1], weight.shape[1])


def keep_dims(module: fx.GraphModule, model: nn.Module) -> None:
    """Replace view to rows, linear layer, view of the rows by a view and a linear layer, where that
    is no module of the model."""
    modules = dict(model.named_modules())
    for node in module.graph.find_nodes(op="call_function", target=LINEAR):
        if is_of_layer(node, modules):
            continue
        before, after = _views_around(node, node.args[0])
        found, made = _shape(node), _shape(after)
        if len(found) != 2 or len(made) < 3 or found[-1] != made[-1]:
            continue
        (source, (*_, width)), (_, sizes) = (view.args for view in (before, after))
        with module.graph.inserting_before(after):
            wide = module.graph.call_function(_VIEWS[1], (source, [*sizes[:-1], width]))
            kept = module.graph.call_function(LINEAR, (wide, *node.args[1:]))
        wide.meta, kept.meta = {**before.meta}, {**after.meta}
        wide.meta["val"] = before.meta["val"].new_empty((*after.meta["val"].shape[:-1], width))
        _replace(module.graph, (before, node, after), kept)
    module.recompile()


def _views_around(node: fx.Node, before: Any) -> tuple[Any, Any]:
    """The views to and of the rows of a product, of which `before` is one if there are such; else
    None."""
    after = next(iter(node.users)) if len(node.users) == 1 else None
    are_views = all(isinstance(x, fx.Node) and x.target in _VIEWS for x in (before, after))
    return (before, after) if are_views else (None, None)


def _replace(graph: fx.Graph, chain: tuple[fx.Node, fx.Node, fx.Node], made: fx.Node) -> None:
    """Put a new node in the place of a chain; its first node stays if others read it."""
    first, middle, last = chain
    last.replace_all_uses_with(made)
    graph.erase_node(last)
    graph.erase_node(middle)
    if not first.users:
        graph.erase_node(first)


def join_projections(module: fx.GraphModule) -> None:
    """Replace view, addmm by a parameter, view."""
    for node in module.graph.find_nodes(op="call_function", target=_ATEN.addmm.default):
        if len(node.args) != 3 or node.kwargs:
            continue
        bias, rows, weight = node.args
        before, after = _views_around(node, rows)
        if before is None or any(getattr(x, "op", "") != "get_attr" for x in (bias, weight)):
            continue
        given, made = _shape(before.args[0]), _shape(after)
        if len(given) < 2 or given[:-1] != made[:-1]:
            continue
        with module.graph.inserting_before(after):
            joined = module.graph.call_function(transposed_linear, (before.args[0], weight, bias))
        joined.meta = {**after.meta}
        _replace(module.graph, (before, node, after), joined)
    module.recompile()


def keep_heads(module: fx.GraphModule) -> None:
    """Replace each product whose stack of matrices is split into samples and heads afterwards."""
    for view in list(module.graph.nodes):
        if not _divides(view):
            continue
        source = view.args[0]
        assert isinstance(source, fx.Node)
        stack = _Stack(view, source)
        if not any(operator_name(node) in _PRODUCTS for node in stack.inside):
            continue
        view.replace_all_uses_with(stack.apart(source))
        for node in (view, *reversed(stack.inside)):
            module.graph.erase_node(node)
    for node in reversed(module.graph.nodes):
        if not node.users and (is_size(node) or operator_name(node) in (*_VIEW_NAMES, "repeat")):
            module.graph.erase_node(node)
    module.graph.lint()
    module.recompile()


def _shape(node: Any) -> list[str]:
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return list(map(str, value.shape)) if isinstance(value, Tensor) else []


def _divides(node: fx.Node) -> bool:
    """Whether a view splits the first of three dims into samples and heads."""
    if operator_name(node) not in _VIEW_NAMES:
        return False
    merged, apart = _shape(node.args[0]), _shape(node)
    if len(merged) != 3 or len(apart) != 4 or not apart[1].isdigit() or apart[2:] != merged[1:]:
        return False
    sizes = node.meta["val"].shape
    return str(sizes[0] * sizes[1]) == merged[0]


class _Stack:
    """The operators before a view that keep the stack of matrices, which nothing else reads.

    Attributes:
        inside: those whose values have samples and heads in one dim, in order.
    """

    def __init__(self, view: fx.Node, source: fx.Node) -> None:
        self._n_samples, self._n_heads = view.meta["val"].shape[:2]
        found: set[fx.Node] = set()
        waiting = [source]
        while waiting:
            node = waiting.pop()
            if node not in found and self._keeps_stack(node):
                found.add(node)
                waiting += node.all_input_nodes
        while shared := {n for n in found if not {*found, view}.issuperset(n.users)}:
            found -= shared
        self.inside = [node for node in view.graph.nodes if node in found]
        self._apart: dict[fx.Node, fx.Node] = {}

    def _keeps_stack(self, node: fx.Node) -> bool:
        shape, name = _shape(node), operator_name(node)
        if len(shape) != 3 or shape[0] != str(self._n_samples * self._n_heads):
            return False
        if name in _WITH_DIMS:
            dims: Any = node.args[1 : 1 + _WITH_DIMS[name]]
            return all(isinstance(dim, int) and dim % 3 for dim in dims)
        return name in _PRODUCTS or name in _POINTWISE

    def apart(self, node: fx.Node) -> fx.Node:
        """The value with a dim of samples and one of heads."""
        if node not in self._apart:
            self._apart[node] = self._split(node)
        return self._apart[node]

    def _split(self, node: fx.Node) -> fx.Node:
        if node in self.inside:
            return self._call(node)
        source: Any = node.args[0] if node.args else None
        name, n_stacked = operator_name(node), _shape(node)[0]
        if name in _VIEW_NAMES and _shape(source) == list(map(str, self._sizes(node))):
            return source  # type: ignore[no-any-return]
        first = next(each for each in self.inside if node in each.all_input_nodes)
        stack = [1, 1] if n_stacked == "1" else [-1, self._n_heads]
        if name == "repeat" and _shape(source)[0] == str(self._n_heads):
            node, stack = source, [1, self._n_heads]  # the same for each sample
        value = node.meta["val"]
        sizes = [*stack, *value.shape[1:]]
        made = self._insert(node, _ATEN.reshape.default, node, sizes, before=first)
        made.meta["val"] = value.new_empty([self._n_samples if n == -1 else n for n in sizes])
        return made

    def _call(self, node: fx.Node) -> fx.Node:
        name = operator_name(node)
        given: list[Any] = [
            self.apart(x) if isinstance(x, fx.Node) and len(_shape(x)) == 3 else x
            for x in node.args
        ]
        if name == "bmm":
            return self._insert(node, _ATEN.matmul.default, *given)
        if name == "baddbmm":
            product = self._insert(node, _ATEN.matmul.default, *given[1:])
            scales = (node.kwargs.get("beta", 1), node.kwargs.get("alpha", 1))
            terms = (
                x if scale == 1 else self._insert(x, _ATEN.mul.Tensor, x, scale, before=node)
                for x, scale in zip((given[0], product), scales, strict=True)
            )
            return self._insert(node, _ATEN.add.Tensor, *terms)
        n_dims = _WITH_DIMS.get(name, 0)
        dims = [dim % 3 + 1 for dim in given[1 : 1 + n_dims]]
        kwargs: dict[str, Any] = node.kwargs
        return self._insert(node, node.target, given[0], *dims, *given[1 + n_dims :], **kwargs)

    def _insert(
        self, like: fx.Node, target: Any, *args: Any, before: fx.Node | None = None, **kwargs: Any
    ) -> fx.Node:
        """A call in the place of a node, with its marks."""
        with like.graph.inserting_before(before or like):
            made = like.graph.call_function(target, args, kwargs)
        made.meta = without_call(like.meta)
        made.meta["val"] = like.meta["val"].new_empty(self._sizes(like))
        return made

    def _sizes(self, node: fx.Node) -> list[Any]:
        n_stacked, *others = node.meta["val"].shape
        if len(others) == 3:
            return [n_stacked, *others]
        samples = [1, 1] if n_stacked == 1 else [self._n_samples, self._n_heads]
        return [*samples, *others]
