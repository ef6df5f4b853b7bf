"""Replace operators that read no value of the inputs (position ids, masks, rotary tables) by what
they compute.

A value that is equal for every batch becomes a buffer; one that repeats itself for each sample
becomes a buffer that is expanded to the samples. Otherwise a strategy would have to compute it on
one device and send it to the others in every step.
"""

from __future__ import annotations

from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, fx, nn

from harness.runtime.capture.operators import UNDEFINED, describe_node, draws_random
from harness.runtime.capture.sample_dims import changing_dims
from harness.runtime.executor.shards.inplace import works_in_place
from harness.runtime.tracing.constructs import (
    AUTOCAST,
    CALLS,
    HOOKS,
    WRITTEN,
    OpaqueFunction,
    function_name,
)

# Two batch sizes, both above 1.
_SIZES = (2, 3)
_LARGEST = 1 << 28  # elements
# Functions of an input that read its size or type only.
_SIZE_READERS = ("sym_size", "size", "dim")
_SIZE_ATTRIBUTES = ("shape", "device", "dtype", "ndim")
_BROADCASTING = ("elementwise", "add", "attention")


def fold_constants(module: fx.GraphModule, examples: tuple[Tensor, ...]) -> None:
    """Fold the constants of a traced model in place."""
    found = _independent(module)
    if not any(_is_folded(node, found) for node in found):
        return
    runs = [_evaluate(module, found, examples, n) for n in _SIZES]
    for node in list(found):
        values = [run.env.get(node) for run in runs]
        if not _is_folded(node, found) or not all(isinstance(x, Tensor) for x in values):
            continue
        if not runs[0].is_final(node, found):
            continue
        few, more = (x for x in values if isinstance(x, Tensor))
        _fold(module, node, found, few, more)
    # Writes into a value that stays an operator stay too.
    is_left = any(_is_folded(node, found) for node in found if node in runs[0].versions)
    writers = _writers(module, found) if is_left else set()
    module.graph.eliminate_dead_code(lambda node: node not in found or node in writers)
    module.graph.lint()
    module.recompile()


def _independent(module: fx.GraphModule) -> dict[fx.Node, None]:
    """The nodes whose values depend on no value of an input or parameter, in order."""
    written, modules = module.meta.get(WRITTEN, frozenset()), dict(module.named_modules())
    found: dict[fx.Node, None] = {}
    tainted: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(module)
            is_constant = isinstance(value, Tensor) and not isinstance(value, nn.Parameter)
            if is_constant and not value.is_meta and node.target not in written:
                found[node] = None
        elif node.op in CALLS and node.op != "call_module":
            first = node.args[0] if node.args else None
            if _reads_size(node) or (
                _is_pure(node, module) and all(source in found for source in node.all_input_nodes)
            ):
                found[node] = None
            elif isinstance(first, fx.Node) and works_in_place(node, modules):
                tainted.add(first)
    # An operator that depends on inputs writes into them.
    while tainted:
        node = tainted.pop()
        if node in found and not _reads_size(node):
            del found[node]
            tainted |= {*node.all_input_nodes, *node.users}
    return found


def _is_pure(node: fx.Node, module: fx.GraphModule) -> bool:
    region = node.meta.get(AUTOCAST)
    return not (
        isinstance(node.target, OpaqueFunction)
        or (region is not None and region.is_enabled)
        or node.meta.get(HOOKS)
        or draws_random(node, module)
    )


def _reads_size(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    if not isinstance(source, fx.Node) or source.op != "placeholder":
        return False
    if node.target is getattr:
        return node.args[1] in _SIZE_ATTRIBUTES
    return function_name(node.target) in _SIZE_READERS


def _is_folded(node: fx.Node, found: dict[fx.Node, None]) -> bool:
    """Whether a node computes a value that other operators than constants read."""
    return node.op in CALLS and any(user not in found for user in node.users)


class _Evaluation(fx.Interpreter):
    """Runs the chosen nodes.

    Args:
        fill: of tensors that are made without values, so that runs differ where one is read.
    """

    def __init__(self, module: fx.GraphModule, nodes: dict[fx.Node, None], fill: int) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._chosen, self._graph_module, self._fill = nodes, module, fill
        self.versions: dict[fx.Node, int] = {}

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "placeholder":
            return super().run_node(n)
        if n not in self._chosen:
            return None
        value = super().run_node(n)
        # A later operator may work in place.
        value = value.clone() if n.op == "get_attr" else value
        if function_name(n.target) in UNDEFINED:
            value.fill_(self._fill)
        if isinstance(value, Tensor):
            self.versions[n] = value._version
        return value

    def is_final(self, node: fx.Node, found: dict[fx.Node, None]) -> bool:
        """Whether a value is never changed in place, or before all others read it."""
        if self.versions.get(node) == self.env[node]._version:
            return True
        writers = _writers(self._graph_module, found)
        return all(user > each for user in node.users if user not in found for each in writers)


def _evaluate(
    module: fx.GraphModule,
    nodes: dict[fx.Node, None],
    examples: tuple[Tensor, ...],
    n_samples: int,
) -> _Evaluation:
    run = _Evaluation(module, nodes, fill=n_samples % 2)
    with torch.no_grad(), torch.device("cpu"):
        inputs = [
            torch.zeros(
                (n_samples, *x.shape[1:]), dtype=x.dtype, device="cpu" if x.is_meta else x.device
            )
            for x in examples
        ]
        run.run(*inputs)
    return run


def _writers(module: fx.GraphModule, found: dict[fx.Node, None]) -> set[fx.Node]:
    modules = dict(module.named_modules())
    return {node for node in found if node.op in CALLS and works_in_place(node, modules)}


def _fold(
    module: fx.GraphModule, node: fx.Node, found: dict[fx.Node, None], few: Tensor, more: Tensor
) -> None:
    if few.is_meta or few.numel() > _LARGEST or few.dim() != more.dim():
        return
    dims = changing_dims([few.shape, more.shape])
    if not dims:
        if _is_equal(few, more):
            _replace(node, _constant(module, node, few), found)
        return
    (dim, *others) = dims
    one = few.narrow(dim, 0, 1)
    is_repeated = (few.shape[dim], more.shape[dim]) == _SIZES and not others
    if is_repeated and all(_is_equal(x, one.expand(x.shape)) for x in (few, more)):
        _replace_by_expanded(module, node, found, one, dim)


def _is_equal(one: Tensor, other: Tensor) -> bool:
    return (
        one.dtype == other.dtype
        and one.shape == other.shape
        and torch.equal(one.nan_to_num(), other.nan_to_num())
    )


def _constant(module: fx.GraphModule, node: fx.Node, value: Tensor) -> fx.Node:
    name = f"constant_{node.name}"
    module.register_buffer(name, value.detach().clone(memory_format=torch.contiguous_format))
    with module.graph.inserting_before(node):
        held = module.graph.create_node("get_attr", name)
    held.meta["val"] = node.meta.get("val")
    return held


def _replace(node: fx.Node, constant: fx.Node, found: dict[fx.Node, None]) -> None:
    node.replace_all_uses_with(constant, delete_user_cb=lambda user: user not in found)


def _replace_by_expanded(
    module: fx.GraphModule, node: fx.Node, found: dict[fx.Node, None], one: Tensor, dim: int
) -> None:
    """Operators that broadcast read the constant itself, others expand it to the samples."""
    constant = _constant(module, node, one)
    node.replace_all_uses_with(
        constant, delete_user_cb=lambda user: user not in found and _broadcasts(user, node, found)
    )
    if all(user in found for user in node.users):
        return
    source = next(iter(module.graph.find_nodes(op="placeholder")))
    with module.graph.inserting_before(node):
        n_samples = module.graph.call_function(torch.ops.aten.sym_size.int, (source, 0))
        sizes = [n_samples if k == dim else -1 for k in range(one.dim())]
        expanded = module.graph.call_method("expand", (constant, *sizes))
    expanded.meta["val"] = node.meta.get("val")
    _replace(node, expanded, found)


def _broadcasts(user: fx.Node, node: fx.Node, found: dict[fx.Node, None]) -> bool:
    """Whether an operator's other operands, which are no constants, give its output the samples."""
    if user.op in ("call_module", "output") or function_name(user.target) == "type_as":
        return False
    kind, _ = describe_node(user, {}, len(user.all_input_nodes))
    expected = node.meta.get("val")
    if kind not in _BROADCASTING or not isinstance(expected, Tensor):
        return False
    others = [source.meta.get("val") for source in user.all_input_nodes if source not in found]
    return any(  # sizes are symbols
        isinstance(x, Tensor)
        and x.dim() == expected.dim()
        and str(x.shape[0]) == str(expected.shape[0])
        for x in others
    )
