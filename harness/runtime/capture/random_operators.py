"""Find the nodes of a captured model that draw random numbers."""

from __future__ import annotations

from typing import Any

from torch import fx, nn
from torch.nn.modules.dropout import _DropoutNd

from harness.runtime.capture.operators import function_name
from harness.runtime.tracing.functions import CustomFunction

_ALWAYS = {
    "bernoulli", "bernoulli_", "binomial", "cauchy_", "exponential_", "fractional_max_pool2d",
    "fractional_max_pool2d_with_indices", "fractional_max_pool3d",
    "fractional_max_pool3d_with_indices", "geometric_", "gumbel_softmax", "log_normal_",
    "multinomial", "normal", "normal_", "poisson", "rand", "rand_like", "randint", "randint_like",
    "randn", "randn_like", "random_", "randperm", "rrelu_with_noise", "uniform_",
}  # fmt: skip
# Positions of the probability and of the flag that enables drawing (None: no such argument), and
# the flag's default.
_SWITCHED: dict[str, tuple[int | None, int | None, bool]] = {
    "alpha_dropout": (1, 2, False),
    "alpha_dropout_": (1, 2, False),
    "drop_block2d": (1, 5, True),
    "drop_block3d": (1, 5, True),
    "dropout": (1, 2, True),
    "dropout1d": (1, 2, True),
    "dropout2d": (1, 2, True),
    "dropout3d": (1, 2, True),
    "dropout_": (1, 2, True),
    "feature_alpha_dropout": (1, 2, False),
    "feature_alpha_dropout_": (1, 2, False),
    "feature_dropout": (1, 2, True),
    "feature_dropout_": (1, 2, True),
    "multi_head_attention_forward": (10, 13, True),
    "native_dropout": (1, 2, True),
    "rrelu": (None, 3, False),
    "rrelu_": (None, 3, False),
    "scaled_dot_product_attention": (4, None, True),
    "stochastic_depth": (1, 3, True),
}
_PROBABILITIES = ("p", "dropout_p")
_FLAGS = ("training", "train")


def is_dropout(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node is an enabled dropout of elements or channels."""
    if node.op == "call_module":
        module = root.get_submodule(str(node.target))
        return isinstance(module, nn.Dropout | nn.Dropout2d) and _module_draws(module)
    if isinstance(node.target, CustomFunction):
        return False  # user code may have any name
    return function_name(node.target) == "dropout" and draws_random(node, root)


def draws_random(node: fx.Node, root: nn.Module) -> bool:
    """Whether a node's module or function is known to draw random numbers."""
    if node.op == "call_module":
        return any(map(_module_draws, root.get_submodule(str(node.target)).modules()))
    if node.op not in ("call_function", "call_method"):
        return False
    name = function_name(node.target)
    return name in _ALWAYS or (name in _SWITCHED and _is_on(node, *_SWITCHED[name]))


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
    chance = 1.0 if probability is None else _argument(node, _PROBABILITIES, probability, omitted)
    is_on = True if flag is None else _argument(node, _FLAGS, flag, default)
    return bool(is_on) and chance != 0


def _argument(node: fx.Node, names: tuple[str, ...], position: int, default: Any) -> Any:
    """An argument by its position or name."""
    if position < len(node.args):
        return node.args[position]
    return next((node.kwargs[name] for name in names if name in node.kwargs), default)
