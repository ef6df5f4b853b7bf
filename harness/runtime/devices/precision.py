"""What a dtype means for training: autocast, loss scaling, and tensor cores for fp32."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

# Parameters and optimizer state stay fp32; these are what autocast computes in.
_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}
DTYPES = ("fp32", "tf32", "bf16", "fp16")


class Precision:
    """Computes a step's forward in one dtype and scales its loss where that needs it."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.dtype = dtype
        self._device_type = device.type
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of forward and loss."""
        if self.dtype not in _AUTOCAST:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, _AUTOCAST[self.dtype])

    def transfer_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What a value of `dtype` travels as between devices: under autocast its dtype."""
        if dtype == torch.float32 and self.dtype in _AUTOCAST:
            return _AUTOCAST[self.dtype]
        return dtype


def wire_bytes_per_fp32_byte(dtype: str) -> float:
    """How many bytes travel between devices for each byte of a float32 value."""
    return _AUTOCAST.get(dtype, torch.float32).itemsize / torch.float32.itemsize


def set_tensor_cores(dtype: str) -> None:
    """Let fp32 products use TF32 only when asked to; convolutions would by PyTorch's default.

    Of cuDNN's ways to compute a convolution it takes the fastest, too, which it finds out in the
    first step of each shape: which of them can use tensor cores depends on the dtype.
    """
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.benchmark = True
