"""Batch normalisations of other libraries that are PyTorch's with more around it, such as timm's
with an activation: the normalisation is PyTorch's operator, the rest is traced."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import nn

from harness.runtime.tracing.patches import has_own_hooks, replaced

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


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
        module._buffers["num_batches_tracked"] = counter.clone()
    try:
        with replaced(F, "batch_norm", redirected):
            yield
    finally:
        if counter is not None:
            module._buffers["num_batches_tracked"] = counter
