"""Describe an fx node as an operator: kind and attributes, from its module type or function.

Find the nodes of a captured model that draw random numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode

from harness.domain.graph import Attribute
from harness.runtime.models.attention import GroupedAttention
from harness.runtime.models.mixture import Router, is_single_operator
from harness.runtime.tracing.attention_region import AttentionRegion
from harness.runtime.tracing.autocast import AutocastFunction, AutocastModule
from harness.runtime.tracing.constructs import (
    CustomFunction,
    OpaqueFunction,
    argument_of,
    function_name,
)
from harness.runtime.tracing.hooks import has_own_hooks
from harness.runtime.tracing.matrix_products import transposed_linear

Attributes = dict[str, Attribute]


def _ints(value: Any) -> list[int]:
    return [int(v) for v in value] if isinstance(value, (tuple, list)) else [int(value)] * 2


def _conv2d(module: nn.Conv2d) -> Attributes:
    found: Attributes = {
        "in_features": module.in_channels,
        "out_features": module.out_channels,
        "kernel": _ints(module.kernel_size),
        "stride": _ints(module.stride),
        "dilation": _ints(module.dilation),
        "groups": module.groups,
        "bias": module.bias is not None,
    }
    if isinstance(module.padding, str):  # "same" puts odd padding last; "valid": 0
        is_same = module.padding == "same"
        spans = zip(_ints(module.dilation), _ints(module.kernel_size), strict=True)
        found["padding"] = [d * (k - 1) // 2 if is_same else 0 for d, k in spans]
    else:
        found["padding"] = _ints(module.padding)
    if module.padding_mode != "zeros":
        found["padding_mode"] = module.padding_mode
    return found


def _pool(module: Any) -> Attributes:
    kernel = _ints(module.kernel_size)
    stride = kernel if module.stride is None else _ints(module.stride)
    found: Attributes = {"kernel": kernel, "stride": stride, "padding": _ints(module.padding)}
    dilation = _ints(getattr(module, "dilation", 1))
    return found if dilation == [1, 1] else {**found, "dilation": dilation}


def _linear(module: nn.Linear) -> Attributes:
    return {
        "in_features": module.in_features,
        "out_features": module.out_features,
        "bias": module.bias is not None,
    }


def _transposed_linear(node: fx.Node) -> tuple[str, Attributes]:
    values = [x.meta.get("val") if isinstance(x, fx.Node) else None for x in (node.args[0], node)]
    widths = [int(value.shape[-1]) for value in values if isinstance(value, torch.Tensor)]
    if len(widths) < len(values):
        return "other", {"function": "transposed_linear"}
    has_bias = node.args[2] is not None
    attributes: Attributes = {"in_features": widths[0], "out_features": widths[1], "bias": has_bias}
    return "linear", {"function": "transposed_linear", **attributes}


def _attention(module: nn.MultiheadAttention) -> Attributes:
    has_more = module.bias_k is not None or module.add_zero_attn or not module.batch_first
    drops = module.training and module.dropout > 0
    return {
        "n_heads": module.num_heads,
        "in_features": module.embed_dim,
        "key_features": 0 if has_more else 2 * module.embed_dim,
        "has_dropout": drops,
    }


def _grouped_attention(module: GroupedAttention) -> Attributes:
    form, relative = module.form, module.relative
    return {
        "n_heads": module.n_groups,  # groups are what can be cut
        "in_features": module.width,
        "key_features": 2 * module.n_groups * form.head_dim,
        "queries_per_group": form.queries_per_group,
        "is_causal": form.is_causal,
        "has_rotary": form.rotary_base is not None,
        "n_buckets": 0 if relative is None else relative.num_embeddings,
    }


def _attention_region(region: AttentionRegion) -> Attributes:
    found: Attributes = {"n_heads": region.n_groups}
    if region.positions is None:
        return {**found, "is_cut_by_positions": False}
    found["reads"], mixing = list(region.positions.reads), region.positions.mixing
    if mixing is None:
        return found
    is_causal, has_dropout = mixing.form.is_causal, mixing.form.dropout > 0
    found |= {"key_features": mixing.key_features, "is_causal": is_causal}
    return {**found, "has_dropout": has_dropout, "scores_all": mixing.scores_all}


def _read(**names: str) -> Callable[[Any], Attributes]:
    """A reader of attributes under the names that a module has for them."""
    return lambda module: {key: getattr(module, name) for key, name in names.items()}


# Module types, kind and reader of attributes; the first match counts.
_MODULES: list[tuple[tuple[type[nn.Module], ...], str, Callable[[Any], Attributes]]] = [
    ((nn.Conv2d,), "conv2d", _conv2d),
    ((nn.Linear,), "linear", _linear),
    ((nn.MaxPool2d, nn.AvgPool2d), "pool", _pool),
    ((nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d), "pool", _read()),
    ((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm), "batch_norm", _read()),
    (
        (nn.LayerNorm, nn.RMSNorm),
        "layer_norm",
        lambda norm: {"n_normalized": len(norm.normalized_shape)},
    ),
    ((nn.GroupNorm,), "layer_norm", _read()),
    (
        (nn.Embedding, nn.EmbeddingBag),
        "embedding",
        _read(n_rows="num_embeddings", out_features="embedding_dim"),
    ),
    ((nn.MultiheadAttention,), "attention", _attention),
    ((GroupedAttention,), "attention", _grouped_attention),
    (
        (Router,),
        "router",
        lambda router: {
            "in_features": router.scores.in_features,
            "n_experts": router.n_experts,
            "n_chosen": router.n_chosen,
        },
    ),
    (
        (nn.LSTM,),
        "lstm",
        _read(in_features="input_size", out_features="hidden_size", n_layers="num_layers"),
    ),
    ((nn.Softmax, nn.LogSoftmax), "softmax", _read()),
    ((nn.Flatten,), "flatten", _read()),
    ((nn.Dropout, nn.Dropout2d), "elementwise", lambda dropout: {"probability": float(dropout.p)}),
    (
        (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Sigmoid, nn.Tanh, nn.LeakyReLU, nn.Identity,
         nn.Hardswish, nn.Hardsigmoid, nn.ELU, nn.Softplus),
        "elementwise",
        _read(),
    ),
]  # fmt: skip

_ELEMENTWISE = {
    "relu", "relu_", "gelu", "silu", "sigmoid", "tanh", "mul", "sub", "truediv", "div", "neg",
    "dropout", "clamp", "pow", "sqrt", "rsqrt", "leaky_relu", "hardswish", "softplus", "elu", "to",
    "float", "contiguous", "log", "abs", "imul", "isub", "exp", "detach", "ne", "eq", "lt", "le",
    "gt", "ge", "where", "masked_fill", "maximum", "minimum", "cos", "sin", "square", "reciprocal",
    "erf", "mish", "softsign", "clone", "type_as", "logical_and", "logical_or", "logical_not",
    "clamp_min", "clamp_max", "clip", "sign", "rsub", "__and__", "__or__", "bitwise_and",
    "bitwise_or", "bitwise_not", "double", "half", "bfloat16", "long", "int", "bool",
}  # fmt: skip
CONCATENATIONS = {"cat", "concat", "concatenate"}
_RESHAPES = {
    "reshape", "view", "permute", "transpose", "expand", "unsqueeze", "squeeze", "stack", "chunk",
    "split", "mean", "sum", "matmul", "bmm", "getitem", "t", "repeat", "expand_as", "unflatten",
    "slice", "select", "narrow", "unbind", "pad", "picked", "placed", "split_with_sizes",
    "zeros_like", "ones_like", "full_like", "flip", "index_select", "cumsum", "repeat_interleave",
    "movedim", "getattr", "numpy_T", "mT", "index",
}  # fmt: skip
_FUNCTIONS: dict[Any, str] = {
    F.conv2d: "conv2d",
    F.linear: "linear",
    F.max_pool2d: "pool",
    F.avg_pool2d: "pool",
    F.adaptive_avg_pool2d: "pool",
    F.batch_norm: "batch_norm",
    F.layer_norm: "layer_norm",
    F.embedding: "embedding",
    F.embedding_bag: "embedding",
    F.scaled_dot_product_attention: "attention",
}
_KINDS = {
    **dict.fromkeys(_ELEMENTWISE, "elementwise"),
    **dict.fromkeys(CONCATENATIONS, "cat"),
    **dict.fromkeys(("softmax", "log_softmax"), "softmax"),
    "flatten": "flatten",
}
_ATEN = {function_name(function): kind for function, kind in _FUNCTIONS.items()}
# Their functions are known by name.
_PACKAGES = ("torch", "torchvision", "harness")


def is_known(kind: str, name: str) -> bool:
    """Whether the planner knows an operator; of kind `other` it knows the reshapes only."""
    return kind != "other" or name in _RESHAPES


def is_opaque(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node runs user code that was not traced: autograd functions, hooks, and modules
    kept whole."""
    if node.op != "call_module":
        is_autocast = isinstance(node.target, AutocastFunction)
        return isinstance(node.target, OpaqueFunction) and not is_autocast
    module = modules[str(node.target)]
    module = module.module if isinstance(module, AutocastModule) else module
    is_known_type = type(module).__module__.startswith("torch.") or is_single_operator(module)
    return not is_known_type or any(map(has_own_hooks, module.modules()))


def is_frozen_norm(node: fx.Node, module: nn.Module | None) -> bool:
    """Whether a batch norm uses its running statistics instead of the batch's.

    Args:
        module: the module that the node calls; None for a function.
    """
    if isinstance(module, _BatchNorm):
        return not module.training
    return not argument_of(node, 5, "training", default=False)


def updates_statistics(node: fx.Node, modules: Mapping[str, nn.Module]) -> bool:
    """Whether a node calls a batch norm that updates its running statistics."""
    module = modules[str(node.target)] if node.op == "call_module" else None
    return isinstance(module, _BatchNorm) and module.training and module.track_running_stats


def describe_node(
    node: fx.Node, modules: dict[str, nn.Module], n_tensors: int
) -> tuple[str, Attributes]:
    """Kind and attributes of a node that computes a tensor."""
    module = modules[str(node.target)] if node.op == "call_module" else None
    described = _describe_function(node, n_tensors) if module is None else _describe_module(module)
    kind, attributes = described
    if kind == "batch_norm" and is_frozen_norm(node, module):
        attributes["statistics"] = "frozen"
    return kind, attributes


def _describe_module(module: nn.Module) -> tuple[str, Attributes]:
    if isinstance(module, AutocastModule):
        function = type(module.module).__name__
        return "other", {"function": function, "autocast": str(module.region)}
    has_hooks = any(map(has_own_hooks, module.modules()))
    for types, kind, read in () if has_hooks else _MODULES:
        if isinstance(module, types):
            return kind, {"function": type(module).__name__, **read(module)}
    return "other", {"function": type(module).__name__}


def _describe_function(node: fx.Node, n_tensors: int) -> tuple[str, Attributes]:
    if node.op == "get_attr":
        return "other", {"function": "parameter"}
    if node.target is operator.getitem:
        return "other", {"function": "getitem"}
    name = function_name(node.target)
    if _is_users(node.target):
        return "other", {"function": f"{node.target.__module__}.{name}"}
    if node.target is transposed_linear:
        return _transposed_linear(node)
    if isinstance(node.target, AttentionRegion):
        return "attention", {"function": name, **_attention_region(node.target)}
    if isinstance(node.target, AutocastFunction):
        return "other", {"function": name, "autocast": str(node.target.region)}
    if isinstance(node.target, OpaqueFunction):
        return "other", {"function": name}  # user code may have any name
    if name in ("add", "add_", "iadd"):
        return "add" if n_tensors > 1 else "elementwise", {"function": name}
    by_name = _KINDS.get(name) or _ATEN.get(name.removesuffix("_"), "other")
    return _FUNCTIONS.get(node.target, by_name), {"function": name}


def _is_users(target: Any) -> bool:
    """Whether a function is a user's, such as one of torch.fx.wrap, which may have any name."""
    is_function = isinstance(target, FunctionType)
    return is_function and target.__module__.partition(".")[0] not in _PACKAGES


# Functions whose result is uninitialized memory.
UNDEFINED = ("empty", "empty_like", "new_empty", "empty_strided")
ALWAYS_RANDOM = {
    "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "fractional_max_pool2d",
    "fractional_max_pool2d_with_indices", "fractional_max_pool3d",
    "fractional_max_pool3d_with_indices", "geometric_", "gumbel_softmax", "log_normal_",
    "multinomial", "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "random_", "randperm", "rrelu_with_noise", "uniform_",
}  # fmt: skip
# Positions of the probability and of the flag that enables drawing (None: no such argument), and
# the flag's default.
SOMETIMES_RANDOM: dict[str, tuple[int | None, int | None, bool]] = {
    **dict.fromkeys(("drop_block2d", "drop_block3d"), (1, 5, True)),
    **dict.fromkeys(
        ("dropout", "dropout_", "dropout1d", "dropout2d", "dropout3d", "feature_dropout",
         "feature_dropout_", "native_dropout"), (1, 2, True),
    ),
    **dict.fromkeys(
        ("alpha_dropout", "alpha_dropout_", "feature_alpha_dropout", "feature_alpha_dropout_"),
        (1, 2, False),
    ),
    **dict.fromkeys(("rrelu", "rrelu_"), (None, 3, False)),
    "multi_head_attention_forward": (10, 13, True),
    "scaled_dot_product_attention": (4, None, True),
    "stochastic_depth": (1, 3, True),
}  # fmt: skip


def is_dropout(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node is an enabled dropout of elements or channels."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return isinstance(module, nn.Dropout | nn.Dropout2d) and _module_draws(module)
    if isinstance(node.target, CustomFunction) or _is_users(node.target):
        return False  # user code may have any name
    return function_name(node.target) == "dropout" and draws_random(node, root)


def draws_random(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node's module or function is known to draw random numbers."""
    if node.op == "call_module":
        return any(map(_module_draws, root.get_submodule(str(node.target)).modules()))
    if node.op not in ("call_function", "call_method"):
        return False
    if isinstance(node.target, AttentionRegion):
        return node.target.draws
    name = function_name(node.target)
    return name in ALWAYS_RANDOM or (
        name in SOMETIMES_RANDOM and _is_on(node, *SOMETIMES_RANDOM[name])
    )


# Those that return a tensor alone.
_DROPOUTS = {name for name in SOMETIMES_RANDOM if "dropout" in name} - {"native_dropout"}


class DropoutOff(TorchFunctionMode):
    """Lets torch's functions drop nothing in the block."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given, named = function_name(func), list(args), dict(kwargs or {})
        if name in _DROPOUTS:
            return given[0] if given else named["input"]
        if name == "scaled_dot_product_attention":
            given[4:5] = [0.0][: len(given[4:])]
            named.pop("dropout_p", None)
        elif name == "multi_head_attention_forward":
            named["training"] = False
        return func(*given, **named)


def _module_draws(module: nn.Module) -> bool:
    """Whether a module draws random numbers outside its children."""
    if isinstance(module, nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
        return True
    probability = 0.0
    if isinstance(module, _DropoutNd):
        probability = module.p
    elif isinstance(module, nn.MultiheadAttention | nn.RNNBase):
        probability = module.dropout
    elif isinstance(module, nn.RReLU):
        probability = module.upper - module.lower
    return module.training and probability > 0


def _is_on(node: fx.Node, probability: int | None, flag: int | None, default: bool) -> bool:
    omitted = 0.0 if flag is None else 0.5  # default of the attention function; of all others
    chance, is_on = 1.0, True
    if probability is not None:
        chance = argument_of(node, probability, "p", "dropout_p", default=omitted)
    if flag is not None:
        is_on = argument_of(node, flag, "training", "train", default=default)
    return bool(is_on) and chance != 0
