"""Casts to another tensor's dtype (`y.to(x.dtype)`), which an export records as a fixed dtype.

A model that casts so is exported twice, in fp32 and under autocast. Casts that take autocast's
dtype in the second export follow the dtype of the training. Casts that only the second has
(`if x.dtype != w.dtype`), and regions without autocast, are inserted into the first:

    in fp32                      under autocast               follows
    to(linear, float32)          to(linear, bfloat16)         to(linear)
    linear_1(linear)             linear_1(to(linear, fp32))   linear_1(to(linear, fp32))
"""

from __future__ import annotations

from collections import deque
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from harness.runtime.capture.meta_copy import fake, fake_copy
from harness.runtime.tracing.constructs import AUTOCAST, OpaqueFunction, function_name

_CAST = "to"
_NARROW = torch.bfloat16  # stands for fp16, too


class DtypeCast(OpaqueFunction):
    """Casts to fp32, unless the tensor is wider.

    Args:
        to_autocast: casts to autocast's dtype where that is enabled.
    """

    def __init__(self, *, to_autocast: bool) -> None:
        super().__init__(_CAST)
        self._to_autocast = to_autocast

    def __call__(self, x: Tensor) -> Tensor:
        device = x.device.type
        if self._to_autocast and device != "meta" and torch.is_autocast_enabled(device):
            return x.to(torch.get_autocast_dtype(device))
        return x.to(torch.promote_types(x.dtype, torch.float32))


def under_autocast() -> torch.autocast:
    """The context of the second export; exports run on the CPU."""
    return torch.autocast("cpu", _NARROW)


class _DtypeReads(TorchFunctionMode):
    """Notes whether autocast's dtype is read from a tensor."""

    is_narrow = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        self.is_narrow |= result is _NARROW
        return result


def may_follow(module: fx.GraphModule, model: nn.Module, examples: tuple[Tensor, ...]) -> bool:
    """Whether an export casts to fp32, and the model reads autocast's dtype from a tensor. Runs the
    model on fake tensors, which takes a tenth of the time of an export."""
    if not any(_is_cast(node, torch.float32) for node in module.graph.nodes):
        return False
    mode, reads = FakeTensorMode(allow_non_fake_inputs=True), _DtypeReads()
    copied, given = fake_copy(model, mode), [fake(x, mode) for x in examples]
    try:
        with mode, under_autocast(), reads:
            copied(*given)
    except Exception:  # fake tensors have no values to read; the reads before count
        return reads.is_narrow
    return reads.is_narrow


def follow_training_dtype(module: fx.GraphModule, narrow: fx.GraphModule) -> None:
    """Let casts of an export follow the dtype of the training; leave it as it is where the export
    under autocast differs in more than casts.

    Args:
        narrow: the export under autocast.
    """
    _follow(_pairs(module.graph, narrow.graph) or [])
    module.recompile()


class _Pair(NamedTuple):
    """A node and the same under autocast; or a cast that only autocast has, and the node before
    which it belongs."""

    node: fx.Node
    narrow: fx.Node
    is_inserted: bool


def _pairs(graph: fx.Graph, narrow: fx.Graph) -> list[_Pair] | None:
    """All pairs, in order; None if the graphs differ in more than casts."""
    pairs: list[_Pair] = []
    nodes = deque(graph.nodes)
    for other in narrow.nodes:
        if not nodes:
            return None
        is_equal = _form(nodes[0]) == _form(other)
        if not is_equal and not _is_cast(other, torch.float32, _NARROW):
            return None
        pairs.append(_Pair(nodes[0], other, not is_equal))
        if is_equal:
            nodes.popleft()
    return None if nodes else pairs


def _is_cast(node: fx.Node, *dtypes: torch.dtype) -> bool:
    given = tree_leaves((node.args, node.kwargs))
    return function_name(node.target) == _CAST and any(dtype in given for dtype in dtypes)


def _form(node: fx.Node) -> tuple[Any, ...]:
    """What a node calls, and which of its arguments are nodes."""
    name = function_name(node.target) if node.op == "call_function" else ""
    leaves = tree_leaves((node.args, node.kwargs))
    return node.op, name, *(isinstance(x, fx.Node) for x in leaves)


def _follow(pairs: list[_Pair]) -> None:
    own: dict[fx.Node, fx.Node] = {}
    for node, narrow, is_inserted in pairs:
        given = tree_leaves((narrow.args, narrow.kwargs))
        if is_inserted:
            source, cast = own[given[0]], DtypeCast(to_autocast=_is_cast(narrow, _NARROW))
            with node.graph.inserting_before(node):
                own[narrow] = node.graph.call_function(cast, (source,))
            own[narrow].meta = {**narrow.meta, "val": source.meta["val"]}
            continue
        own[narrow] = node
        if AUTOCAST in narrow.meta:  # a region that is entered under autocast only
            node.meta[AUTOCAST] = narrow.meta[AUTOCAST]
        leaves, structure = tree_flatten((node.args, node.kwargs))
        nodes = [
            own[x] if isinstance(x, fx.Node) else y for x, y in zip(given, leaves, strict=True)
        ]
        node.args, node.kwargs = tree_unflatten(nodes, structure)
        if _is_cast(narrow, _NARROW) and not _is_cast(node, _NARROW):
            node.target, node.kwargs = DtypeCast(to_autocast=True), {}
            node.args = node.args[:1]
