"""The data type of training: autocast, loss scaling, and tensor cores for fp32."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from harness.domain.reduce_dtype import REDUCED_BYTES
from harness.errors import ConfigError

# Data types of autocast; parameters and optimizer state stay fp32.
NARROW_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
# Least compute capability of GPUs with hardware for a dtype; others emulate it or compute in fp32.
_CAPABILITY = {"tf32": (8, 0), "bf16": (8, 0), "fp16": (5, 3)}


class Precision:
    """Autocast for a step's forward, and loss scaling for fp16."""

    def __init__(self, dtype: str, device: torch.device) -> None:
        self.dtype = dtype
        self._device_type = device.type
        self.scaler = torch.amp.GradScaler(device.type, enabled=dtype == "fp16")

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The context of forward and loss."""
        if self.dtype not in NARROW_DTYPES:
            return contextlib.nullcontext()
        return torch.autocast(self._device_type, NARROW_DTYPES[self.dtype])

    def transfer_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Dtype in which a value of `dtype` is sent: autocast's for fp32, else its own."""
        if dtype == torch.float32 and self.dtype in NARROW_DTYPES:
            return NARROW_DTYPES[self.dtype]
        return dtype


def has_gradients(tensor: Tensor) -> bool:
    """Whether a tensor is real or complex, so that it may require a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


class Float32Watch(TorchDispatchMode):
    """Whether any operator in the block makes a float32 tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.is_seen = False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        self.is_seen |= isinstance(made, Tensor) and made.dtype == torch.float32
        return made


def sent_bytes(tensor: Tensor, reduce_dtype: str) -> int:
    """Bytes of a gradient as its sum over ranks is sent."""
    is_fp32 = tensor.dtype == torch.float32
    return round(tensor.nbytes * REDUCED_BYTES[reduce_dtype]) if is_fp32 else tensor.nbytes


def wire_bytes_per_fp32_byte(dtype: str) -> float:
    """Bytes sent between devices per byte of a float32 value."""
    return NARROW_DTYPES.get(dtype, torch.float32).itemsize / torch.float32.itemsize


def reduced(gradients: Tensor, reduce_dtype: str) -> Tensor:
    """Gradients as their sum over ranks takes them: fp32 ones rounded to bf16 if that is
    `reduce_dtype`. To int8 they are rounded on their way (`ranks.quantized_sums`)."""
    is_fp32 = gradients.dtype == torch.float32
    return gradients.to(NARROW_DTYPES.get(reduce_dtype, torch.float32)) if is_fp32 else gradients


@contextlib.contextmanager
def repeatable(device: torch.device) -> Iterator[None]:
    """Use kernels that give equal bits in each run in the block, where the GPU has such."""
    if device.type != "cuda":
        yield
        return
    cudnn: Any = torch.backends.cudnn
    deterministic: Any = torch.utils.deterministic
    mode = torch.get_deterministic_debug_mode()
    before = cudnn.benchmark, cudnn.deterministic, deterministic.fill_uninitialized_memory
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about operators that have no such kernel
            cudnn.benchmark, cudnn.deterministic = False, True
            deterministic.fill_uninitialized_memory = False
            torch.set_deterministic_debug_mode("warn")
            yield
    finally:
        cudnn.benchmark, cudnn.deterministic, deterministic.fill_uninitialized_memory = before
        torch.set_deterministic_debug_mode(mode)


def lack_of(dtype: str, device: torch.device) -> str:
    """Why a GPU has no hardware for a dtype; empty if it has, and for a CPU."""
    if device.type != "cuda":
        return ""
    found, needed = torch.cuda.get_device_capability(device), _CAPABILITY.get(dtype, (0, 0))
    if found >= needed:
        return ""
    needs, has = (f"{major}.{minor}" for major, minor in (needed, found))
    return f"needs compute capability {needs}, this GPU has {has}"


def set_tensor_cores(dtype: str, device: torch.device) -> None:
    """Enable TF32 for dtype tf32 only; PyTorch's default enables it for convolutions.

    Also lets cuDNN benchmark its convolution algorithms at the first step of each shape, because
    the use of tensor cores depends on the algorithm and the dtype.

    Raises:
        ConfigError: the device is a GPU without hardware for the dtype.
    """
    if reason := lack_of(dtype, device):
        raise ConfigError(
            f"--dtype {dtype} {reason} ({torch.cuda.get_device_name(device)}): use fp32, or fp16 "
            "where all GPUs have it, or leave this GPU out"
        )
    torch.backends.cuda.matmul.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.allow_tf32 = dtype == "tf32"
    torch.backends.cudnn.benchmark = True
