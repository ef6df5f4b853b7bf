"""Replace operators that read no value of the inputs (position ids, masks, rotary tables) by what
they compute.

A value that is equal for every batch becomes a buffer; one that repeats itself for each sample
becomes a buffer that is expanded to the samples. Otherwise a strategy would have to compute it on
one device and send it to the others in every step.
"""

from __future__ import annotations

from collections.abc import Iterable
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
    FOLDED,
    HOOKS,
    WRITTEN,
    OpaqueFunction,
    function_name,
)

# Two batch sizes, both above 1. The third is the size that is trained, at which `max(n, 8)` may
# differ, or smaller, so that all values have this many elements.
_SIZES = (2, 3)
_MOST_ELEMENTS = 1 << 24
_LARGEST = 1 << 28  # elements
# Functions of an input that read its size or type only.
_SIZE_READERS = ("sym_size", "size", "dim")
_SIZE_ATTRIBUTES = ("shape", "device", "dtype", "ndim")
_BROADCASTING = ("elementwise", "add", "attention")


def fold_constants(module: fx.GraphModule, examples: tuple[Tensor, ...]) -> None:
    """Fold the constants of a traced model in place, and note the buffers that they depend on."""
    found = _independent(module)
    computed = [node for node in found if _is_folded(node, found)]
    module.meta[FOLDED] = frozenset[str]()
    if not computed:
        return
    runs = [_evaluate(module, found, examples, n) for n in _SIZES]
    n_elements = sum(x.numel() for x in runs[0].env.values() if isinstance(x, Tensor))
    n_samples = min(len(examples[0]), _SIZES[0] * _MOST_ELEMENTS // max(n_elements, 1))
    if n_samples > max(_SIZES):
        runs.append(_evaluate(module, found, examples, n_samples))
    for node in list(found):
        values = [x for run in runs if isinstance(x := run.env.get(node), Tensor)]
        if _is_folded(node, found) and len(values) == len(runs) and runs[0].is_final(node, found):
            _fold(module, node, found, values, [run.n_samples for run in runs])
    module.meta[FOLDED] = _read_by(node for node in computed if not _is_folded(node, found))
    # Writes into a value that stays an operator stay too.
    is_left = any(_is_folded(node, found) for node in found if node in runs[0].versions)
    writers = _writers(module, found) if is_left else set()
    module.graph.eliminate_dead_code(lambda node: node not in found or node in writers)
    module.graph.lint()
    module.recompile()


def _read_by(nodes: Iterable[fx.Node]) -> frozenset[str]:
    """Names of the tensors of the model from which nodes are computed."""
    waiting, seen = list(nodes), set[fx.Node]()
    while waiting:
        node = waiting.pop()
        waiting += [source for source in node.all_input_nodes if source not in seen]
        seen.add(node)
    return frozenset(str(node.target) for node in seen if node.op == "get_attr")


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
    """Runs the chosen nodes."""

    def __init__(self, module: fx.GraphModule, nodes: dict[fx.Node, None], n_samples: int) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._chosen, self._graph_module, self.n_samples = nodes, module, n_samples
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
            value.fill_(self.n_samples % 2)  # so that runs differ where one is read
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
    run = _Evaluation(module, nodes, n_samples)
    with torch.no_grad(), torch.device("cpu"):
        inputs = [
            torch.zeros((), dtype=x.dtype, device="cpu" if x.is_meta else x.device).expand(
                n_samples, *x.shape[1:]
            )
            for x in examples
        ]
        run.run(*inputs)
    return run


def _writers(module: fx.GraphModule, found: dict[fx.Node, None]) -> set[fx.Node]:
    modules = dict(module.named_modules())
    return {node for node in found if node.op in CALLS and works_in_place(node, modules)}


def _fold(
    module: fx.GraphModule,
    node: fx.Node,
    found: dict[fx.Node, None],
    values: list[Tensor],
    batches: list[int],
) -> None:
    few, *others = values
    if few.is_meta or few.numel() > _LARGEST or any(x.dim() != few.dim() for x in others):
        return
    dims = changing_dims([x.shape for x in values])
    if not dims:
        if all(_is_equal(few, x) for x in others):
            _replace(node, _constant(module, node, few), found)
        return
    dim = dims[0]
    one = few.narrow(dim, 0, 1)
    is_repeated = [x.shape[dim] for x in values] == batches and len(dims) == 1
    if is_repeated and all(_is_equal(x, one.expand(x.shape)) for x in values):
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
