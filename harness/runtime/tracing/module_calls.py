"""Turn the operators that torch.export makes of one of PyTorch's modules into a call of the module.

A strategy can cut a linear layer, a convolution or a normalisation by their modules' sizes, and
names them by their paths.

Batch normalisations of other libraries that are PyTorch's with more around it, such as timm's
with an activation: the normalisation is PyTorch's operator, the rest is traced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.activation import MultiheadAttention
from torch.nn.modules.pooling import _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd, _AvgPoolNd, _MaxPoolNd
from torch.nn.utils import parametrize

from harness.runtime.tracing.constructs import AUTOCAST, CALLS, NO_GRAD
from harness.runtime.tracing.hooks import has_own_hooks
from harness.runtime.tracing.patches import replaced

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_STACK = "nn_module_stack"  # key of an exported node's meta


def is_own_norm(module: nn.Module) -> bool:
    """Whether a module is a subclass of PyTorch's batch norms with a forward of its own."""
    is_norm = isinstance(module, _NORMS) and type(module).forward is not nn.BatchNorm2d.forward
    return is_norm and not has_own_hooks(module)


def plain_norm(module: nn.Module) -> nn.Module:
    """PyTorch's batch norm with the same tensors and submodules."""
    plain = copy.copy(module)
    plain.__class__ = next(kind for kind in _NORMS if isinstance(module, kind))
    return plain


@contextmanager
def norm_as_call(module: nn.Module, call: Callable[[Any], Any]) -> Iterator[None]:
    """Redirect the module's normalisation to `call(x)` and ignore its count of batches, which the
    called module keeps."""
    normalize: Any = F.batch_norm
    own = module._buffers.get("running_mean")

    def redirected(x: Any, running_mean: Any = None, *args: Any, **kwargs: Any) -> Any:
        if running_mean is own:
            return call(x)
        return normalize(x, running_mean, *args, **kwargs)

    counter = module._buffers.get("num_batches_tracked")
    if counter is not None:
        # Not of the counter, because operators on buffers alone make constants.
        another = torch.zeros((), dtype=counter.dtype, device=counter.device)
        module._buffers["num_batches_tracked"] = another
    try:
        with replaced(F, "batch_norm", redirected):
            yield
    finally:
        if counter is not None:
            module._buffers["num_batches_tracked"] = counter


_LAYERS = (
    nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.LayerNorm,
    nn.RMSNorm, nn.GroupNorm, nn.modules.batchnorm._NormBase, nn.modules.dropout._DropoutNd,
    _AvgPoolNd, _MaxPoolNd, _AdaptiveAvgPoolNd, _AdaptiveMaxPoolNd,
)  # fmt: skip
# Attentions are joined from the operators of these.
IN_ATTENTIONS = (nn.Linear, nn.LayerNorm, nn.RMSNorm, nn.Softmax, nn.Dropout)


def call_modules(graph: fx.Graph, model: nn.Module, *, in_attentions: bool) -> None:
    """Replace runs of operators by calls of the model's modules that they come from.

    Args:
        in_attentions: those of IN_ATTENTIONS, else all others.
    """
    modules, tensors = dict(model.named_modules()), named_tensors(model)
    calls = (node for node in graph.nodes if node.op in CALLS)
    for (_, path), nodes in groupby(list(calls), _call):
        called, part = list(nodes), modules.get(path)
        if part is None or (type(part) in IN_ATTENTIONS) != in_attentions:
            continue
        if _is_layer(part) and _is_as_made(part, called):
            own = {id(tensor) for tensor in named_tensors(part).values()}
            _replace(graph, path, called, {name for name, x in tensors.items() if id(x) in own})


def named_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and buffers of a module by each of their names."""
    return {
        **dict(module.named_parameters(remove_duplicate=False)),
        **dict(module.named_buffers(remove_duplicate=False)),
    }


def is_of_layer(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node was traced in a layer of PyTorch's."""
    part = modules.get(_call(node)[1])
    return part is not None and _is_layer(part)


def without_call(meta: dict[str, Any]) -> dict[str, Any]:
    """The marks of an operator that does not compute what its module does."""
    return {key: mark for key, mark in meta.items() if key != _STACK}


def _call(node: fx.Node) -> tuple[str, str]:
    """The call of a module in which a node was traced, and the module's path."""
    stack = node.meta.get(_STACK) or {}
    key, (path, _) = next(reversed(stack.items()), ("", ("", None)))
    return str(key), str(path)


def _is_layer(part: nn.Module) -> bool:
    if is_own_norm(part):
        return True
    is_plain = type(part).__module__.startswith("torch.nn.") and not has_own_hooks(part)
    is_known = isinstance(part, _LAYERS) or (
        type(part).__module__ == MultiheadAttention.__module__
        and not isinstance(part, MultiheadAttention)
    )
    return is_plain and is_known and not parametrize.is_parametrized(part)


def _is_as_made(part: nn.Module, nodes: list[fx.Node]) -> bool:
    """Whether a call of a layer has no argument but its input: `output_size` changes the padding of
    a transposed convolution."""
    if not isinstance(part, nn.modules.conv._ConvTransposeNd):
        return True
    names = [argument.name for argument in nodes[-1].target._schema.arguments]  # type: ignore[union-attr]
    given = dict(zip(names, nodes[-1].args, strict=False)) | nodes[-1].kwargs
    padding = given.get("output_padding", [0] * len(part.output_padding))
    return tuple(padding) == tuple(part.output_padding)


def _replace(graph: fx.Graph, path: str, nodes: list[fx.Node], own: Collection[str]) -> None:
    """Replace one call's operators if they read one value, beside the module's own tensors, and
    give one."""
    facts = (getattr, torch.ops.aten.sym_size.int)  # which a module reads off its input
    inside = set(nodes)
    given = dict.fromkeys(
        source
        for node in nodes
        for source in node.all_input_nodes
        if source not in inside and source.target not in (*facts, *own)
    )
    read = [n for n in nodes if any(user not in inside for user in n.users)]
    results = read or nodes[-1:]  # nothing reads the layer of an output that no loss takes
    marks = {(n.meta.get(NO_GRAD), n.meta.get(AUTOCAST)) for n in nodes}
    if not len(given) == len(results) == len(marks) == 1:
        return
    with graph.inserting_before(nodes[0]):
        call = graph.create_node("call_module", path, tuple(given))
    call.meta = {**results[0].meta}
    results[0].replace_all_uses_with(call)
    for node in reversed(nodes):
        graph.erase_node(node)
