"""Casts to another tensor's dtype (`y.to(x.dtype)`), random draws in it, and its least number as a
mask (`torch.finfo(x.dtype).min`), which an export records as those of fp32.

A model with such is exported twice, in fp32 and under autocast. Those that have autocast's dtype in
the second export follow the dtype of the training. Casts that only the second has (`if x.dtype !=
w.dtype`), and regions without autocast, are inserted into the first:

    in fp32                      under autocast               follows
    to(linear, float32)          to(linear, bfloat16)         to(linear)
    linear_1(linear)             linear_1(to(linear, fp32))   linear_1(to(linear, fp32))
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from harness.runtime.capture.meta_copy import fake, fake_copy
from harness.runtime.capture.operators import ALWAYS_RANDOM
from harness.runtime.tracing.constructs import AUTOCAST, OpaqueFunction, function_name
from harness.runtime.tracing.patches import without_values

_CAST, _FILL = "to", "masked_fill"
_NARROW = torch.bfloat16  # stands for fp16, too
# What a GPU's autocast computes in fp32, and a CPU's in the dtype of the inputs.
# Source: PyTorch, Automatic Mixed Precision package, op-specific behavior.
_WIDE_ON_GPUS = {
    "__pow__", "__rpow__", "__rtruediv__", "acos", "asin", "cdist", "cosh", "cosine_similarity",
    "cumprod", "cumsum", "dist", "erfinv", "exp", "expm1", "group_norm", "layer_norm", "log",
    "log10", "log1p", "log2", "log_softmax", "norm", "normalize", "pow", "prod", "reciprocal",
    "renorm", "rsqrt", "sinh", "softmax", "softmin", "softplus", "sum", "tan",
}  # fmt: skip


class DtypeCast(OpaqueFunction):
    """Casts to fp32, unless the tensor is wider.

    Args:
        to_autocast: casts to autocast's dtype where that is enabled.
    """

    def __init__(self, *, to_autocast: bool) -> None:
        super().__init__(_CAST)
        self._to_autocast = to_autocast

    def __call__(self, x: Tensor) -> Tensor:
        narrow = _autocast_dtype(x.device) if self._to_autocast else None
        return x.to(narrow or torch.promote_types(x.dtype, torch.float32))


class DtypeDraw(OpaqueFunction):
    """Draws random numbers of autocast's dtype where that is enabled."""

    def __init__(self, draw: Any) -> None:
        super().__init__(function_name(draw))
        self._draw = draw

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        narrow = _autocast_dtype(torch.device(kwargs["device"]))
        return self._draw(*args, **kwargs | ({"dtype": narrow} if narrow else {}))


class MaskedFill(OpaqueFunction):
    """Fills with the least or largest number of the tensor's dtype, where that in fp32 is given."""

    def __init__(self, fill: Any) -> None:
        super().__init__(_FILL)
        self._fill = fill

    def __call__(self, x: Tensor, mask: Tensor, number: float) -> Any:
        return self._fill(x, mask, math.copysign(torch.finfo(x.dtype).max, number))


def _autocast_dtype(device: torch.device) -> torch.dtype | None:
    is_enabled = device.type != "meta" and torch.is_autocast_enabled(device.type)
    return torch.get_autocast_dtype(device.type) if is_enabled else None


def under_autocast() -> torch.autocast:
    """The context of the second export; exports run on the CPU."""
    return torch.autocast("cpu", _NARROW)


class _DtypeReads(TorchFunctionMode):
    """Keeps the dtypes that are read from tensors.

    Args:
        on_gpu: by the rules of a GPU's autocast, which computes more in fp32.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        super().__init__()
        self._on_gpu = on_gpu
        self.found: list[torch.dtype] = []

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._on_gpu and function_name(func) in _WIDE_ON_GPUS:
            args = tree_map(_widened, args)
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.dtype):
            self.found.append(result)
        return result


def _widened(value: Any) -> Any:
    is_narrow = isinstance(value, Tensor) and value.dtype is _NARROW
    return value.float() if is_narrow else value


def _reads_of(module: nn.Module, examples: tuple[Tensor, ...], run: Callable[..., object]) -> bool:
    """Whether a module reads autocast's dtype from a tensor that has another dtype in fp32, and the
    same dtypes on CPUs and GPUs.

    Args:
        run: calls the module with inputs, both of fake tensors: in fp32, then under autocast on a
            GPU, and last on a CPU.
    """
    found = []
    for context, on_gpu in ((nullcontext, False), (under_autocast, True), (under_autocast, False)):
        mode, reads = FakeTensorMode(allow_non_fake_inputs=True), _DtypeReads(on_gpu=on_gpu)
        copied, given = fake_copy(module, mode), [fake(x, mode) for x in examples]
        # Fake tensors have no values to read; the reads before count.
        with suppress(Exception), without_values(), mode, context(), reads:
            run(copied, *given)
        found.append(reads.found)
    plain, on_gpus, on_cpus = found
    return _NARROW in on_cpus and on_cpus == on_gpus and on_cpus != plain


def may_follow(module: fx.GraphModule, model: nn.Module, examples: tuple[Tensor, ...]) -> bool:
    """Whether an export has what may follow, and the model reads autocast's dtype from a tensor.
    Runs the model on fake tensors, which takes a tenth of the time of an export."""
    kinds = _is_cast, _is_draw, _is_fill
    if not any(is_kind(n, torch.float32) for n in module.graph.nodes for is_kind in kinds):
        return False
    return _reads_of(model, examples, lambda copied, *given: copied(*given))


def follow_training_dtype(module: fx.GraphModule, narrow: fx.GraphModule) -> None:
    """Let casts of an export follow the dtype of the training; leave it as it is where the export
    under autocast differs in more than casts.

    Args:
        narrow: the export under autocast.
    """
    own: dict[fx.Node, fx.Node] = {}
    for node, twin, is_inserted in _pairs(module.graph, narrow.graph):
        given = tree_leaves((twin.args, twin.kwargs))
        if is_inserted:
            source, cast = own[given[0]], DtypeCast(to_autocast=_is_cast(twin, _NARROW))
            with node.graph.inserting_before(node):
                own[twin] = node.graph.call_function(cast, (source,))
            own[twin].meta = {**twin.meta, "val": source.meta["val"]}
            continue
        own[twin] = node
        if AUTOCAST in twin.meta:  # a region that is entered under autocast only
            node.meta[AUTOCAST] = twin.meta[AUTOCAST]
        leaves, structure = tree_flatten((node.args, node.kwargs))
        nodes = [
            own[x] if isinstance(x, fx.Node) else y for x, y in zip(given, leaves, strict=True)
        ]
        node.args, node.kwargs = tree_unflatten(nodes, structure)
        if _is_cast(twin, _NARROW) and not _is_cast(node, _NARROW):
            node.target, node.kwargs = DtypeCast(to_autocast=True), {}
            node.args = node.args[:1]
        elif _is_draw(twin, _NARROW) and _is_draw(node, torch.float32):
            node.target = DtypeDraw(node.target)
        elif _is_fill(twin, _NARROW) and _is_fill(node, torch.float32):
            node.target = MaskedFill(node.target)
    module.recompile()


def follow_dtype_reads(module: fx.GraphModule, examples: tuple[Tensor, ...]) -> None:
    """The same in a graph of torch.fx, in which nodes read dtypes."""
    nodes = module.graph.find_nodes(op="call_function", target=getattr)
    reads = [node for node in nodes if node.args[1] == "dtype"]
    runs: list[dict[str, Any]] = []

    def run(copied: fx.GraphModule, *given: Tensor) -> None:
        interpreter = fx.Interpreter(copied, garbage_collect_values=False)
        try:
            interpreter.run(*given)
        finally:
            runs.append({node.name: value for node, value in interpreter.env.items()})

    if not reads or not _reads_of(module, examples, run):
        return
    plain, *_, narrow = runs  # a weight of 16 bits has its dtype in both
    following = [n for n in reads if narrow.get(n.name) is _NARROW is not plain.get(n.name)]
    users = (user for node in following for user in node.users)
    for user in tuple(users):
        if function_name(user.target) in (_CAST, "type"):
            user.op, user.target = "call_function", DtypeCast(to_autocast=True)
            user.args, user.kwargs = user.args[:1], {}
        elif function_name(user.target) in ALWAYS_RANDOM and "device" in user.kwargs:
            user.target = DtypeDraw(user.target)
    module.recompile()


# A node and the same under autocast; or the node before which a cast belongs that only autocast
# has, that cast, and true.
_Twins = tuple[fx.Node, fx.Node, bool]


def _pairs(graph: fx.Graph, narrow: fx.Graph) -> list[_Twins]:
    """All pairs, in order; none if the graphs differ in more than casts."""
    pairs: list[_Twins] = []
    nodes = deque(graph.nodes)
    for other in narrow.nodes:
        if not nodes:
            return []
        is_equal = _form(nodes[0]) == _form(other)
        if not is_equal and not _is_cast(other, torch.float32, _NARROW):
            return []
        pairs.append((nodes[0], other, not is_equal))
        if is_equal:
            nodes.popleft()
    return [] if nodes else pairs


def _is_cast(node: fx.Node, *dtypes: torch.dtype) -> bool:
    given = tree_leaves((node.args, node.kwargs))
    return function_name(node.target) == _CAST and any(dtype in given for dtype in dtypes)


def _is_draw(node: fx.Node, dtype: torch.dtype) -> bool:
    is_placed = node.kwargs.get("dtype") == dtype and "device" in node.kwargs
    return is_placed and function_name(node.target) in ALWAYS_RANDOM


def _is_fill(node: fx.Node, dtype: torch.dtype) -> bool:
    """Whether a mask is filled with the least or largest number of a dtype, out of place."""
    is_whole = function_name(node.target) == _FILL and len(node.args) == 3
    return is_whole and node.args[2] in (torch.finfo(dtype).min, torch.finfo(dtype).max)


def _form(node: fx.Node) -> tuple[Any, ...]:
    """What a node calls, and which of its arguments are nodes."""
    name = function_name(node.target) if node.op == "call_function" else ""
    leaves = tree_leaves((node.args, node.kwargs))
    return node.op, name, *(isinstance(x, fx.Node) for x in leaves)
