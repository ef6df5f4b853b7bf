"""Run modules as in evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from harness.runtime.tracing.constructs import function_name

_DROPOUTS = {
    "dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout",
    "feature_alpha_dropout",
}  # fmt: skip


class _WithoutDropout(TorchFunctionMode):
    """Calls dropouts and attentions that a trace has called as in training without dropout."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = function_name(func), kwargs or {}
        if name == "scaled_dot_product_attention" and len(args) > 4:
            args = *args[:4], 0.0, *args[5:]
        elif name == "scaled_dot_product_attention":
            kwargs = {**kwargs, "dropout_p": 0.0}
        elif name in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        return func(*args, **kwargs)


@contextmanager
def evaluating(roots: Iterable[nn.Module]) -> Iterator[None]:
    """Run modules as in evaluation, also functions that their traces call as in training, and
    without compiling them."""
    trained = [module for root in roots for module in root.modules() if module.training]
    for module in trained:
        module.training = False
    try:
        with torch.compiler.set_stance("force_eager"), _WithoutDropout():
            yield
    finally:
        for module in trained:
            module.training = True
