"""Run a model in float64, where a difference between model and graph is no rounding error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode


def widened(tensor: Tensor) -> Tensor:
    """Convert a floating-point tensor to float64; return others unchanged."""
    return tensor.double() if tensor.is_floating_point() else tensor


class Narrowing(TorchFunctionMode):
    """Detects results below 64 bits, and autocast, which does not cast float64."""

    def __init__(self) -> None:
        super().__init__()
        self.is_detected = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        is_narrow = isinstance(result, Tensor) and result.dtype in (
            torch.float32, torch.bfloat16, torch.float16,
        )  # fmt: skip
        self.is_detected |= is_narrow or torch.is_autocast_enabled(_device_type(result))
        return result


def _device_type(result: Any) -> str:
    return result.device.type if isinstance(result, Tensor) else "cpu"


@contextmanager
def in_float64(*roots: nn.Module) -> Iterator[None]:
    """Convert parameters and buffers to float64 in the block; restore their data at its end."""
    tensors = {id(t): t for root in roots for t in (*root.parameters(), *root.buffers())}
    wide = [t for t in tensors.values() if t.is_floating_point()]
    before = [t.data for t in wide]
    try:
        for tensor in wide:
            tensor.data = tensor.data.double()
        yield
    finally:
        for tensor, data in zip(wide, before, strict=True):
            tensor.data = data
